"""Sessions change their owner: workers that are killed, that stand still, or that lose a lease."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
import redis.asyncio as asyncio_redis

from capsule_tasks.executions.hosting.hosted import CLOCKS_S
from capsule_tasks.protocol.calls import SessionCall, encode_call
from capsule_tasks.protocol.events import (
    AttemptEnded,
    CancelCommand,
    Ended,
    Outcome,
    RespondCommand,
    SessionRestored,
)
from capsule_tasks.settings import SessionConfig
from capsule_tasks.storage.keys import HostKeys
from capsule_tasks.storage.sessions.types import BegunCall
from tests.integration.hosting import (
    PROFILE,
    Caller,
    HostProcess,
    HostWorker,
    RedisResults,
)
from tests.streaming import HANG_S, eventually

LEASE_S = 0.5


@pytest.fixture
def results(valkey_url: str, prefix: str) -> RedisResults:
    return RedisResults(valkey_url, prefix)


async def ends(caller: Caller, call_id: str) -> list[Ended]:
    return [event for event in await caller.events(call_id) if isinstance(event, Ended)]


async def test_calls_of_a_killed_worker_end_or_run_elsewhere(
    valkey_url: str, prefix: str, results: RedisResults, caller: Caller
) -> None:
    with HostProcess(valkey_url, prefix, "killed", LEASE_S) as killed:
        begun = await caller.submit("user-1", "input('?')")
        waiting = await caller.submit("user-1", "6 * 7")
        await caller.asks(begun)
        killed.signal(signal.SIGKILL)
        async with HostWorker(valkey_url, prefix, results, lease_s=LEASE_S):
            assert (await caller.ended(begun)).outcome is Outcome.LOST
            assert (await caller.ended(waiting)).result_text == "42"
            assert SessionRestored(lost_calls=1) in await caller.events(waiting)
            await caller.settled("user-1")
    assert results[begun].outcome is Outcome.LOST
    assert results[waiting].value == 42


async def test_an_idle_session_of_a_killed_worker_is_taken_with_its_next_call(
    valkey_url: str, prefix: str, results: RedisResults, caller: Caller
) -> None:
    with HostProcess(valkey_url, prefix, "killed", LEASE_S) as killed:
        await caller.run("user-1", "n = 1")
        await caller.settled("user-1")
        killed.signal(signal.SIGKILL)
        async with HostWorker(valkey_url, prefix, results, lease_s=LEASE_S):
            call = await caller.submit("user-1", "'n' in globals()")
            assert (await caller.ended(call)).result_text == "False"
            assert SessionRestored(lost_calls=1) in await caller.events(call)


async def test_a_worker_that_stood_still_publishes_nothing_of_what_was_taken_over(
    valkey_url: str, prefix: str, results: RedisResults, caller: Caller, tmp_path: Path
) -> None:
    alive, go = tmp_path / "alive", tmp_path / "go"
    source = (
        "import os, time, pathlib\n"
        f"pathlib.Path({str(alive)!r}).write_text(str(os.getpid()))\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "print('too late')"
    )
    with HostProcess(valkey_url, prefix, "still", LEASE_S) as still:
        begun = await caller.submit("user-1", source)
        waiting = await caller.submit("user-1", "1")
        await eventually(lambda: alive.exists() and alive.read_text())
        still.signal(signal.SIGSTOP)
        async with HostWorker(valkey_url, prefix, results, lease_s=LEASE_S) as worker:
            assert (await caller.ended(begun)).outcome is Outcome.LOST
            assert (await caller.ended(waiting)).result_text == "1"
            go.touch()
            still.signal(signal.SIGCONT)
            process = Path(f"/proc/{alive.read_text()}")
            await eventually(lambda: not process.exists())
            assert (await caller.run("user-1", "2")).result_text == "2"
            assert set(worker.hosted) == {"user-1"}
        assert len(await ends(caller, begun)) == 1
        assert await caller.printed(begun) == ""
    assert results[begun].outcome is Outcome.LOST
    assert len(results) == 3


async def test_a_worker_that_lost_its_lease_keeps_sessions_that_nobody_took(
    valkey_url: str, prefix: str, caller: Caller
) -> None:
    results = RedisResults(valkey_url, prefix)
    async with HostWorker(valkey_url, prefix, results, lease_s=LEASE_S) as worker:
        await caller.run("user-1", "n = 1")
        call = await caller.submit("user-1", "input('?')")
        await caller.asks(call)
        pid, incarnation = worker.pid("user-1"), worker.publisher.lease.incarnation
        await worker.publisher.lease.end()  # as if it had lapsed
        await eventually(lambda: worker.publisher.lease.incarnation != incarnation)
        await eventually(lambda: worker.hosted["user-1"].ownership.incarnation != incarnation)
        async with asyncio.timeout(HANG_S):
            while not any(isinstance(e, AttemptEnded) for e in await caller.events(call)):
                await asyncio.sleep(0.005)
        await caller.asks(call)
        await caller.executions.send_command(call, RespondCommand(text="a"))
        assert (await caller.ended(call)).result_text == "'a'"
        assert (await caller.run("user-1", "n")).result_text == "1"
        assert worker.pid("user-1") == pid
        await caller.settled("user-1")
        assert (await caller.sessions.info("user-1")).owner == worker.publisher.lease.incarnation


class DeadOwner:
    """An incarnation that has taken a session and whose lease has lapsed."""

    def __init__(self, caller: Caller, session_id: str) -> None:
        self.caller = caller
        self.session_id = session_id

    async def begin(self, source: str) -> BegunCall:
        """Submit a call and begin it, without claiming its execution."""
        call_id = f"{self.session_id}-begun"
        payload = encode_call(SessionCall(source=source))
        sessions = self.caller.sessions
        await sessions.submit(self.session_id, call_id, payload, profile=PROFILE)
        taken = await sessions.take(self.session_id, "dead", profile=PROFILE)
        begun = await sessions.begin(self.session_id, taken.token)
        assert begun is not None
        return begun


async def test_a_call_that_was_begun_and_not_claimed_runs(
    valkey_url: str, prefix: str, results: RedisResults, caller: Caller
) -> None:
    begun = await DeadOwner(caller, "user-1").begin("6 * 7")
    async with HostWorker(valkey_url, prefix, results):
        assert (await caller.ended(begun.call_id)).result_text == "42"
        await caller.settled("user-1")
    assert results[begun.call_id].value == 42


async def test_a_call_that_ended_gets_its_result_from_the_next_owner(
    valkey_url: str, prefix: str, results: RedisResults, caller: Caller
) -> None:
    begun = await DeadOwner(caller, "user-1").begin("print('runs')")
    await caller.executions.send_command(begun.call_id, CancelCommand())
    async with HostWorker(valkey_url, prefix, results):
        assert (await caller.ended(begun.call_id)).outcome is Outcome.CANCELLED
        await caller.settled("user-1")
    assert results[begun.call_id].outcome is Outcome.CANCELLED
    assert await caller.printed(begun.call_id) == ""


async def test_a_call_that_was_begun_long_ago_does_not_run_again(
    valkey_url: str, prefix: str, results: RedisResults, caller: Caller
) -> None:
    """Redis may have forgotten its end by now."""
    begun = await DeadOwner(caller, "user-1").begin("print('runs')")
    worker = HostWorker(valkey_url, prefix, results, silent_retention_s=5.0)
    async with worker:
        ended = await caller.ended(begun.call_id)
        assert "may have run" in ended.message
        await caller.settled("user-1")
    assert results[begun.call_id].outcome is Outcome.LOST


async def test_a_call_that_was_begun_long_ago_when_its_child_is_there_does_not_run_again(
    valkey_url: str, prefix: str, results: RedisResults, caller: Caller
) -> None:
    """A start of a child takes long enough for Redis to forget the end of a call meanwhile."""
    begun = await DeadOwner(caller, "user-1").begin("print('runs')")
    slow = SessionConfig(warmup="import time\ntime.sleep(1.5)")
    may_claim_for_s = 1.0
    kept_s = may_claim_for_s + CLOCKS_S
    async with HostWorker(valkey_url, prefix, results, silent_retention_s=kept_s, config=slow):
        ended = await caller.ended(begun.call_id)
        assert "may have run" in ended.message
        await caller.settled("user-1")
        assert (await caller.run("user-1", "1")).result_text == "1"
    assert results[begun.call_id].outcome is Outcome.LOST
    assert await caller.printed(begun.call_id) == ""


async def test_records_of_what_a_worker_holds_outlive_their_ttl(
    valkey_url: str, prefix: str, results: RedisResults, caller: Caller
) -> None:
    async with (
        HostWorker(valkey_url, prefix, results, lease_s=LEASE_S, hold_ttl_s=4.0) as worker,
        asyncio_redis.from_url(valkey_url) as client,
    ):
        call = await caller.submit("user-1", "input('?')")
        await caller.asks(call)
        keys = HostKeys(worker.publisher.lease.incarnation, prefix)
        for key in (keys.held, keys.sessions):
            await is_renewed(client, key)


async def is_renewed(client: asyncio_redis.Redis, key: str) -> None:
    """Return once the key expires later than it was to; it must not expire before."""
    least_ms = await client.pttl(key)
    async with asyncio.timeout(HANG_S):
        while (left_ms := await client.pttl(key)) < least_ms + 1000:
            assert left_ms > 0, f"{key} has expired"
            least_ms = min(least_ms, left_ms)
            await asyncio.sleep(0.05)
