"""Handles of runs: what people see of a run, and what they decide about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from celery import Celery

from capsule_tasks import Capsule
from capsule_tasks.client.cancelling import requester
from capsule_tasks.client.runs.handle import RunHandle
from capsule_tasks.client.runs.messages import RUN_TASK
from capsule_tasks.client.runs.stores import run_store
from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.durable import RunFailure, ToolCall
from capsule_tasks.durable.settling import request_to_settle
from capsule_tasks.errors import (
    AlreadyDecided,
    CapsuleError,
    DecisionExpired,
    InvalidId,
    InvalidSetting,
    MayNotDecide,
    RunCancelled,
    RunEnded,
    RunFailed,
    RunNotFound,
    RunTimeout,
    UnknownCall,
)
from capsule_tasks.protocol.events import AttemptEnded, encode_event
from capsule_tasks.storage import RunStore, RunUsage
from tests.acceptance.workers import close, producer
from tests.attempts import append, claim
from tests.integration.parked_runs import LEASE, WORKER, asks, ended, parked


@pytest.fixture
async def capsule(valkey_url: str, prefix: str) -> AsyncIterator[Capsule]:
    app = producer(valkey_url, f"q-{prefix}", capsule_prefix=prefix)
    yield Capsule(app)
    watch_thread.stop()
    close(app)


@pytest.fixture
async def store(capsule: Capsule) -> AsyncIterator[RunStore]:
    async with run_store(capsule.app) as store, store.lease(WORKER, LEASE).keep():
        yield store


def messages_of(app: Celery) -> list[str]:
    """The ids of the messages that wait, which are taken."""
    ids = []
    with app.connection_for_read() as connection:
        queue = connection.SimpleQueue(app.conf.task_default_queue)
        while (message := queue.queue.get()) is not None:
            message.ack()
            ids.append(message.headers["id"])
    return ids


async def settling(capsule: Capsule, store: RunStore) -> RunHandle:
    """A run that waits for somebody to find out about its call `call_1`."""
    call = ToolCall("call_1", "bare:refund", "helper", '{"euros": 9}')
    return await parked(capsule, store, request_to_settle(call, 1_700_000_000_000))


async def test_people_see_a_run_and_the_calls_that_it_waits_for(
    capsule: Capsule, store: RunStore
) -> None:
    run = await parked(capsule, store, asks("call_1"), session="user-1")
    state = await run.astate()
    assert (state.run_id, state.agent, state.session_id) == (run.id, "support", "user-1")
    assert (state.status, state.turn, state.is_ended) == ("interrupted", 1, False)
    (call,) = state.waiting
    assert (call.call_id, call.kind, call.tool) == ("call_1", "approval", "bare:refund")
    assert (call.agent, call.arguments) == ("helper", '{"euros": 9}')


async def test_an_approval_sends_the_run_on_once_and_notes_it(
    capsule: Capsule, store: RunStore
) -> None:
    run = await parked(capsule, store, asks("call_1"))
    assert messages_of(capsule.app) == [run.id]
    assert await run.aapprove("call_1") == "queued"
    assert messages_of(capsule.app) == [run.id]
    assert (await store.read(run.id)).unsent_us == 0
    claim = await store.claim(run.id, WORKER)
    assert [each.by for each in claim.decisions.exact] == [requester()]


async def test_a_run_that_was_created_by_hand_is_left_to_whoever_did(
    capsule: Capsule, store: RunStore
) -> None:
    requests = [asks("call_1")]
    await store.create("mine", "mine", b"", schema="1", agent="a", approval_requests=requests)
    assert await capsule.runs.get("mine").aapprove("call_1") == "queued"
    assert messages_of(capsule.app) == []


async def test_of_two_people_one_decides_and_the_other_is_told(
    capsule: Capsule, store: RunStore
) -> None:
    run = await parked(capsule, store, asks("call_1"))
    messages_of(capsule.app)
    answers = await asyncio.gather(
        run.aapprove("call_1", by="ann"),
        run.areject("call_1", by="bob"),
        return_exceptions=True,
    )
    assert [type(each) for each in answers].count(AlreadyDecided) == 1
    assert answers.count("queued") == 1
    assert messages_of(capsule.app) == [run.id]
    winner = "ann" if answers[0] == "queued" else "bob"
    with pytest.raises(AlreadyDecided, match=f"by {winner}"):
        await run.aapprove("call_1", by="cid")


async def test_a_run_that_waits_for_more_is_not_sent(capsule: Capsule, store: RunStore) -> None:
    run = await parked(capsule, store, asks("call_1"), asks("call_2", "bare:mail"))
    messages_of(capsule.app)
    assert await run.aapprove("call_1", always=True) == "queued"
    assert messages_of(capsule.app) == [run.id]
    assert await run.areject("call_2", message="no mails", by="ann") == "queued"
    assert messages_of(capsule.app) == []


async def test_an_uncertain_call_is_settled_by_its_own_id(
    capsule: Capsule, store: RunStore
) -> None:
    run = await settling(capsule, store)
    (call,) = (await run.astate()).waiting
    assert (call.call_id, call.kind, call.tool) == ("call_1", "settle", "bare:refund")
    messages_of(capsule.app)
    with pytest.raises(UnknownCall, match="may have been made: settle it"):
        await run.aapprove("call_1")
    assert await run.asettle("call_1", made=True, output="refunded 9") == "queued"
    assert messages_of(capsule.app) == [run.id]
    with pytest.raises(AlreadyDecided, match=f"by {requester()}"):
        await run.asettle("call_1", made=False, by="bob")


async def test_calls_that_wait_are_listed_over_all_runs(capsule: Capsule, store: RunStore) -> None:
    first = await parked(capsule, store, asks("call_1"))
    second = await settling(capsule, store)
    third = await parked(capsule, store, asks("call_3", "bare:mail"))
    pending = await capsule.runs.apending()
    assert [(call.run_id, call.kind) for call in pending] == [
        (first.id, "approval"),
        (second.id, "settle"),
        (third.id, "approval"),
    ]
    for tool in ("refund", "bare:refund"):
        found = await capsule.runs.apending(tool=tool, agent="helper")
        assert [call.run_id for call in found] == [first.id, second.id]
    assert [call.run_id for call in await capsule.runs.apending(tool="mail")] == [third.id]
    assert await capsule.runs.apending(agent="somebody else") == []
    assert len(await capsule.runs.apending(limit=2)) == 2


async def test_runs_are_listed_by_status_agent_and_session(
    capsule: Capsule, store: RunStore
) -> None:
    done = await ended(capsule, store, result="Refunded.")
    waits = await parked(capsule, store, asks("call_1"), session="user-1")
    new = await capsule.runs.astart("sales", "hello")
    assert [each.run_id for each in await capsule.runs.alist()] == [new.id, waits.id, done.id]
    assert [each.run_id for each in await capsule.runs.alist(status="interrupted")] == [waits.id]
    assert [each.run_id for each in await capsule.runs.alist(agent="sales")] == [new.id]
    assert [each.run_id for each in await capsule.runs.alist(session="user-1")] == [waits.id]
    assert [each.run_id for each in await capsule.runs.alist(limit=1)] == [new.id]
    with pytest.raises(InvalidSetting, match="status = 'parked'"):
        await capsule.runs.alist(status="parked")  # type: ignore[arg-type]


async def test_a_result_is_awaited(capsule: Capsule, store: RunStore) -> None:
    run = await capsule.runs.astart("support", "hello")
    claim = await store.claim(run.id, WORKER)
    waiting = asyncio.create_task(run.aresult(timeout_s=30))
    result, usage = msgspec.json.encode({"refunded": 9}), RunUsage(requests=3)
    await store.commit(claim, b"{}", turn=1, status="completed", result=result, usage=usage)
    assert await waiting == {"refunded": 9}
    assert await run.aresult() == {"refunded": 9}
    state = await run.astate()
    assert (state.output, state.usage) == ({"refunded": 9}, usage)
    assert capsule.runs.get(run.id) == run


async def test_a_result_of_a_run_that_failed_or_was_cancelled_is_an_error(
    capsule: Capsule, store: RunStore
) -> None:
    failure = RunFailure("model", "RateLimit", "too many requests")
    run = await ended(capsule, store, "failed", error=failure)
    with pytest.raises(
        RunFailed, match=r"failed \(model\): RateLimit: too many requests"
    ) as failed:
        await run.aresult()
    assert (failed.value.run_id, failed.value.kind) == (run.id, "model")
    assert (await run.astate()).failure == failure
    run = await capsule.runs.astart("support", "hello")
    assert await run.acancel(by="ann") == "cancelled"
    with pytest.raises(RunCancelled, match="was cancelled by ann"):
        await run.aresult()


async def test_a_wait_for_a_run_that_is_parked_ends_after_its_time(
    capsule: Capsule, store: RunStore
) -> None:
    run = await parked(capsule, store, asks("call_1"))
    with pytest.raises(RunTimeout, match=r"is interrupted after a wait of 0\.01 s"):
        await run.aresult(timeout_s=0.01)


async def test_a_cancel_ends_a_run_that_nobody_drives_and_sends_it(
    capsule: Capsule, store: RunStore
) -> None:
    run = await parked(capsule, store, asks("call_1"))
    messages_of(capsule.app)
    assert await run.acancel() == "cancelled"
    assert messages_of(capsule.app) == [run.id], "a worker ends its task"
    assert await run.acancel() == "cancelled", "safe to repeat"
    assert messages_of(capsule.app) == []
    assert (await run.astate()).cancelled_by == requester()
    assert await capsule.runs.apending() == []


async def test_a_run_that_is_driven_is_cancelled_by_its_owner(
    capsule: Capsule, store: RunStore
) -> None:
    run = await capsule.runs.astart("support", "hello")
    await store.claim(run.id, WORKER)
    assert await run.acancel(by="ann") == "running"
    assert (await run.astate()).cancelled_by == "ann"


async def test_a_decision_after_its_time_sends_the_run_on_and_says_so(
    capsule: Capsule, store: RunStore
) -> None:
    run = await parked(capsule, store, asks("call_1", expires_in_s=0.001))
    messages_of(capsule.app)
    await asyncio.sleep(0.01)
    with pytest.raises(DecisionExpired, match="rejected by expiry"):
        await run.aapprove("call_1")
    assert messages_of(capsule.app) == [run.id]


async def test_those_who_may_decide_are_checked(capsule: Capsule, store: RunStore) -> None:
    run = await parked(capsule, store, asks("call_1", may_decide=("ops",)))
    with pytest.raises(MayNotDecide, match="allowed: ops"):
        await run.aapprove("call_1", by="ann")
    assert await run.aapprove("call_1", by="ann", roles=["ops"]) == "queued"


async def test_a_run_is_cancelled_as_any_execution_is(capsule: Capsule, store: RunStore) -> None:
    run = await parked(capsule, store, asks("call_1"))
    executions = (await watch_thread.watcher(capsule.app)).store
    attempt = await claim(executions, run.id, owner=WORKER, claim="c", task=RUN_TASK)
    end = [encode_event(AttemptEnded(outcome="retried"))]
    await append(executions, run.id, attempt.attempt, 2, end, state="waiting")
    assert await run.execution.acancel() == "pending"
    assert (await run.astate()).status == "cancelled"


METHODS: dict[str, Callable[[RunHandle], Any]] = {
    "state": lambda run: run.astate(),
    "events": lambda run: anext(run.aevents()),
    "approve": lambda run: run.aapprove("call_1"),
    "reject": lambda run: run.areject("call_1"),
    "settle": lambda run: run.asettle("call_1", made=False),
    "cancel": lambda run: run.acancel(),
    "result": lambda run: run.aresult(),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
async def test_an_unknown_run_is_named(capsule: Capsule, method: Any) -> None:
    with pytest.raises(RunNotFound, match="'nothing'"):
        await method(capsule.runs.get("nothing"))


@pytest.mark.parametrize("method", ["approve", "reject", "settle", "cancel"])
async def test_a_run_that_has_ended_is_named(
    capsule: Capsule, store: RunStore, method: str
) -> None:
    run = await ended(capsule, store)
    with pytest.raises(RunEnded, match=f"{run.id!r} has ended: completed"):
        await METHODS[method](run)


@pytest.mark.parametrize("method", ["approve", "reject", "settle"])
async def test_a_call_that_does_not_wait_is_named(
    capsule: Capsule, store: RunStore, method: str
) -> None:
    run = await parked(capsule, store, asks("call_2"))
    with pytest.raises(UnknownCall, match="call 'call_1' waits for no decision"):
        await METHODS[method](run)


@pytest.mark.parametrize(
    ("method", "arguments", "error"),
    [
        ("approve", {"call_id": 7}, "call_id must be of type str, not 7"),
        ("approve", {"call_id": "c", "by": 7}, "by = 7"),
        ("approve", {"call_id": "c", "always": 1}, "always = 1"),
        ("approve", {"call_id": "c", "roles": [7]}, "roles = 7"),
        ("reject", {"call_id": "c", "message": 7}, "message = 7"),
        ("settle", {"call_id": 7, "made": True}, "call_id must be of type str, not 7"),
        ("settle", {"call_id": "c", "made": 1}, "made must be of type bool, not 1"),
        ("settle", {"call_id": "c", "made": False, "output": 1}, "output = 1: must be left out"),
        ("settle", {"call_id": "c", "made": True, "output": object()}, "output = <object"),
        ("cancel", {"by": 7}, "by = 7"),
        ("result", {"timeout_s": "1"}, "timeout_s = '1'"),
    ],
)
async def test_a_wrong_argument_is_named(
    capsule: Capsule, store: RunStore, method: str, arguments: dict[str, Any], error: str
) -> None:
    run = await parked(capsule, store, asks("c"))
    with pytest.raises((TypeError, CapsuleError), match=error):
        await getattr(run, f"a{method}")(**arguments)


def test_an_id_that_is_none_is_refused(capsule: Capsule) -> None:
    with pytest.raises(InvalidId):
        capsule.runs.get("")
    with pytest.raises(TypeError, match="run_id must be of type str, not 7"):
        capsule.runs.get(7)  # type: ignore[arg-type]


def test_callers_that_block_have_the_same(capsule: Capsule) -> None:
    run = capsule.runs.start("support", "hello", session="user-1")
    assert run.state().status == "queued"
    assert [each.run_id for each in capsule.runs.list(session="user-1")] == [run.id]
    assert capsule.runs.pending() == []
    assert run.cancel() == "cancelled"
    with pytest.raises(RunCancelled):
        run.result(timeout_s=10)
    with pytest.raises(RunNotFound):
        next(capsule.runs.get("nothing").events())
