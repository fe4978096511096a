"""Requests to the owner of a session: names, checkpoint, restart, close."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as asyncio_redis

from capsule_tasks.errors import SessionClosing, SessionUnknown
from capsule_tasks.executions.hosting import checkpointing, plan, requests
from capsule_tasks.executions.hosting.requests import names_in
from capsule_tasks.protocol.calls import (
    CheckpointMade,
    CheckpointRequest,
    NamesListed,
    NamesRequest,
    RequestDone,
    RequestFailed,
    RestartRequest,
    SessionReply,
    decode_reply,
    encode_request,
)
from capsule_tasks.protocol.events import Outcome, RespondCommand, SessionRestored
from capsule_tasks.sessions.session import Session
from capsule_tasks.settings import SessionConfig
from tests.integration.hosting import PROFILE, Caller, HostWorker, Results
from tests.streaming import HANG_S, eventually


@pytest.fixture
async def worker(valkey_url: str, prefix: str, results: Results) -> AsyncIterator[HostWorker]:
    async with HostWorker(valkey_url, prefix, results) as worker:
        yield worker


async def names(caller: Caller, session_id: str) -> list[str]:
    reply = await caller.ask(session_id, NamesRequest())
    assert isinstance(reply, NamesListed)
    return [entry.name for entry in reply.entries]


async def test_names_are_listed_also_while_a_call_runs(worker: HostWorker, caller: Caller) -> None:
    await caller.run("user-1", "first = 1")
    assert await names(caller, "user-1") == ["first"]
    call = await caller.submit("user-1", "second = 2\ninput('?')")
    await caller.asks(call)
    assert await names(caller, "user-1") == ["first", "second"]
    await caller.executions.send_command(call, RespondCommand(text=""))
    await caller.ended(call)
    assert len(worker.hosted) == 1


async def test_names_wait_for_a_namespace_that_is_being_restored(
    valkey_url: str,
    prefix: str,
    results: Results,
    caller: Caller,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with HostWorker(valkey_url, prefix, results):
        await caller.run("user-1", "n = 1")
    restoring, may_restore = asyncio.Event(), asyncio.Event()
    restore = checkpointing.restore_namespace

    async def restore_later(*args: Any) -> Any:
        restoring.set()
        await may_restore.wait()
        return await restore(*args)

    monkeypatch.setattr(checkpointing, "restore_namespace", restore_later)
    async with HostWorker(valkey_url, prefix, results):
        await caller.sessions.want(PROFILE, "user-1")
        await restoring.wait()
        asking = asyncio.create_task(names(caller, "user-1"))
        await asyncio.wait({asking}, timeout=0.1)
        assert not asking.done()
        may_restore.set()
        assert await asking == ["n"]


async def test_a_restart_does_not_wait_for_a_child_that_is_asked_for_names(
    worker: HostWorker, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarted = asyncio.Event()

    async def never_before_the_restart(session: Session) -> SessionReply:
        await restarted.wait()
        return await names_in(session)

    await caller.run("user-1", "first = 1")
    monkeypatch.setattr(requests, "names_in", never_before_the_restart)
    names_id = await caller.sessions.request("user-1", encode_request(NamesRequest()))
    assert await caller.ask("user-1", RestartRequest()) == RequestDone()
    restarted.set()
    async with asyncio.timeout(HANG_S):
        while (reply := await caller.sessions.read_reply("user-1", names_id)) is None:
            await asyncio.sleep(0.005)
    # Either the child that is gone was asked, or the next one.
    assert isinstance(found := decode_reply(reply), RequestFailed | NamesListed)
    assert not (isinstance(found, NamesListed) and found.entries)
    assert (await caller.run("user-1", "1")).result_text == "1"
    assert len(worker.hosted) == 1


async def test_a_checkpoint_waits_for_the_call_that_runs(
    worker: HostWorker, caller: Caller
) -> None:
    call = await caller.submit("user-1", "n = 1\nstuck = (n for n in ())\ninput('?')")
    await caller.asks(call)
    await caller.executions.send_command(call, RespondCommand(text=""))
    made = await caller.ask("user-1", CheckpointRequest())
    assert isinstance(made, CheckpointMade)
    assert "n" in made.saved
    assert set(made.skipped) == {"stuck"}
    assert not worker.plan.is_unsaved("user-1")


async def test_a_restart_ends_the_call_that_runs_and_empties_the_namespace(
    worker: HostWorker, caller: Caller, results: Results
) -> None:
    await caller.run("user-1", "n = 1")
    await caller.ask("user-1", CheckpointRequest())
    call = await caller.submit("user-1", "input('?')")
    waiting = await caller.submit("user-1", "'n' in globals()")
    await caller.asks(call)
    assert await caller.ask("user-1", RestartRequest()) == RequestDone()
    ended = await caller.ended(call)
    assert (ended.outcome, ended.message) == (
        Outcome.FAILED,
        "its session was restarted; the call may have run in part",
    )
    assert (await caller.ended(waiting)).result_text == "False"
    told = [e for e in await caller.events(waiting) if isinstance(e, SessionRestored)]
    assert told == []
    await eventually(lambda: waiting in results)
    assert results[call].outcome is Outcome.LOST
    assert await worker.checkpoints.find("user-1") is None


async def test_a_restart_does_not_wait_for_the_child_of_a_call_that_was_begun(
    valkey_url: str, prefix: str, results: Results, caller: Caller, tmp_path: Path
) -> None:
    may_start = tmp_path / "may start"
    may_start.touch()
    wait = f"import os, time\nwhile not os.path.exists({str(may_start)!r}): time.sleep(0.01)"
    config = SessionConfig(warmup=wait)
    async with HostWorker(valkey_url, prefix, results, config=config) as worker:
        await caller.run("user-1", "n = 1")
        await caller.settled("user-1")
        session = worker.hosted["user-1"].child
        assert session is not None
        may_start.unlink()
        session.signal(signal.SIGKILL)
        await eventually(lambda: not session.is_alive)
        call = await caller.submit("user-1", "'n' in globals()")
        async with asyncio.timeout(HANG_S):
            while (await caller.sessions.info("user-1")).begun_call != call:
                await asyncio.sleep(0.005)
        assert await caller.ask("user-1", RestartRequest()) == RequestDone()
        assert await caller.events(call) == [], "the call waits"
        may_start.touch()
        assert (await caller.ended(call)).result_text == "False"
        assert not any(isinstance(e, SessionRestored) for e in await caller.events(call))


ENDLESS = """
endless = "import pathlib, time; pathlib.Path({path!r}).touch()\\nwhile True: time.sleep(0.01)"
class Stuck:
    def {method}(self): {body}
