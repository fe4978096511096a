"""A worker hosts named sessions: calls run in order, in one child, and end with a result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from capsule_tasks.executions.execution import Execution
from capsule_tasks.protocol.events import (
    Accepted,
    AttemptClaimed,
    CancelCommand,
    Ended,
    Outcome,
    RespondCommand,
    SessionRestored,
)
from capsule_tasks.settings import ChildSettings, OutputSettings, SessionConfig
from capsule_tasks.storage.sessions.types import BegunCall
from tests.integration.hosting import PROFILE, Caller, HostWorker, Results
from tests.streaming import HANG_S, eventually


@pytest.fixture
async def worker(valkey_url: str, prefix: str, results: Results) -> AsyncIterator[HostWorker]:
    async with HostWorker(valkey_url, prefix, results) as worker:
        yield worker


async def result(results: Results, call_id: str) -> Any:
    await eventually(lambda: call_id in results)
    return results[call_id]


async def test_calls_of_a_session_share_a_namespace(
    worker: HostWorker, caller: Caller, results: Results
) -> None:
    first = await caller.submit("user-1", "n = 41\nprint('set')")
    second = await caller.submit("user-1", "n += 1\nn")
    assert (await caller.ended(second)).outcome is Outcome.SUCCEEDED
    assert (await result(results, second)).value == 42
    assert results[first].value is None
    assert await caller.printed(first) == "set\n"
    await caller.settled("user-1")
    assert len(worker.hosted) == 1


async def test_a_value_that_python_does_not_write_ends_its_call(
    worker: HostWorker, caller: Caller
) -> None:
    ended = await caller.run("user-1", "[10**5000]")
    assert ended.outcome is Outcome.SUCCEEDED
    assert ended.result_text == "<list whose repr raised ValueError>"
    assert (await caller.run("user-1", "1")).result_text == "1"


async def test_the_events_of_a_call_are_those_of_an_execution(
    worker: HostWorker, caller: Caller
) -> None:
    call = await caller.submit("user-1", "print('hi')\n6 * 7")
    ended = await caller.ended(call)
    assert ended.result_text == "42"
    assert ended.stdout_bytes == 3
    claimed, accepted, *_ = await caller.events(call)
    assert claimed == AttemptClaimed(worker="w", task="session user-1")
    assert isinstance(accepted, Accepted)
    assert accepted.pid == worker.pid("user-1")


async def test_calls_that_were_submitted_before_the_worker_started_run(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    calls = [await caller.submit("user-1", f"{n} + 1") for n in range(5)]
    async with HostWorker(valkey_url, prefix, results):
        assert [(await caller.ended(call)).result_text for call in calls] == list("12345")


async def test_an_error_of_the_code_is_the_calls_own(
    worker: HostWorker, caller: Caller, results: Results
) -> None:
    call = await caller.submit("user-1", "n = 1\n1 / 0")
    ended = await caller.ended(call)
    assert (ended.outcome, ended.type) == (Outcome.FAILED, "ZeroDivisionError")
    assert "1 / 0" in ended.traceback
    assert (await result(results, call)).message == "division by zero"
    assert (await caller.run("user-1", "n")).result_text == "1"
    assert len(worker.hosted) == 1


async def test_sessions_run_beside_each_other(worker: HostWorker, caller: Caller) -> None:
    waiting = await caller.submit("a", "input('?')")
    assert (await caller.run("b", "1")).result_text == "1"
    assert set(worker.hosted) == {"a", "b"}
    await caller.asks(waiting)
    await caller.executions.send_command(waiting, RespondCommand(text="yes"))
    assert (await caller.ended(waiting)).result_text == "'yes'"


async def test_a_cancel_stops_the_call_and_keeps_the_namespace(
    worker: HostWorker, caller: Caller, results: Results
) -> None:
    await caller.run("user-1", "kept = 1")
    pid = worker.pid("user-1")
    call = await caller.submit("user-1", "print('go', flush=True)\nwhile True: pass")
    await printed(caller, call, "go\n")
    await caller.executions.send_command(call, CancelCommand())
    assert (await caller.ended(call)).outcome is Outcome.CANCELLED
    assert (await result(results, call)).outcome is Outcome.CANCELLED
    assert (await caller.run("user-1", "kept")).result_text == "1"
    assert worker.pid("user-1") == pid


async def printed(caller: Caller, call_id: str, text: str) -> None:
    async with asyncio.timeout(HANG_S):
        while await caller.printed(call_id) != text:
            await asyncio.sleep(0.005)


async def test_a_call_that_was_cancelled_while_it_waited_does_not_run(
    worker: HostWorker, caller: Caller, results: Results
) -> None:
    blocking = await caller.submit("user-1", "ran = []\ninput('?')")
    waiting = await caller.submit("user-1", "ran.append(1)")
    await caller.asks(blocking)
    await caller.executions.send_command(waiting, CancelCommand())
    await caller.executions.send_command(blocking, RespondCommand(text=""))
    assert (await caller.ended(waiting)).outcome is Outcome.CANCELLED
    assert (await caller.run("user-1", "ran")).result_text == "[]"
    assert results[waiting].outcome is Outcome.CANCELLED
    assert len(worker.hosted) == 1


async def test_a_call_that_takes_too_long_is_stopped(
    worker: HostWorker, caller: Caller, results: Results
) -> None:
    call = await caller.submit("user-1", "n = 1\nwhile True: pass", timeout_s=0.1)
    ended = await caller.ended(call)
    assert (ended.outcome, ended.type) == (Outcome.FAILED, "ExecutionTimeout")
    assert (await result(results, call)).type == "ExecutionTimeout"
    assert (await caller.run("user-1", "n")).result_text == "1"
    assert len(worker.hosted) == 1


async def test_a_result_that_is_no_json_is_its_repr(
    worker: HostWorker, caller: Caller, results: Results
) -> None:
    call = await caller.submit("user-1", "object")
    assert (await caller.ended(call)).result_text == "<class 'object'>"
    assert (await result(results, call)).value == "<class 'object'>"
    assert len(worker.hosted) == 1


async def test_a_slow_result_backend_delays_the_session_only(
    worker: HostWorker, caller: Caller, results: Results
) -> None:
    worker.fault = OSError("no backend")
    first = await caller.submit("a", "1")
    await caller.ended(first)
    assert await caller.unfinished("a") == 1
    worker.fault = None
    assert (await result(results, first)).value == 1
    await caller.settled("a")


async def test_a_child_that_dies_ends_its_call_and_the_next_is_told(
    worker: HostWorker, caller: Caller, results: Results
) -> None:
    await caller.run("user-1", "n = 1")
    call = await caller.submit("user-1", "import os\nos.kill(os.getpid(), 9)")
    ended = await caller.ended(call)
    assert (ended.outcome, ended.type) == (Outcome.FAILED, "WorkerLostError")
    why = "Worker exited prematurely: signal 9 (SIGKILL). The call may have run in part."
    outcome = await result(results, call)
    assert (outcome.outcome, outcome.message, ended.message) == (Outcome.LOST, why, why)
    after = await caller.submit("user-1", "'n' in globals()")
    assert (await caller.ended(after)).result_text == "False"
    assert SessionRestored(lost_calls=2) in await caller.events(after)
    later = await caller.submit("user-1", "1")
    await caller.ended(later)
    assert not any(isinstance(e, SessionRestored) for e in await caller.events(later))
    assert len(worker.hosted) == 1


async def test_a_child_that_dies_between_calls_is_replaced(
    worker: HostWorker, caller: Caller
) -> None:
    await caller.run("user-1", "n = 1")
    await caller.settled("user-1")
    session = worker.hosted["user-1"].child
    assert session is not None
    session.signal(9)
    await eventually(lambda: not session.is_alive)
    call = await caller.submit("user-1", "2")
    assert (await caller.ended(call)).result_text == "2"
    assert SessionRestored(lost_calls=1) in await caller.events(call)


async def test_a_flood_of_output_is_held_back(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    config = SessionConfig(child=ChildSettings(output=OutputSettings(backpressure="block")))
    async with HostWorker(valkey_url, prefix, results, config=config):
        call = await caller.submit("user-1", "for _ in range(100): print('x' * 100_000)")
        other = await caller.run("b", "1")
        assert other.result_text == "1"
        assert (await caller.ended(call)).stdout_bytes == 100 * 100_001


async def test_two_workers_share_what_is_wanted(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    async with (
        HostWorker(valkey_url, prefix, results, name="w1") as one,
        HostWorker(valkey_url, prefix, results, name="w2") as two,
    ):
        calls = [await caller.submit(f"s{n}", "n = 1") for n in range(8)]
        again = [await caller.submit(f"s{n}", "n + 1") for n in range(8)]
        for call in calls + again:
            assert (await caller.ended(call)).outcome is Outcome.SUCCEEDED
        assert not set(one.hosted) & set(two.hosted)
        assert len(one.hosted) + len(two.hosted) == 8


async def test_a_worker_that_stops_releases_its_sessions(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    async with HostWorker(valkey_url, prefix, results):
        await caller.run("user-1", "n = 1")
        await caller.settled("user-1")
    assert (await caller.sessions.info("user-1")).owner == ""


async def test_a_call_that_was_cancelled_before_it_was_sent_is_no_execution(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    call = await caller.submit("user-1", "n = 1", tenant="acme")
    await caller.executions.send_command(call, CancelCommand())
    async with HostWorker(valkey_url, prefix, results):
        assert (await caller.ended(call)).outcome is Outcome.CANCELLED
        assert (await caller.run("user-1", "'n' in globals()")).result_text == "False"
        await caller.settled("user-1")
    assert (await caller.sessions.info("user-1")).executions == 1
    assert (await caller.sessions.tenants.usage("acme")).calls == 1


async def test_a_worker_that_stops_waits_for_the_call_that_runs(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    worker = HostWorker(valkey_url, prefix, results)
    await worker.start()
    call = await caller.submit("user-1", "input('?')")
    waiting = await caller.submit("user-1", "1")
    await caller.asks(call)
    stopping = asyncio.create_task(worker.stop(grace_s=HANG_S))
    await caller.executions.send_command(call, RespondCommand(text="done"))
    await stopping
    assert (await caller.ended(call)).result_text == "'done'"
    assert await caller.unfinished("user-1") == 1
    async with HostWorker(valkey_url, prefix, results):
        assert (await caller.ended(waiting)).result_text == "1"


async def test_a_worker_that_waits_no_longer_stops_the_call_and_saves_the_namespace(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    worker = HostWorker(valkey_url, prefix, results)
    await worker.start()
    call = await caller.submit("user-1", "n = 1\ninput('?')")
    await caller.asks(call)
    await worker.stop()
    ended = await caller.ended(call)
    assert isinstance(ended, Ended)
    assert "its worker was stopped while the call ran" in ended.message
    assert results[call].outcome is Outcome.LOST
    assert await caller.unfinished("user-1") == 0
    async with HostWorker(valkey_url, prefix, results):
        assert (await caller.run("user-1", "n")).result_text == "1", "the namespace was saved"


async def test_a_call_that_is_about_to_be_sent_when_its_worker_stops_is_lost_and_not_cancelled(
    worker: HostWorker, caller: Caller, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await caller.run("user-1", "n = 1")).outcome is Outcome.SUCCEEDED
    admit = worker.supervisor.admit

    def admit_and_stop(execution: Execution) -> None:
        admit(execution)  # it waits for its claim now
        worker.host.profiles[PROFILE].stop_calls("its worker was stopped")

    monkeypatch.setattr(worker.supervisor, "admit", admit_and_stop)
    call = await caller.submit("user-1", "n = 2")
    ended = await caller.ended(call)
    assert (ended.type, ended.message) == ("WorkerLostError", "its worker was stopped")
    assert (await result(results, call)).outcome is Outcome.LOST
    await caller.settled("user-1")
    assert (await caller.sessions.info("user-1")).executions == 1, "the child was not sent it"


async def test_a_worker_that_may_wait_for_calls_can_be_told_to_wait_no_longer(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    worker = HostWorker(valkey_url, prefix, results)
    await worker.start()
    worker.host.end_grace()  # nothing is waited for yet
    call = await caller.submit("user-1", "input('?')")
    await caller.asks(call)
    stopping = asyncio.create_task(worker.stop(grace_s=3600.0))
    while not stopping.done():
        worker.host.end_grace()
        await asyncio.wait([stopping], timeout=0.01)
    assert results[call].outcome is Outcome.LOST
    assert (await caller.sessions.info("user-1")).owner == ""


async def test_a_session_that_fails_in_its_worker_is_taken_again(
    worker: HostWorker, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that fails for a reason that nobody thought of."""
    monkeypatch.setattr("capsule_tasks.executions.hosting.plan._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("capsule_tasks.executions.hosting.profile._VISIBLE_AGAIN_S", 0.02)
    begin, faults = worker.publisher.sessions.begin, [RuntimeError("once"), RuntimeError("twice")]

    async def fails_first(session_id: str, token: int) -> BegunCall | None:
        if faults:
            raise faults.pop()
        return await begin(session_id, token)

    monkeypatch.setattr(worker.publisher.sessions, "begin", fails_first)
    assert (await caller.run("user-1", "6 * 7")).result_text == "42"
    assert not faults
