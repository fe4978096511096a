"""`celery capsule runs …`, as a person and as a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from capsule_tasks import Capsule
from capsule_tasks.cli import capsule
from capsule_tasks.client.cancelling import requester
from capsule_tasks.client.runs.handle import RunHandle
from capsule_tasks.client.runs.messages import RUN_TASK
from capsule_tasks.client.runs.stores import run_store, sync_run_store
from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.durable import RunFailure, ToolCall
from capsule_tasks.durable.settling import request_to_settle
from capsule_tasks.protocol.events import AttemptEnded, Ended, Outcome, encode_event
from capsule_tasks.protocol.messages import RunEvent
from capsule_tasks.storage import RunStore, RunUsage
from tests.acceptance.workers import close, producer
from tests.attempts import append, claim
from tests.integration.parked_runs import LEASE, WORKER, asks, ended, parked


@pytest.fixture
def app(valkey_url: str, prefix: str) -> Iterator[Celery]:
    app = producer(valkey_url, f"q-{prefix}", capsule_prefix=prefix)
    with sync_run_store(app) as store, store.lease(WORKER, LEASE).keep():
        yield app
    watch_thread.stop()
    close(app)


Stage = Callable[..., RunHandle]


@pytest.fixture
def stage(app: Celery) -> Stage:
    """Brings a run to a state by hand: `stage(parked, asks("call_1"))`."""

    def run(
        scene: Callable[..., Coroutine[Any, Any, RunHandle]], *parts: Any, **options: Any
    ) -> RunHandle:
        async def perform() -> RunHandle:
            async with run_store(app) as store:
                return await scene(Capsule(app), store, *parts, **options)

        return asyncio.run(perform())

    return run


def invoked(app: Celery, *words: str) -> Result:
    context = CLIContext(app, no_color=True, workdir=None)
    return CliRunner().invoke(capsule, ["runs", *words], obj=context)


def typed(app: Celery, *words: str, status: int = 0) -> str:
    done = invoked(app, *words)
    assert done.exit_code == status, (done.output, done.exc_info)
    return done.output


def test_runs_are_listed(app: Celery, stage: Stage) -> None:
    done = stage(ended, result="Refunded.")
    waits = stage(parked, asks("call_1"), session="user-1")
    first, second = typed(app, "list").splitlines()
    assert first.startswith(f"{waits.id}: agent support, interrupted since 20")
    assert first.endswith(", 1 turn, waits for 1 call")
    assert second.startswith(f"{done.id}: agent support, completed since 20")
    for option in (("--status", "interrupted"), ("--session", "user-1"), ("--limit", "1")):
        assert typed(app, "list", *option).startswith(waits.id), option
    assert typed(app, "list", "--agent", "sales") == ""
    lines = [json.loads(line) for line in typed(app, "list", "--json").splitlines()]
    assert [each["id"] for each in lines] == [waits.id, done.id]
    assert lines[1]["output"] == "Refunded."
    assert "Invalid value for '--status'" in typed(app, "list", "--status", "parked", status=2)


def test_calls_that_wait_are_listed(app: Celery, stage: Stage) -> None:
    run = stage(parked, asks("call_1", may_decide=("ops",)))
    row = typed(app, "pending")
    start = f'{run.id}: call_1: bare:refund {{"euros": 9}}, of helper, for ops, asked 20'
    assert row.startswith(start)
    assert typed(app, "pending", "--tool", "refund", "--agent", "helper") == row
    assert typed(app, "pending", "--tool", "mail") == ""
    found = json.loads(typed(app, "pending", "--json"))
    assert (found["id"], found["call_id"], found["kind"]) == (run.id, "call_1", "approval")


def test_a_run_is_shown_with_what_it_waits_for_and_has_used(app: Celery, stage: Stage) -> None:
    async def used(capsule: Capsule, store: RunStore) -> RunHandle:
        run = await parked(capsule, store, asks("call_1"), session="user-1")
        await run.aapprove("call_1")
        claimed = await store.claim(run.id, WORKER)
        usage = RunUsage(requests=3, input_tokens=70, output_tokens=8, time_ms=2500)
        requests = [asks("call_2")]
        await store.commit(
            claimed, b"", turn=2, status="interrupted", approval_requests=requests, usage=usage
        )
        return run

    run = stage(used)
    shown = typed(app, "show", run.id)
    assert "agent       support\n" in shown
    assert "session     user-1\n" in shown
    assert "status      interrupted\n" in shown
    assert "owner       none: no worker drives it now\n" in shown
    assert "used        3 requests, 70 tokens in, 8 out, 2.50 s\n" in shown
    assert 'waits for   call_2: bare:refund {"euros": 9}, of helper\n' in shown
    record = json.loads(typed(app, "--json", "show", run.id))
    assert record["usage"] == {
        "requests": 3,
        "input_tokens": 70,
        "output_tokens": 8,
        "time_ms": 2500,
    }


def test_a_run_that_has_ended_is_shown_with_its_end(app: Celery, stage: Stage) -> None:
    run = stage(ended, result={"refunded": 9})
    shown = typed(app, "show", run.id)
    assert 'output   {"refunded":9}\n' in shown
    assert "owner" not in shown
    none = {"requests": 0, "input_tokens": 0, "output_tokens": 0, "time_ms": 0}
    assert json.loads(typed(app, "show", run.id, "--json"))["usage"] == none
    run = stage(ended, "failed", error=RunFailure("tool", "ValueError", "no \x1b[2J\nmoney"))
    assert "failure  tool: ValueError: no money\n" in typed(app, "show", run.id)


def test_calls_are_approved_and_rejected(app: Celery, stage: Stage) -> None:
    run = stage(parked, asks("call_1"), asks("call_2"), asks("call_3"))
    assert typed(app, "approve", run.id, "call_1", "--by", "ann") == (
        f"{run.id}: call_1 approved, queued\n"
    )
    again = typed(app, "reject", run.id, "call_1", status=1)
    assert again == "Error: call 'call_1' already has a decision: approved by ann\n"
    shown = typed(app, "reject", run.id, "call_2", "-m", "too much", "--always", "--json")
    assert json.loads(shown) == {
        "id": run.id,
        "call_id": "call_2",
        "decision": "rejected",
        "status": "queued",
    }
    assert typed(app, "approve", run.id, "call_9", status=1).startswith("Error: call 'call_9'")


def test_roles_of_a_person_count(app: Celery, stage: Stage) -> None:
    run = stage(parked, asks("call_1", may_decide=("ops",)))
    assert "allowed: ops" in typed(app, "approve", run.id, "call_1", status=1)
    assert typed(app, "approve", run.id, "call_1", "--role", "dev", "--role", "ops")


def test_an_uncertain_call_is_settled(app: Celery, stage: Stage) -> None:
    call = ToolCall("call_1", "bare:refund", "helper", '{"euros": 9}')
    run = stage(parked, request_to_settle(call, 1_700_000_000_000))
    shown = "call_1 may have been made, to be settled: bare:refund"
    assert shown in typed(app, "show", run.id)
    assert "say --made or --not-made" in typed(app, "settle", run.id, "call_1", status=2)
    wrong = typed(app, "settle", run.id, "call_1", "--made", "--output", "{", status=2)
    assert "--output '{' is not JSON" in wrong
    settled = typed(app, "settle", run.id, "call_1", "--made", "--output", '{"ok": true}')
    assert settled == f"{run.id}: call_1 made, queued\n"


def test_runs_are_cancelled(app: Celery, stage: Stage) -> None:
    waits, done = stage(parked, asks("call_1")), stage(ended)
    assert typed(app, "cancel", waits.id, done.id, "nobody", status=1) == (
        f"{waits.id}: cancelled\n{done.id}: completed\nnobody: unknown\n"
    )
    again = typed(app, "cancel", waits.id, "--json")
    assert json.loads(again) == {"id": waits.id, "status": "cancelled"}
    assert f"cancelled  by {requester()}\n" in typed(app, "show", waits.id)


def test_an_unknown_run_is_an_error_in_one_line(app: Celery) -> None:
    for words in (("show",), ("tail",), ("approve", "call_1"), ("settle", "call_1", "--made")):
        shown = typed(app, words[0], "no\x1b[2Jbody", *words[1:], status=1)
        assert shown.startswith("Error: there is no run 'no\\x1b[2Jbody'"), words
        assert shown.count("\n") == 1


# --- tail ----------------------------------------------------------------------------------------


def run_item(event: str, **item: Any) -> RunEvent:
    return RunEvent.of("run_item_stream_event", "helper", {"name": event, "item": item})


def delta(text: str) -> RunEvent:
    data = {"type": "response.output_text.delta", "delta": text}
    return RunEvent.of("raw_response_event", "helper", data)


def message(text: str) -> RunEvent:
    content = [{"type": "output_text", "text": text}]
    return run_item("message_output_created", type="message", content=content)


def published(app: Celery, run: RunHandle, *events: Any, state: str) -> None:
    """The events of one attempt, as a worker publishes them."""

    async def publish() -> None:
        store = (await watch_thread.watcher(app)).store
        claimed = await claim(store, run.id, owner=WORKER, claim="c", task=RUN_TASK)
        packed = [encode_event(event) for event in events]
        outcome = str(Outcome.SUCCEEDED) if state == "ended" else ""
        await append(store, run.id, claimed.attempt, 2, packed, state=state, outcome=outcome)

    watch_thread.call(publish())


def test_a_tail_shows_what_the_agent_says_and_does(app: Celery, stage: Stage) -> None:
    run = stage(ended, result="Done.")
    events = [
        run_item("tool_called", name="look", arguments='{"id": 42}', call_id="call_1"),
        run_item("tool_output", output="an \x1b[2J order", call_id="call_1"),
        RunEvent.of("turn", "helper", {"turn": 1, "status": "running"}),
        delta("Do"),
        delta("ne."),
        message("Done."),
        message("Not streamed."),
        RunEvent.of("agent_updated_stream_event", "second"),
        Ended(outcome=Outcome.SUCCEEDED, result_text="'Done.'"),
    ]
    published(app, run, *events, state="ended")
    done = invoked(app, "tail", run.id)
    assert (done.exit_code, done.stdout) == (0, "Done.\nNot streamed.\n")
    assert done.stderr.splitlines()[1:] == [
        '-- helper calls look {"id": 42}: call_1',
        "-- call_1 returned an order",
        "-- turn 1: running",
        "-- agent_updated_stream_event: second",
        "-- succeeded: 'Done.'",
    ]
    lines = [json.loads(line) for line in typed(app, "tail", run.id, "--json").splitlines()]
    assert lines[1]["data"]["item"]["name"] == "look"


def test_a_tail_shows_agents_of_our_own_engine(app: Celery, stage: Stage) -> None:
    def event(kind: str, /, **data: Any) -> RunEvent:
        return RunEvent.of(kind, "helper", data)

    run = stage(ended, result="Done.")
    of_call = {"tool": "bare:look", "call_id": "call_1"}
    says = {"type": "message", "role": "assistant"}
    events = [
        RunEvent.of("agent", "helper"),
        event("text_delta", text="Let"),
        event("attempt_discarded", why="lost"),
        event("reasoning_delta", text="hm"),
        event("item", type="reasoning", id="rs_1"),
        event("item", type="function_call", name="look", arguments="{}", call_id="call_1"),
        event("tool_started", **of_call, arguments="{}"),
        event("tool_execution", **of_call, execution="e1"),
        event("tool_text", **of_call, text="one\ntwo\x1b[2J\n"),
        event("tool_progress", **of_call, done=1.0, total=2.0, note="half"),
        event("tool_progress", **of_call, done=2.0, total=None, note=""),
        event("item", type="function_call_output", output="an order", call_id="call_1"),
        event("usage", requests=1),
        event("guardrail", kind="output", name="quiet", tripped=False),
        event("guardrail", kind="output", name="polite", tripped=True),
        event("text_delta", text="Done."),
        event("item", **says, content=[{"type": "output_text", "text": "Done."}]),
        event("item", **says, content=[{"type": "output_text", "text": "More."}]),
        Ended(outcome=Outcome.SUCCEEDED, result_text="'Done.'"),
    ]
    published(app, run, *events, state="ended")
    done = invoked(app, "tail", run.id)
    assert (done.exit_code, done.stdout) == (0, "Let\nDone.\nMore.\n")
    assert done.stderr.splitlines()[1:] == [
        "-- agent: helper",
        "-- helper begins its reply again",
        "-- helper calls look {}: call_1",
        "-- call_1 is execution e1",
        "-- call_1: one",
        "-- call_1: two",
        "-- call_1: 1 of 2 half",
        "-- call_1: 2",
        "-- call_1 returned an order",
        "-- guardrail polite tripped",
        "-- succeeded: 'Done.'",
    ]


def test_a_tail_says_what_a_run_waits_for_and_how_to_answer(app: Celery, stage: Stage) -> None:
    run = stage(parked, asks("call_1"))
    published(app, run, AttemptEnded(outcome="parked"), state="waiting")
    done = invoked(app, "tail", run.id, "--no-wait")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-3:] == [
        '-- waits for call_1: bare:refund {"euros": 9}, of helper',
        f"-- celery capsule runs approve {run.id} call_1",
        f"-- celery capsule runs reject {run.id} call_1",
    ]


def test_a_tail_of_a_run_that_has_not_started_says_so(app: Celery) -> None:
    run = Capsule(app).runs.start("support", "hello")
    done = invoked(app, "tail", run.id, "--no-wait")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"-- {run.id}: agent support, queued since 20")
