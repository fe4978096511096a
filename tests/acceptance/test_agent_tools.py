"""Tools of agents that run as Celery tasks, and as code in named sessions, on a real worker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.exceptions import WorkerLostError

from capsule_tasks import Capsule, Execution, History, Runner, SyncHistory
from capsule_tasks.client.redis_location import needed_redis_url
from capsule_tasks.client.runs.handle import RunHandle
from capsule_tasks.client.runs.stores import sync_run_store
from capsule_tasks.client.steps import Steps
from capsule_tasks.client.tools import code, code_tool, task_tool
from capsule_tasks.client.tools.following import execution_id
from capsule_tasks.errors import CodeNotRun, EffectUncertain, RunCancelled, WrongArguments
from capsule_tasks.protocol.events import Accepted, AttemptClaimed
from capsule_tasks.protocol.messages import RunEvent
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import ToolContext
from capsule_tasks.runs.agents.tools import Tool
from capsule_tasks.runs.engine.results import RunResult
from capsule_tasks.runs.records import CodeSession
from capsule_tasks.runs.state import RunState
from capsule_tasks.testing.models import ScriptedModel, calls
from capsule_tasks.testing.servers import PrivateServer
from tests.acceptance.others.agent_app import declare_tasks
from tests.acceptance.workers import HANG_S, Worker, eventually, unique

APP = "tests.acceptance.others.agent_app"
LEASE_S = 2.0
AGENT = Agent(name="tester")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker on a server of this module's own, since a host takes whatever session is wanted."""
    with (
        PrivateServer(tmp_path_factory.mktemp("redis")) as server,
        Worker(
            server.url,
            tmp_path_factory.mktemp("worker"),
            app=APP,
            concurrency=3,
            TEST_CONF=json.dumps({"capsule_lease_s": LEASE_S}),
        ) as worker,
    ):
        yield worker


@pytest.fixture(scope="module")
def tasks(worker: Worker) -> SimpleNamespace:
    return declare_tasks(worker.app)


@pytest.fixture(scope="module")
def capsule(worker: Worker) -> Capsule:
    return Capsule(worker.app)


class Call(ToolContext):
    """A tool call of a run in this process, with the events that it publishes."""

    def __init__(self, *, run_id: str | None = None, **fields: Any) -> None:
        run_id = unique() if run_id is None else run_id
        self.events: list[tuple[str, Any]] = []
        super().__init__(
            run_id=run_id,
            agent=AGENT,
            tool="bare:tool",
            call_id="call_1",
            key="call_1",
            arguments="",
            publish=lambda kind, data: self.events.append((kind, data)),
            **fields,
        )

    def again(self) -> Call:
        """The same call, made by whoever goes on with the run after a process was lost."""
        return Call(run_id=self.run_id, session_id=self.session_id, is_repeat=True)

    def of(self, kind: str) -> list[Any]:
        return [data for each, data in self.events if each == kind]


def made(tool: Tool, call: ToolContext, **arguments: Any) -> Any:
    return asyncio.run(_made(tool, call, arguments))


async def _made(tool: Tool, call: ToolContext, arguments: dict[str, Any]) -> Any:
    async with asyncio.timeout(HANG_S):
        return await tool.invoke(call, json.dumps(arguments))


async def heard(worker: Worker, mark: str) -> None:
    await asyncio.to_thread(worker.heard, mark)


async def cut(worker: Worker, tool: Tool, call: ToolContext, key: str) -> None:
    """Make a call and cancel it while its task holds."""
    making = asyncio.create_task(_made(tool, call, {"key": key}))
    await heard(worker, key)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making


def effects(worker: Worker, key: str) -> int:
    return int(worker.app.backend.client.llen(f"effects:{key}"))


# --- tasks ---------------------------------------------------------------------------------------


def test_the_result_of_a_task_is_the_output_and_its_events_are_those_of_the_run(
    tasks: SimpleNamespace,
) -> None:
    tool, call = task_tool(tasks.multiply), Call()
    assert tool.name == "multiply"
    assert tool.description == "Multiply two numbers."
    assert tool.parameters["properties"]["a"]["description"] == "The first of them."
    assert made(tool, call, a=21) == "42"
    about = {"tool": "bare:tool", "call_id": "call_1"}
    (execution,) = call.of("tool_execution")
    assert execution == about | {"execution": execution_id(call)}
    pieces = call.of("tool_text")
    assert "".join(piece.pop("text") for piece in pieces) == "21 times 2\n"
    assert all(piece == about for piece in pieces)
    assert call.of("tool_progress") == [about | {"done": 1.0, "total": 2.0, "note": "half"}]


