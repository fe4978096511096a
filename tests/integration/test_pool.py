"""SessionPool with real children: fair, isolated, nothing leaked."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine

import pytest

from capsule_tasks.errors import NotBorrowed, PoolUnavailable, SessionBusy
from capsule_tasks.sessions import Session, SessionPool
from capsule_tasks.settings import (
    ChildSettings,
    DiagnosticSettings,
    PoolSettings,
    Profile,
    SessionConfig,
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
async def test_a_session_for_a_cancelled_waiter_goes_to_the_next_in_the_same_turn(
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


async def test_a_double_release_and_a_foreign_session_are_refused() -> None:
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


async def test_a_borrower_sees_nothing_of_the_one_before() -> None:
    """By default; a caller that wants a session again passes a name or `fresh=False`."""
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


QUICK = ChildSettings(diagnostics=DiagnosticSettings(heartbeat_interval_s=0.02))


@pytest.mark.parametrize("steps", [1, 2, 5, 20])
async def test_a_cancelled_stop_still_ends_everything(steps: int) -> None:
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
