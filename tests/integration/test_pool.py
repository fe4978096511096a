"""SessionPool with real children: fair, isolated, nothing leaked."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path

import pytest

from capsule_tasks.errors import NotBorrowed, PoolUnavailable, SessionBusy
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
from tests.sessions import HANG_S, Watched, eventually, until_exited


def pool_of(**changes: object) -> SessionPool:
    """Cold sessions that are used again, so that it can be seen which one a borrower got."""
    changes.setdefault("fresh", False)
    return SessionPool({"app": Profile(pool=PoolSettings(**changes), start="cold")})  # type: ignore[arg-type]


async def test_twenty_tasks_over_a_pool_of_two_all_finish_and_never_more_than_two_run() -> None:
    most = 0
    async with asyncio.timeout(HANG_S), pool_of(min_idle=2, max_sessions=2) as pool:

        async def task(number: int) -> int:
            nonlocal most
            async with pool.borrow() as session:
                info = pool.info()
                most = max(most, len(info.sessions))
                value: int = (await session.run(f"{number} * 2")).value
                return value

        results = await asyncio.gather(*map(task, range(20)))
    assert results == [number * 2 for number in range(20)]
    assert most == 2


async def test_a_cancelled_acquire_leaks_no_slot() -> None:
    async with asyncio.timeout(HANG_S), pool_of(min_idle=1, max_sessions=1) as pool:
        for delay in range(30):
            holder = await pool.acquire()
            waiter = asyncio.create_task(pool.acquire())
            for _ in range(delay % 4):
                await asyncio.sleep(0)
            if delay % 2:
                pool.release(holder)
            waiter.cancel()
            await asyncio.wait({waiter})
            if not waiter.cancelled():
                pool.release(waiter.result())
            if not delay % 2:
                pool.release(holder)
        async with pool.borrow() as session:
            assert (await session.run("1 + 1")).value == 2
        assert pool.info().borrowed == 0


async def test_borrowers_that_are_cancelled_together_leave_the_pool_as_it_was() -> None:
    """One gives its session back in the turn of the loop in which those behind are cancelled."""
    async with asyncio.timeout(HANG_S), pool_of(min_idle=1, max_sessions=1) as pool:
        holds = asyncio.Event()

        async def borrow() -> None:
            async with pool.borrow():
                holds.set()
                await asyncio.Event().wait()

        async def fail_once_one_holds() -> None:
            await holds.wait()
            raise LookupError

        with pytest.RaisesGroup(LookupError):
            async with asyncio.TaskGroup() as group:
                for work in (borrow, borrow, borrow, fail_once_one_holds):
                    group.create_task(work())
        assert (pool.info().borrowed, pool.info().waiting) == (0, 0)
        async with pool.borrow() as session:
            assert (await session.run("1 + 1")).value == 2


@pytest.mark.parametrize("name", [None, "anna"])
async def test_what_a_cancelled_waiter_would_get_goes_to_the_next_in_the_same_turn(
    name: str | None,
) -> None:
    async with asyncio.timeout(HANG_S), pool_of(min_idle=1, max_sessions=1) as pool:
        held = await pool.acquire()
        cancelled, next_one = (asyncio.create_task(pool.acquire(name=n)) for n in (name, None))
        await asyncio.sleep(0)
        cancelled.cancel()
        pool.release(held)
        assert pool.info().waiting == 0  # decided upon already
        assert await next_one is held
        assert cancelled.cancelled()
        pool.release(held)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
async def test_a_stop_beside_the_cancel_of_a_waiter_ends_everything(steps: int) -> None:
    async with asyncio.timeout(HANG_S):
        pool = pool_of(min_idle=1, max_sessions=1)
        await pool.start()
        held = await pool.acquire()
        waiters = [asyncio.create_task(pool.acquire()) for _ in range(2)]
        await asyncio.sleep(0)
        stopping = asyncio.create_task(pool.stop())
        for _ in range(steps):
            await asyncio.sleep(0)
        waiters[0].cancel()
        await stopping
        cancelled, refused = await asyncio.gather(*waiters, return_exceptions=True)
        assert isinstance(cancelled, asyncio.CancelledError | PoolUnavailable)
        assert isinstance(refused, PoolUnavailable)
        assert not held.is_alive


async def test_an_action_that_fails_costs_the_others_of_its_batch_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(HANG_S):
        pool = pool_of(min_idle=2, max_sessions=2)
        await pool.start()
        sessions = [await pool.acquire(), await pool.acquire()]
        profile_pool = pool._pools["app"]
        end, failures = profile_pool._end, [RuntimeError("no")]

        def fail_once(number: int) -> Coroutine[None, None, None]:
            if failures:
                raise failures.pop()
            return end(number)

        monkeypatch.setattr(profile_pool, "_end", fail_once)
        await pool.stop()
        assert caplog.text.count("could not carry out Retire(") == 1
        assert sorted(session.is_alive for session in sessions) == [False, True]
        await asyncio.gather(*(session.terminate() for session in sessions))


async def test_a_waiter_cancelled_while_being_served_hands_the_session_on_unused() -> None:
    async with asyncio.timeout(HANG_S), pool_of(min_idle=1, max_sessions=1, max_uses=2) as pool:
        holder = await pool.acquire()
        pid = holder.info.pid
        waiter = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0)
        pool.release(holder)  # the waiter has been served, and does not know it yet
        waiter.cancel()
        await asyncio.wait({waiter})
        assert waiter.cancelled()
        async with pool.borrow() as session:
            assert session.info.pid == pid


async def test_a_double_release_and_a_stranger_are_refused() -> None:
    async with asyncio.timeout(HANG_S), pool_of() as pool:
        session = await pool.acquire()
        pool.release(session)
        with pytest.raises(NotBorrowed, match=session.session_id):
            pool.release(session)
        with pytest.raises(NotBorrowed):
            pool.release(Session())


async def test_a_busy_session_cannot_be_released_but_retired() -> None:
    async with asyncio.timeout(HANG_S), pool_of(max_sessions=1) as pool:
        session = await pool.acquire()
        running = Watched(session, "print('on', flush=True)\nimport time; time.sleep(60)")
        await running.until_output("on")
        with pytest.raises(SessionBusy, match=running.execution_id):
            pool.release(session)
        pool.retire(session)
        assert (await running.ended()).kind == "shutdown"
        async with pool.borrow() as other:
            assert other is not session


async def test_a_waiter_wakes_when_a_session_dies_and_its_place_is_free() -> None:
    async with asyncio.timeout(HANG_S), pool_of(min_idle=0, max_sessions=1) as pool:
        session = await pool.acquire()
        waiter = asyncio.create_task(pool.acquire())
        assert session.info.pid is not None
        os.kill(session.info.pid, signal.SIGKILL)
        await eventually(lambda: not session.is_alive)
        pool.release(session)
        other = await waiter
        assert (await other.run("'alive'")).value == "alive"
        pool.release(other)


async def test_an_idle_session_that_dies_is_replaced_before_anyone_asks() -> None:
    async with asyncio.timeout(HANG_S), pool_of(min_idle=1, max_sessions=2) as pool:
        await eventually(lambda: pool.info().idle == 1)
        (info,) = pool.info().sessions
        assert info.pid is not None
        os.kill(info.pid, signal.SIGKILL)
        await eventually(
            lambda: pool.info().idle == 1 and pool.info().sessions[0].pid not in (None, info.pid)
        )


async def test_a_borrower_sees_nothing_of_the_one_before() -> None:
    """By default: who wants a session again says so, by a name or with `fresh=False`."""
    async with asyncio.timeout(HANG_S), SessionPool() as pool:
        async with pool.borrow() as session:
            await session.run("import builtins; builtins.divmod = lambda *_: 'mine'; secret = 1")
        async with pool.borrow() as session:
            assert (await session.run("'secret' in globals(), divmod(7, 2)")).value == (
                False,
                (3, 1),
            )


async def test_a_pool_that_is_not_fresh_lends_its_sessions_again() -> None:
    profiles = {"app": Profile.app(), "mine": Profile(pool=PoolSettings(fresh=False))}
    async with asyncio.timeout(HANG_S), SessionPool(profiles) as pool:
        for name in profiles:
            async with pool.borrow(name) as session:
                await session.run("x = 41")
            async with pool.borrow(name) as session:
                assert (await session.run("x + 1")).value == 42


async def test_a_named_session_keeps_its_namespace_between_borrowers() -> None:
    profile = Profile(pool=PoolSettings(min_idle=0, max_sessions=2))
    async with asyncio.timeout(HANG_S), SessionPool({"app": profile}) as pool:
        async with pool.borrow(name="anna") as session:
            await session.run("x = 41")
        async with pool.borrow(name="bert") as session:
            assert (await session.run("'x' in globals()")).value is False
        async with pool.borrow(name="anna") as session:
            assert (await session.run("x + 1")).value == 42


async def test_borrowers_of_fresh_sessions_all_have_their_turn_in_a_full_pool() -> None:
    profile = Profile(pool=PoolSettings(min_idle=1, max_sessions=2))
    async with asyncio.timeout(HANG_S), SessionPool({"app": profile}) as pool:

        async def borrow() -> object:
            async with pool.borrow() as session:
                source = "seen = globals().get('seen', 0) + 1\nseen"
                return (await session.run(source)).value

        assert await asyncio.gather(*(borrow() for _ in range(12))) == [1] * 12


async def test_a_session_is_recycled_after_its_uses_and_its_successor_counts_anew() -> None:
    async with asyncio.timeout(HANG_S), pool_of(min_idle=0, max_sessions=1, max_uses=2) as pool:
        pids = []
        for _ in range(6):
            async with pool.borrow() as session:
                pids.append((await session.run("import os; os.getpid()")).value)
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [2, 2, 2]


async def test_executions_count_as_uses_however_few_borrowers_run_them() -> None:
    async with asyncio.timeout(HANG_S), pool_of(min_idle=0, max_sessions=1, max_uses=5) as pool:
        pids = []
        for executions in (3, 2, 1):  # five, and the session is worn
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


async def test_a_session_is_recycled_when_it_is_too_old_also_while_nobody_wants_it() -> None:
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


async def test_looking_after_the_health_never_takes_an_idle_session_away() -> None:
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


@pytest.mark.parametrize("steps", [1, 2, 5, 20])
async def test_a_stop_that_is_cancelled_ends_everything_all_the_same(steps: int) -> None:
    profile = Profile(pool=PoolSettings(min_idle=2, max_sessions=2))
    pool = SessionPool({"app": profile, "other": profile})
    async with asyncio.timeout(HANG_S):
        await pool.start()
        await eventually(lambda: pool.info().idle == 2 and pool.info("other").idle == 2)
        names = ("app", "other")
        pids = [info.pid for name in names for info in pool.info(name).sessions]
        pids += [pool.info(name).template_pid for name in names]
        stopping = asyncio.create_task(pool.stop())
        for _ in range(steps):
            await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        for pid in pids:
            assert pid is not None
            await until_exited(pid)


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


async def test_warmup_and_sub_pools_are_per_profile() -> None:
    warm = Profile(session=SessionConfig(warmup="print('noise'); ready = 7"))
    cold = Profile(start="cold")
    async with asyncio.timeout(HANG_S), SessionPool({"warm": warm, "cold": cold}) as pool:
        async with pool.borrow("warm") as session:
            completed = await session.run("ready")
            assert (completed.value, completed.stdout) == (7, "")
        async with pool.borrow("cold") as session:
            assert (await session.run("'ready' in globals()")).value is False
        with pytest.raises(ValueError, match="no profile 'hot'"):
            await pool.acquire("hot")


@pytest.mark.parametrize("moment", ["warmup", "waiters", "busy"])
async def test_stop_is_clean_at_any_moment(moment: str) -> None:
    session = SessionConfig(warmup="import time; time.sleep(60)" if moment == "warmup" else None)
    profile = Profile(session=session, pool=PoolSettings(min_idle=1, max_sessions=1), start="cold")
    pool = SessionPool({"app": profile})
    async with asyncio.timeout(HANG_S):
        await pool.start()
        if moment == "warmup":
            await eventually(lambda: pool.info().sessions and pool.info().sessions[0].pid)
        else:
            lent = await pool.acquire()
            if moment == "busy":
                running = Watched(lent, "print('on', flush=True)\nwhile True: pass")
                await running.until_output("on")
        waiters = [asyncio.create_task(pool.acquire()) for _ in range(3)]
        await asyncio.sleep(0)
        pids = [info.pid for info in pool.info().sessions if info.pid]
        await asyncio.gather(pool.stop(), pool.stop())
        for outcome in await asyncio.gather(*waiters, return_exceptions=True):
            assert isinstance(outcome, PoolUnavailable)
        for pid in pids:
            await until_exited(pid)
        with pytest.raises(PoolUnavailable, match="stopping"):
            await pool.acquire()
        await pool.stop()
        assert pool.info().start_failures_total == 0  # what is stopped on purpose has not failed
        assert pool.info().last_error == ""
        if moment == "busy":
            assert (await running.ended()).kind == "shutdown"


async def test_what_listens_to_heartbeats_is_never_put_on_another_thread() -> None:
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