def test_arguments_that_do_not_fit_are_refused_before_a_task_is_sent(
    tasks: SimpleNamespace,
) -> None:
    call = Call()
    with pytest.raises(WrongArguments):
        made(task_tool(tasks.multiply), call, a="many")
    assert call.events == []


def test_the_error_of_a_task_is_that_of_its_tool(tasks: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="a dud"):
        made(task_tool(tasks.explode), Call(), why="a dud")


def test_a_task_without_a_result_says_so(tasks: SimpleNamespace) -> None:
    output = made(task_tool(tasks.forget), Call(), key="keys")
    assert output == "The task has succeeded. Its result is not kept; it was 'forgot keys'."


def test_a_repeated_call_reads_the_result_of_the_task_that_ended(
    worker: Worker, tasks: SimpleNamespace
) -> None:
    tool, call, key = task_tool(tasks.hold), Call(), unique()
    worker.go(key)
    assert made(tool, call, key=key) == f"held {key}"
    assert made(tool, call.again(), key=key) == f"held {key}"
    assert effects(worker, key) == 1


def test_a_repeated_call_waits_for_the_task_that_runs(
    worker: Worker, tasks: SimpleNamespace
) -> None:
    tool, call, key = task_tool(tasks.hold), Call(run_id=_durable_run(worker)), unique()

    async def cut_and_repeated() -> Any:
        await cut(worker, tool, call, key)
        again = asyncio.create_task(_made(tool, call.again(), {"key": key}))
        worker.go(key)
        return await again

    assert asyncio.run(cut_and_repeated()) == f"held {key}"
    assert effects(worker, key) == 1


def _durable_run(worker: Worker) -> str:
    """A run that goes on, and whose tools are only cut."""
    from capsule_tasks.client.runs.stores import sync_run_store

    run_id = unique()
    with sync_run_store(worker.app) as store:
        store.create(run_id, run_id, b"{}", schema="test/1", agent="tester")
    return run_id


@pytest.mark.parametrize("is_durable", [False, True], ids=["in process", "durable"])
def test_a_task_is_cancelled_with_its_run(
    worker: Worker, capsule: Capsule, tasks: SimpleNamespace, is_durable: bool
) -> None:
    call, key = Call(run_id=_durable_run(worker) if is_durable else None), unique()

    async def cut() -> None:
        making = asyncio.create_task(_made(task_tool(tasks.hold), call, {"key": key}))
        await heard(worker, key)
        if is_durable:
            await capsule.runs.get(call.run_id).acancel()
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making

    asyncio.run(cut())
    execution = capsule.app.AsyncResult(execution_id(call))
    eventually(lambda: execution.state == "REVOKED", "the end of the task")


def test_a_task_is_cancelled_when_its_time_is_over(worker: Worker, tasks: SimpleNamespace) -> None:
    call, key = Call(run_id=_durable_run(worker)), unique()

    async def cut_and_repeated() -> None:
        await cut(worker, task_tool(tasks.hold), call, key)
        limited = task_tool(tasks.hold, timeout_s=0.2)
        why = r"tools\.hold took longer than 0\.2 s: it was cancelled"
        with pytest.raises(TimeoutError, match=why):
            await _made(limited, call.again(), {"key": key})

    asyncio.run(cut_and_repeated())
    result = worker.app.AsyncResult(execution_id(call))
    eventually(lambda: result.state == "REVOKED", "the end of the task")  # just after its event


def test_a_task_that_no_worker_takes_never_runs_after_its_time(tasks: SimpleNamespace) -> None:
    tool = task_tool(tasks.multiply, timeout_s=0.2, queue=unique())
    with pytest.raises(TimeoutError, match="it had not started, and was cancelled"):
        made(tool, Call(), a=1)


@pytest.mark.parametrize("was_published", [False, True], ids=["not sent", "sent"])
def test_a_call_whose_process_was_lost_as_it_sent_has_one_effect(
    worker: Worker, tasks: SimpleNamespace, was_published: bool
) -> None:
    """Its message may still come: it is revoked, and one under another id takes its place."""
    tool, call, key = task_tool(tasks.hold), Call(), unique()
    steps = Steps(needed_redis_url(worker.app), execution_id=execution_id(call))

    def lost(_task_id: str, _arguments: str) -> None:
        raise KeyboardInterrupt

    arguments = json.dumps({"key": key})
    with pytest.raises(KeyboardInterrupt):
        steps.step("send 0", lost, execution_id(call), arguments)
    worker.go(key)
    again = call.again()
    assert made(tool, again, key=key) == f"held {key}"
    if was_published:  # by a process that stood still meanwhile
        late = tasks.hold.apply_async(
            kwargs={"key": key}, task_id=execution_id(call), queue=worker.queue
        )
        eventually(lambda: late.state == "REVOKED", "the end of the late message")
    (execution,) = again.of("tool_execution")
    assert execution["execution"] == execution_id(call, 1)
    assert effects(worker, key) == 1


