"""How a pool maintains its sessions: replacing, recycling, ending, and the breaker."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from capsule_tasks.errors import PoolUnavailable
from capsule_tasks.protocol.messages import Heartbeat
from capsule_tasks.sessions import Session, SessionPool
from capsule_tasks.sessions.process.template import TemplateSpawner
from capsule_tasks.settings import (
    ChildSettings,
    DiagnosticSettings,
    PoolSettings,
    Profile,
    RoutingSettings,
    SessionConfig,
    TimeoutSettings,
)
from tests.sessions import HANG_S, eventually, until_exited


def pool_of(**changes: object) -> SessionPool:
    """Cold sessions that are used again, so that it can be seen which one a borrower got."""
    changes.setdefault("fresh", False)
    return SessionPool({"app": Profile(pool=PoolSettings(**changes), start="cold")})  # type: ignore[arg-type]


async def test_an_idle_session_that_dies_is_replaced_before_anyone_asks() -> None:
    async with asyncio.timeout(HANG_S), pool_of(min_idle=1, max_sessions=2) as pool:
        await eventually(lambda: pool.info().idle == 1)
        (info,) = pool.info().sessions
        assert info.pid is not None
        os.kill(info.pid, signal.SIGKILL)
        await eventually(
            lambda: pool.info().idle == 1 and pool.info().sessions[0].pid not in (None, info.pid)
        )


async def test_a_session_is_recycled_after_its_uses_and_its_successor_counts_from_zero() -> None:
    async with asyncio.timeout(HANG_S), pool_of(min_idle=0, max_sessions=1, max_uses=2) as pool:
        pids = []
        for _ in range(6):
            async with pool.borrow() as session:
                pids.append((await session.run("import os; os.getpid()")).value)
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [2, 2, 2]


async def test_executions_count_as_uses_however_few_borrowers_run_them() -> None:
    async with asyncio.timeout(HANG_S), pool_of(min_idle=0, max_sessions=1, max_uses=5) as pool:
        pids = []
        for executions in (3, 2, 1):  # five, and the session is replaced
            async with pool.borrow() as session:
                source = "import os; os.getpid()"
                pids += [(await session.run(source)).value for _ in range(executions)]
        assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [5, 1]
        assert pool.info().retired == {"it was used 5 times or more": 1}


QUICK = ChildSettings(diagnostics=DiagnosticSettings(heartbeat_interval_s=0.02))


async def test_a_session_is_recycled_when_its_memory_has_grown() -> None:
    limit = 50 * 1024 * 1024
    settings = PoolSettings(min_idle=0, max_sessions=1, fresh=False, max_growth_bytes=limit)
    profile = Profile(session=SessionConfig(child=QUICK), pool=settings, start="cold")
    async with asyncio.timeout(HANG_S), SessionPool({"app": profile}) as pool:
        async with pool.borrow() as session:
            await session.run("modest = bytearray(b'x') * (5 * 1024 * 1024)")
            last = session.info.last_heartbeat_at
            await eventually(lambda: session.info.last_heartbeat_at != last)
        async with pool.borrow() as again:
            assert again is session
            await session.run("hog = bytearray(b'x') * (100 * 1024 * 1024)")
            await eventually(lambda: (b := session.info.last_heartbeat) and b.rss_bytes > 2 * limit)
        async with pool.borrow() as other:
            assert other is not session
        assert pool.info().retired == {f"its memory has grown by {limit} bytes or more": 1}


async def test_an_idle_session_is_recycled_when_it_is_too_old() -> None:
    async with asyncio.timeout(HANG_S), pool_of(min_idle=1, max_sessions=2, max_age_s=0.2) as pool:
        await eventually(lambda: pool.info().retired.get("it is older than 0.2 s", 0) >= 2)


async def test_idle_sessions_beyond_the_minimum_are_ended_after_the_timeout() -> None:
    changes = {"min_idle": 1, "max_sessions": 3, "idle_timeout_s": 0.2}
    async with asyncio.timeout(HANG_S), pool_of(**changes) as pool:
        sessions = [await pool.acquire() for _ in range(3)]
        for session in sessions:
            pool.release(session)
        await eventually(lambda: pool.info().retired == {"it was idle for 0.2 s": 2})
        await eventually(lambda: len(pool.info().sessions) == 1)
        assert pool.info().idle == 1


async def test_a_session_whose_heartbeat_is_missing_is_replaced_and_hides_no_other() -> None:
    profile = Profile(
        session=SessionConfig(child=QUICK, timeouts=TimeoutSettings(unresponsive_s=3.0)),
        pool=PoolSettings(min_idle=2, max_sessions=3),
        start="cold",
    )
    async with asyncio.timeout(HANG_S), SessionPool({"app": profile}) as pool:
        await eventually(lambda: pool.info().idle == 2)
        silent, healthy = (info.pid for info in pool.info().sessions)
        assert silent is not None
        os.kill(silent, signal.SIGSTOP)
        await eventually(lambda: pool.info().retired == {"its heartbeat is missing": 1})
        await eventually(lambda: pool.info().idle == 2)
        assert healthy in {info.pid for info in pool.info().sessions}
        await until_exited(silent)


async def test_health_checks_never_take_an_idle_session_away() -> None:
    profile = Profile(
        session=SessionConfig(child=QUICK), pool=PoolSettings(min_idle=1, max_sessions=1)
    )
    async with asyncio.timeout(HANG_S), SessionPool({"app": profile}) as pool:
        await eventually(lambda: pool.info().idle == 1)
        (info,) = pool.info().sessions
        beats = set()
        while len(beats) < 5:
            await asyncio.sleep(0.001)
            assert pool.info().idle == 1
            beats.add(pool.info().sessions[0].last_heartbeat_at)
        async with pool.borrow() as session:
            assert session.info.pid == info.pid


async def test_reasons_without_end_are_not_kept_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("capsule_tasks.sessions.pool.session_pool._MAX_REASONS", 3)
    async with asyncio.timeout(HANG_S), pool_of(min_idle=0, max_sessions=1) as pool:
        for status in range(6):
            async with pool.borrow() as session:
                async for _ in session.execute(f"import os; os._exit({status})"):
                    pass
        async with pool.borrow():
            retired = pool.info().retired
    assert sorted(retired.values()) == [1, 1, 1, 3]
    assert retired["other reasons"] == 3


async def test_the_breaker_closes_when_starts_succeed_again(tmp_path: Path) -> None:
    python = tmp_path / "python"
    broken = Profile(
        session=SessionConfig(python=str(python)),
        pool=PoolSettings(min_idle=0, max_sessions=2, breaker_failures=2, breaker_reset_s=0.1),
        start="cold",
    )
    async with asyncio.timeout(HANG_S), SessionPool({"app": broken}) as pool:
        with pytest.raises(PoolUnavailable, match="2 starts in a row failed"):
            await pool.acquire()
        assert pool.info().start_failures_total == 2
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)

        async def acquired() -> Session:
            while True:
                try:
                    return await pool.acquire()
                except PoolUnavailable:
                    await asyncio.sleep(0.01)

        session = await acquired()
        assert (await session.run("1 + 1")).value == 2
        assert not pool.info().breaker_open
        assert pool.info().start_failures_total == 2
        pool.release(session)


async def test_failed_starts_open_the_breaker_with_a_clear_error() -> None:
    broken = Profile(
        session=SessionConfig(python="/nowhere/python"),
        pool=PoolSettings(min_idle=1, breaker_failures=2, breaker_reset_s=60),
        start="cold",
    )
    async with asyncio.timeout(HANG_S), SessionPool({"app": broken}) as pool:
        with pytest.raises(PoolUnavailable, match=r"starts in a row failed.*/nowhere/python"):
            await pool.acquire()
        assert pool.info().breaker_open


async def test_listeners_to_heartbeats_are_never_called_on_another_thread() -> None:
    """A slow interceptor is; what a pool decides by must stay on its loop, on any machine."""
    heard: list[int] = []

    def listen(_: Heartbeat) -> None:
        time.sleep(0.001)  # ten times the budget
        heard.append(threading.get_ident())

    def on_new(session: Session) -> None:
        session.add_heartbeat_listener(listen)

    config = SessionConfig(
        child=QUICK, routing=RoutingSettings(interceptor_budget_s=0.0001, interceptor_overruns=1)
    )
    profile = Profile.app(session=config, pool=PoolSettings(min_idle=1, max_sessions=1))
    async with SessionPool({"app": profile}, on_new=on_new) as pool, pool.borrow("app") as session:
        await session.run("1")
        await eventually(lambda: len(heard) > 5)
        assert set(heard) == {threading.get_ident()}
        assert session.metrics["interceptor_quarantine_total"] == 0


async def test_a_renewed_pool_starts_others_and_ends_those_that_are_given_back() -> None:
    def profile(word: str) -> Profile:
        session = SessionConfig(env={**os.environ, "WORD": word})
        return Profile(session=session, pool=PoolSettings(min_idle=1, max_sessions=3), start="cold")

    async def word(session: Session) -> object:
        return (await session.run("import os\nos.environ['WORD']")).value

    old, new = (TemplateSpawner(profile(name)) for name in ("old", "new"))
    async with asyncio.timeout(HANG_S), SessionPool({"app": profile("old")}, spawner=old) as pool:
        lent, idle = await pool.acquire(), await pool.acquire()
        pool.release(idle)
        idle_pid = idle.info.pid
        pool.renew(new, {"app": profile("new")})
        assert idle_pid is not None
        await until_exited(idle_pid)
        async with pool.borrow() as session:
            assert await word(session) == "new"
        assert await word(lent) == "old"
        lent_pid = lent.info.pid
        pool.release(lent)
        assert lent_pid is not None
        await until_exited(lent_pid)
    assert new.cold_starts > 0
    async with pool_of() as owner:
        with pytest.raises(ValueError, match="its own spawner"):
            owner.renew(new, {"app": profile("new")})
