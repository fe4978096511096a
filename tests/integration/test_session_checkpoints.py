"""Namespaces of hosted sessions survive their children and their workers."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from capsule_tasks.errors import SessionNotLive
from capsule_tasks.executions.hosting import host, hosted
from capsule_tasks.executions.hosting.checkpointing import SAVES_AT_ONCE, save_namespace
from capsule_tasks.executions.hosting.plan import Stage
from capsule_tasks.protocol.calls import RestartRequest, encode_request
from capsule_tasks.protocol.events import Outcome, RespondCommand, SessionRestored
from capsule_tasks.protocol.messages import InputRequest
from capsule_tasks.protocol.namespaces import SavedNamespace
from capsule_tasks.sessions.session import Session
from tests.integration.hosting import (
    PROFILE,
    Caller,
    HostProcess,
    HostWorker,
    RedisResults,
    Results,
)
from tests.streaming import HANG_S, eventually


async def notice(caller: Caller, call_id: str) -> SessionRestored | None:
    """What the call was told of its namespace."""
    found = [e for e in await caller.events(call_id) if isinstance(e, SessionRestored)]
    assert len(found) <= 1
    return found[0] if found else None


async def saved(worker: HostWorker, session_id: str) -> None:
    """Return once the session has nothing that is not in its checkpoint."""
    plan = worker.plan
    await eventually(
        lambda: plan.seats[session_id].stage is Stage.IDLE and not plan.is_unsaved(session_id)
    )


async def kill_child(worker: HostWorker, session_id: str) -> None:
    session = worker.hosted[session_id].child
    assert session is not None
    session.signal(signal.SIGKILL)
    await eventually(lambda: not session.is_alive)


async def test_an_idle_namespace_is_saved_and_comes_back_in_a_new_child(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    async with HostWorker(valkey_url, prefix, results, checkpoint_idle_s=0.01) as worker:
        await caller.run("user-1", "n = 41\nstuck = (n for n in ())")
        await saved(worker, "user-1")
        await kill_child(worker, "user-1")
        call = await caller.submit("user-1", "n + 1")
        assert (await caller.ended(call)).result_text == "42"
        told = await notice(caller, call)
        assert told is not None
        assert told.saved_at is not None
        assert told.lost == ("stuck",)
        assert told.lost_calls == 0


async def test_the_next_call_is_told_which_calls_are_lost(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    async with HostWorker(valkey_url, prefix, results, checkpoint_every=2) as worker:
        await caller.run("user-1", "n = 1")
        await caller.run("user-1", "n += 1")
        await saved(worker, "user-1")
        await caller.run("user-1", "n += 1")
        await caller.settled("user-1")
        await kill_child(worker, "user-1")
        call = await caller.submit("user-1", "n")
        assert (await caller.ended(call)).result_text == "2"
        told = await notice(caller, call)
        assert told is not None
        assert told.lost_calls == 1


async def test_a_worker_that_stops_saves_and_the_next_restores(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    async with HostWorker(valkey_url, prefix, results):
        await caller.run("user-1", "def double(n): return 2 * n\nn = 21")
        await caller.settled("user-1")
    async with HostWorker(valkey_url, prefix, results):
        call = await caller.submit("user-1", "double(n)")
        assert (await caller.ended(call)).result_text == "42"
        told = await notice(caller, call)
        assert told is not None
        assert told.lost == ()


async def test_a_worker_that_stops_saves_few_sessions_at_a_time(
    valkey_url: str,
    prefix: str,
    results: Results,
    caller: Caller,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saving: list[int] = [0]

    async def counted(session: Session, max_bytes: int) -> SavedNamespace:
        saving.append(saving[-1] + 1)
        try:
            return await save_namespace(session, max_bytes)
        finally:
            saving.append(saving[-1] - 1)

    monkeypatch.setattr(hosted, "save_namespace", counted)
    monkeypatch.setattr(host, "STOPPING_SAVE_S", HANG_S)
    async with HostWorker(valkey_url, prefix, results):
        for number in range(2 * SAVES_AT_ONCE):
            await caller.run(f"s{number}", "n = 1")
    assert len(saving) == 1 + 4 * SAVES_AT_ONCE
    assert max(saving) == SAVES_AT_ONCE


async def test_a_child_that_is_slow_to_be_saved_keeps_no_other_from_it(
    valkey_url: str,
    prefix: str,
    results: Results,
    caller: Caller,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(host, "SAVES_AT_ONCE", 1)
    monkeypatch.setattr(host, "STOPPING_SAVE_S", 0.2)
    slow = (
        "import time\n"
        "class Slow:\n"
        "    def __reduce__(self):\n"
        "        while True: time.sleep(0.01)\n"
        "slow = Slow()"
    )
    async with HostWorker(valkey_url, prefix, results) as worker:
        for session_id, source in (("slow", slow), ("user-1", "n = 1")):
            await caller.run(session_id, source)
            seat = worker.plan.seats[session_id]
            await eventually(lambda seat=seat: seat.stage is Stage.IDLE)
    assert (await caller.sessions.info("user-1")).checkpoint
    assert "no checkpoint of session 'slow' was made: the child did not hand over" in caplog.text
    left = await caller.sessions.info("slow")
    assert (left.owner, left.checkpoint) == ("", None)


async def test_a_worker_that_stops_saves_what_runs_and_lists_what_waits(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    worker = HostWorker(valkey_url, prefix, results)
    await worker.start()
    running = await caller.submit("user-1", "n = input('?')")
    waiting = await caller.submit("user-1", "n")
    async with asyncio.timeout(HANG_S):
        while not any(isinstance(e, InputRequest) for e in await caller.events(running)):
            await asyncio.sleep(0.005)
    stopping = asyncio.create_task(worker.stop(grace_s=HANG_S))
    await caller.executions.send_command(running, RespondCommand(text="kept"))
    await stopping
    async with HostWorker(valkey_url, prefix, results):
        assert (await caller.ended(waiting)).result_text == "'kept'"


async def test_many_sessions_share_little_room(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    names = [f"s{number}" for number in range(8)]
    async with HostWorker(valkey_url, prefix, results, max_live=2) as worker:
        for step in range(2):
            source = f"n = globals().get('n', {step * 100}) + 1\nn"
            calls = [await caller.submit(name, source) for name in names]
            for call in calls:
                assert (await caller.ended(call)).result_text == str(step + 1)
                assert len(worker.hosted) <= 2
        for name in names:
            await caller.settled(name)


async def test_an_idle_session_is_saved_and_leaves(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    async with HostWorker(valkey_url, prefix, results, idle_timeout_s=0.05) as worker:
        await caller.run("user-1", "n = 1")
        await eventually(lambda: not worker.hosted)
        assert (await caller.sessions.info("user-1")).owner == ""
        assert (await caller.run("user-1", "n")).result_text == "1"


async def test_an_old_session_gets_a_new_child_between_its_calls(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    async with HostWorker(valkey_url, prefix, results, max_age_s=0.05):
        source = (
            "import os, time\ntime.sleep(0.06)\npids = globals().get('pids', []) + [os.getpid()]"
        )
        for _ in range(3):
            await caller.submit("user-1", source)
        assert (await caller.run("user-1", "len(set(pids))")).result_text == "3"


async def test_what_cannot_be_saved_is_not_evicted(
    valkey_url: str, prefix: str, results: Results, caller: Caller, monkeypatch: Any
) -> None:
    async def fails(*_: object) -> None:
        raise TimeoutError("it takes too long")

    async with HostWorker(valkey_url, prefix, results, max_live=1) as worker:
        await caller.run("a", "n = 1")
        await caller.settled("a")
        pid = worker.pid("a")
        with monkeypatch.context() as patched:
            patched.setattr(hosted, "save_namespace", fails)
            call = await caller.submit("b", "1")
            await eventually(lambda: worker.plan.seats["a"].save_after)
            assert worker.pid("a") == pid
        assert (await caller.ended(call)).result_text == "1"
        assert (await caller.run("a", "n")).result_text == "1"


async def test_a_checkpoint_that_cannot_be_read_fails_the_calls(
    valkey_url: str, prefix: str, results: Results, caller: Caller, monkeypatch: Any
) -> None:
    monkeypatch.setattr("capsule_tasks.executions.hosting.plan._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("capsule_tasks.executions.hosting.profile._VISIBLE_AGAIN_S", 0.02)
    async with HostWorker(valkey_url, prefix, results):
        await caller.run("user-1", "n = 1")
        await caller.settled("user-1")
    worker = HostWorker(valkey_url, prefix, results)
    found = await worker.checkpoints.find("user-1")
    assert found is not None
    keys = worker.checkpoints.keys_of("user-1")
    await caller.delete(keys.checkpoint(found.generation))
    async with worker:
        ended = await caller.run("user-1", "n")
        assert (ended.outcome, ended.type) == (Outcome.FAILED, "SessionStartFailed")
        assert "could be started" in ended.message
        await caller.settled("user-1")
        request = encode_request(RestartRequest())
        async with asyncio.timeout(HANG_S):  # as a producer does, until there is an owner
            while True:
                try:
                    await caller.sessions.request("user-1", request, request_id="restart")
                    break
                except SessionNotLive:
                    await caller.sessions.want(PROFILE, "user-1")
                    await asyncio.sleep(0.001)
        call = await caller.submit("user-1", "'n' in globals()")
        assert (await caller.ended(call)).result_text == "False"


async def test_a_worker_that_is_killed_loses_what_came_after_the_checkpoint(
    valkey_url: str, prefix: str, caller: Caller
) -> None:
    shared = RedisResults(valkey_url, prefix)
    async with HostWorker(valkey_url, prefix, shared):
        await caller.run("user-1", "n = 1")
        await caller.settled("user-1")
    with HostProcess(valkey_url, prefix, "killed", 0.5) as killed:
        await caller.run("user-1", "n += 1")
        await caller.settled("user-1")
        killed.signal(signal.SIGKILL)
        async with HostWorker(valkey_url, prefix, shared, lease_s=0.5):
            call = await caller.submit("user-1", "n")
            assert (await caller.ended(call)).result_text == "1"
            told = await notice(caller, call)
            assert told is not None
            assert told.lost_calls == 1


async def test_a_namespace_of_100_megabytes_is_evicted_and_restored(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    async with HostWorker(valkey_url, prefix, results, max_live=1) as worker:
        await caller.run(
            "large", "data = bytearray(100_000_000); data[-1] = 7\ndef end(): return data[-1]"
        )
        await caller.run("other", "n = 1")
        await eventually(lambda: "large" not in worker.hosted)
        call = await caller.submit("large", "(len(data), end())")
        assert (await caller.ended(call)).result_text == "(100000000, 7)"
        told = await notice(caller, call)
        assert told is not None
        assert (told.lost, told.lost_calls, told.differences) == ((), 0, ())
        manifest = await worker.checkpoints.find("large")
        assert manifest is not None
        assert manifest.size > 100_000_000