def test_a_call_gives_up_when_process_after_process_is_lost(
    worker: Worker, tasks: SimpleNamespace
) -> None:
    call = Call()
    steps = Steps(needed_redis_url(worker.app), execution_id=execution_id(call))

    def lost(_task_id: str, _arguments: str) -> None:
        raise KeyboardInterrupt

    for number in range(5):
        with pytest.raises(KeyboardInterrupt):
            steps.step(f"send {number}", lost, execution_id(call, number), '{"a": 1}')
    with pytest.raises(EffectUncertain, match="5 processes were lost"):
        made(task_tool(tasks.multiply), call.again(), a=1)


# --- code ----------------------------------------------------------------------------------------


def test_code_runs_in_the_session_of_the_history(capsule: Capsule) -> None:
    tool, first = code_tool(capsule.app), Call(session_id=unique())
    assert made(tool, first, code="n = 41\nprint('set')") == "set\n"
    assert first.code == CodeSession(
        session_id=first.session_id or "", profile="sandbox", last_call=1
    )
    second = Call(session_id=first.session_id, code=first.code)
    assert made(tool, second, code="print('more')\nn + 1") == "more\n42"
    assert second.code is not None
    assert second.code.last_call == 2
    assert capsule.session(first.session_id or "").execute("n").get(timeout=HANG_S) == 41


def test_a_repeated_call_of_code_runs_nothing_twice(capsule: Capsule) -> None:
    tool, call = code_tool(capsule.app), Call(session_id=unique())
    source = "n = globals().get('n', 0) + 1\nprint('once')\nn"
    assert made(tool, call, code=source) == "once\n1"
    assert made(tool, call.again(), code=source) == "once\n1"
    assert made(tool, Call(session_id=call.session_id), code="n") == "1"


def test_the_error_of_code_is_told_with_its_traceback(capsule: Capsule) -> None:
    output = made(code_tool(capsule.app), Call(), code="print('before')\n1 / 0")
    assert output.startswith("before\nTraceback")
    assert output.endswith("ZeroDivisionError: division by zero")


def test_code_that_asks_gets_the_end_of_its_input(capsule: Capsule) -> None:
    output = made(code_tool(capsule.app), Call(), code="input('who? ')")
    assert "EOFError" in output


def test_output_without_end_is_cut_in_its_middle(capsule: Capsule) -> None:
    tool = code_tool(capsule.app, max_output_chars=100)
    output = made(tool, Call(), code="print('a' * 500); print('b' * 500); 'c' * 300")
    assert output.startswith("a" * 50 + "\n[")
    assert "characters are left out here]" in output
    assert output.endswith("c" * 50)
    assert len(output) < 400


def test_code_is_stopped_when_its_time_is_over(capsule: Capsule) -> None:
    tool = code_tool(capsule.app, timeout_s=0.5)
    output = made(tool, Call(), code="while True: pass")
    assert output.endswith("longer than 0.5 s"), output


def test_a_model_is_told_of_names_that_were_lost(capsule: Capsule) -> None:
    tool, first = code_tool(capsule.app), Call(session_id=unique())
    session_id = first.session_id or ""
    made(tool, first, code="kept = 1\nlost = (each for each in [])")
    capsule.session(session_id).checkpoint()
    made(tool, Call(session_id=session_id), code="later = 1")
    with pytest.raises(WorkerLostError):
        made(tool, Call(session_id=session_id), code="import os; os._exit(1)")
    call = Call(session_id=session_id)
    output = made(tool, call, code="sorted({'kept', 'lost', 'later'} & globals().keys())")
    assert output.startswith("[The session was lost, and restored as it was at ")
    assert "of the calls before this one, the last 2 are lost; not restored are lost.]" in output
    assert output.endswith('\n["kept"]')
    assert call.code is not None
    assert call.code.generation is not None


def test_a_model_is_told_that_a_session_has_begun_anew(capsule: Capsule) -> None:
    tool, first = code_tool(capsule.app), Call(session_id=unique())
    made(tool, first, code="n = 1")
    capsule.session(first.session_id or "").close()
    second = Call(session_id=first.session_id, code=first.code)
    output = made(tool, second, code="'n' in globals()")
    assert output.startswith("[The session has begun anew"), (first.code, second.code)
    assert output.endswith("false"), (first.code, second.code)


def test_code_that_no_worker_hosts_is_refused(
    capsule: Capsule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "NO_HOST_S", 0.1)
    call = Call(session_id=unique())
    with pytest.raises(CodeNotRun, match="no worker hosts named sessions of profile 'strange'"):
        made(code_tool(capsule.app, profile="strange"), call, code="1")
    events = Execution(execution_id(call), app=capsule.app).events()
    assert [str(event.message.outcome) for event in events][-1] == "cancelled"