stuck = Stuck()
"""


async def test_a_restart_ends_a_restore_that_never_ends(
    worker: HostWorker, caller: Caller, tmp_path: Path
) -> None:
    """Also if another request came first, which would restore the namespace again."""
    restoring = tmp_path / "restoring"
    body = "return exec, (endless,)"
    await caller.run("user-1", ENDLESS.format(path=str(restoring), method="__reduce__", body=body))
    assert isinstance(await caller.ask("user-1", CheckpointRequest()), CheckpointMade)
    await caller.settled("user-1")
    session = worker.hosted["user-1"].child
    assert session is not None
    session.signal(signal.SIGKILL)
    await eventually(lambda: not session.is_alive)
    listing = asyncio.create_task(caller.ask("user-1", NamesRequest()))
    call = await caller.submit("user-1", "'stuck' in globals()")
    await eventually(restoring.exists)
    assert await caller.ask("user-1", RestartRequest()) == RequestDone()
    assert (await caller.ended(call)).result_text == "False"
    await listing


async def test_a_restart_ends_a_save_that_never_ends(
    worker: HostWorker, caller: Caller, tmp_path: Path
) -> None:
    saving = tmp_path / "saving"
    await caller.run(
        "user-1", ENDLESS.format(path=str(saving), method="__getstate__", body="exec(endless)")
    )
    made = asyncio.create_task(caller.ask("user-1", CheckpointRequest()))
    await eventually(saving.exists)
    assert await caller.ask("user-1", RestartRequest()) == RequestDone()
    assert isinstance(await made, RequestFailed)
    assert (await caller.run("user-1", "'stuck' in globals()")).result_text == "False"


async def test_an_idle_session_is_restarted(worker: HostWorker, caller: Caller) -> None:
    await caller.run("user-1", "n = 1")
    await caller.settled("user-1")
    await caller.ask("user-1", RestartRequest())
    assert await names(caller, "user-1") == []
    assert len(worker.hosted) == 1


async def test_a_session_is_closed_when_its_calls_are_done(
    worker: HostWorker, caller: Caller
) -> None:
    running = await caller.submit("user-1", "input('?')")
    waiting = await caller.submit("user-1", "1")
    await caller.asks(running)
    assert not await caller.sessions.close_session("user-1")
    with pytest.raises(SessionClosing):
        await caller.submit("user-1", "2")
    await caller.executions.send_command(running, RespondCommand(text=""))
    assert (await caller.ended(waiting)).result_text == "1"
    await eventually(lambda: not worker.hosted)
    with pytest.raises(SessionUnknown):
        await caller.sessions.info("user-1")
    assert (await caller.run("user-1", "'n' in globals()")).result_text == "False"


async def test_an_idle_session_is_closed_at_once(worker: HostWorker, caller: Caller) -> None:
    await caller.run("user-1", "n = 1")
    await caller.ask("user-1", CheckpointRequest())
    await caller.sessions.close_session("user-1")
    await eventually(lambda: not worker.hosted)
    assert await worker.checkpoints.find("user-1") is None


async def test_a_closed_session_that_was_listed_by_mistake_leaves_and_can_be_used(
    worker: HostWorker, caller: Caller, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "UNUSED_TIMEOUT_S", 0.05)
    await caller.run("user-1", "n = 1")
    await caller.sessions.close_session("user-1")
    await eventually(lambda: not worker.hosted)
    await caller.sessions.want(PROFILE, "user-1")
    await eventually(lambda: worker.hosted)
    await eventually(lambda: not worker.hosted)
    keys = caller.sessions.keys_of("user-1")
    async with asyncio_redis.from_url(valkey_url) as client:
        for key in (keys.session, keys.calls, keys.known):
            if await client.ttl(key) < 86400:  # as if a day had passed
                await client.delete(key)
    assert (await caller.run("user-1", "'n' in globals()")).result_text == "False"


@pytest.mark.parametrize("end", ["restart", "close"])
async def test_an_owner_that_loses_its_session_in_a_restart_or_close_leaves_the_checkpoint(
    worker: HostWorker,
    caller: Caller,
    valkey_url: str,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
) -> None:
    await caller.run("user-1", "n = 1")
    await caller.ask("user-1", CheckpointRequest())
    hosted = worker.hosted["user-1"]
    key, stolen = caller.sessions.keys_of("user-1").session, hosted.ownership.token + 1
    end_child = hosted._child.end

    async def lose_and_end() -> None:
        async with asyncio_redis.from_url(valkey_url) as client:
            await client.hset(key, mapping={"owner": "w2", "token": stolen})
        await end_child()

    monkeypatch.setattr(hosted._child, "end", lose_and_end)
    if end == "restart":
        await caller.sessions.request("user-1", encode_request(RestartRequest()))
    else:
        assert not await caller.sessions.close_session("user-1")
    await eventually(lambda: not worker.hosted)
    manifest = await worker.checkpoints.find("user-1")
    assert manifest is not None
    assert await worker.checkpoints.read("user-1", manifest)


async def test_a_session_that_was_closing_when_its_worker_died_is_closed_by_the_next(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    await caller.submit("user-1", "1")
    await caller.sessions.close_session("user-1")
    async with HostWorker(valkey_url, prefix, results) as worker:
        await eventually(lambda: results)
        await eventually(lambda: not worker.hosted)
        with pytest.raises(SessionUnknown):
            await caller.sessions.info("user-1")


async def test_what_was_done_before_a_restart_is_not_missed_by_another_worker(
    valkey_url: str, prefix: str, results: Results, caller: Caller
) -> None:
    async with HostWorker(valkey_url, prefix, results) as first:
        for _ in range(3):
            await caller.run("user-1", "n = 1")
        assert await caller.ask("user-1", RestartRequest()) == RequestDone()
        lost = await caller.submit(
            "user-1", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
        )
        assert (await caller.ended(lost)).outcome == Outcome.FAILED
        await caller.settled("user-1")
        first.host.stop_taking()
        await eventually(lambda: not first.hosted)
    async with HostWorker(valkey_url, prefix, results, name="w2"):
        call = await caller.submit("user-1", "'n' in globals()")
        assert (await caller.ended(call)).result_text == "False"
        restored = [e for e in await caller.events(call) if isinstance(e, SessionRestored)]
        assert restored == [SessionRestored(lost_calls=1)]


async def test_a_forgotten_session_is_over_in_its_worker(
    worker: HostWorker, caller: Caller
) -> None:
    await caller.run("user-1", "n = 1")
    await caller.settled("user-1")
    await caller.sessions.forget_session("user-1")
    await eventually(lambda: not worker.hosted)
    assert (await caller.run("user-1", "'n' in globals()")).result_text == "False"