# --- durable runs --------------------------------------------------------------------------------


def outputs(run: RunHandle, history: str) -> dict[str, Any]:
    """The outputs of the calls of a run, by their ids."""
    with SyncHistory(history, needed_redis_url(run.app)) as items:
        return {
            item["call_id"]: item["output"]
            for item in items.get_items()
            if item.get("type") == "function_call_output"
        }


def told(run: RunHandle, kind: str) -> list[Any]:
    messages = [event.message for event in run.events()]
    return [each.data for each in messages if isinstance(each, RunEvent) and each.kind == kind]


def test_a_durable_run_calls_tasks_and_code(capsule: Capsule) -> None:
    session = unique()
    run = capsule.runs.start("calculator", "go", session=session)
    assert run.result(timeout_s=HANG_S) == "done"
    made = outputs(run, session)
    assert (made["c1"], made["c2"], made["c4"]) == ("42", "n is 40\n", "42")
    assert made["c3"] == "The tool failed: ValueError: a dud"
    texts = dict.fromkeys(("c1", "c2"), "")
    for each in told(run, "tool_text"):
        texts[each["call_id"]] += each["text"]
    assert texts == {"c1": "6 times 7\n", "c2": "n is 40\n"}
    assert capsule.session(session).execute("n").get(timeout=HANG_S) == 40
    with sync_run_store(capsule.app) as store:
        code = RunState.from_string(store.read(run.id).snapshot).code
    assert code == CodeSession(session_id=session, profile="sandbox", last_call=2)
    assert [event.kind for event in _run_events(run)][:2] == ["run_claimed", "agent"]


def test_a_run_in_process_calls_tasks_and_code(
    worker: Worker, capsule: Capsule, tasks: SimpleNamespace
) -> None:
    model = ScriptedModel(
        [
            calls("multiply", {"a": 6, "b": 7}, "c1"),
            calls("run_python", {"code": "n = 40\nn + 2"}, "c2"),
            "done",
        ]
    )
    tools = [task_tool(tasks.multiply), code_tool(capsule.app)]
    agent = Agent(name="calculator", model=model, tools=list(tools))

    async def run() -> RunResult:
        async with History(unique(), needed_redis_url(worker.app)) as history:
            stream = Runner.run_streamed(agent, "go", session=history)
            kinds = [event.kind async for event in stream.events()]
            assert {"tool_execution", "tool_text"} <= set(kinds)
            return await stream.result()

    result = asyncio.run(run())
    assert result.final_output == "done"
    assert [item["output"] for item in result.items if "output" in item] == ["42", "42"]
    assert result.state.code is not None
    assert result.state.code.last_call == 1


def _run_events(run: RunHandle) -> list[RunEvent]:
    messages = [event.message for event in run.events()]
    return [each for each in messages if isinstance(each, RunEvent)]


def driver_of(run: RunHandle) -> int:
    """The process that drives a run."""
    messages = [event.message for event in run.execution.tail()]
    return [each.pid for each in messages if isinstance(each, Accepted)][-1]


def test_a_run_whose_process_is_killed_waits_for_its_task(worker: Worker, capsule: Capsule) -> None:
    key = unique()
    run = capsule.runs.start("holder", key)
    worker.heard(key)
    os.kill(driver_of(run), signal.SIGKILL)
    worker.go(key)
    assert run.result(timeout_s=HANG_S) == "done"
    assert outputs(run, run.id) == {"c1": f"held {key}"}
    assert effects(worker, key) == 1
    claims = [event for event in run.events() if isinstance(event.message, AttemptClaimed)]
    assert len(claims) == 2
    assert len({each["execution"] for each in told(run, "tool_execution")}) == 1


def test_a_run_that_is_cancelled_cancels_its_task(worker: Worker, capsule: Capsule) -> None:
    key = unique()
    run = capsule.runs.start("holder", key)
    worker.heard(key)
    [execution] = [each["execution"] for each in _told_so_far(run, "tool_execution")]
    run.cancel()
    with pytest.raises(RunCancelled):
        run.result(timeout_s=HANG_S)
    result = worker.app.AsyncResult(execution)
    eventually(lambda: result.state == "REVOKED", "the end of the task")


def _told_so_far(run: RunHandle, kind: str) -> list[Any]:
    def look() -> list[Any]:
        messages = [event.message for event in run.execution.tail()]
        return [each.data for each in messages if isinstance(each, RunEvent) and each.kind == kind]

    found: list[Any] = eventually(look, f"an event {kind}")
    return found
