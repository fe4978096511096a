"""A session's states, and starting, stopping and restarting it at any moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any

import pytest

from capsule_tasks.errors import SessionLost, SessionStartFailed, SessionStateError
from capsule_tasks.protocol.messages import Error, ErrorKind
from capsule_tasks.sessions import Session, SessionConfig, SessionState
from capsule_tasks.settings import TimeoutSettings
from tests.chaos.census import Census
from tests.sessions import HANG_S, Watched, collect, end_of, eventually, text, until_exited

S = SessionState
STUBBORN = """\
import time
while True:
    try: print('no', flush=True); time.sleep(3600)
    except BaseException: pass
"""


@pytest.fixture
async def census() -> AsyncIterator[Census]:
    """Nothing that the test starts is left when it ends."""
    census = Census()
    yield census
    await census.back_to_start()


def session_of(census: Census, **settings: Any) -> Session:
    return Session(SessionConfig(env=census.environment(), **settings))


def states_of(session: Session) -> list[SessionState]:
    """Filled with every state the session enters from now on."""
    states: list[SessionState] = []
    session.add_state_listener(lambda old, new: states.append(new))
    return states


# --- states --------------------------------------------------------------------------------------


async def test_a_listener_sees_every_state_in_order(census: Census) -> None:
    session = session_of(census, timeouts=TimeoutSettings(idle_s=0.02))
    states = states_of(session)
    assert session.state is S.CREATING
    assert not session.is_alive
    await session.start()
    await session.run("1")
    await eventually(lambda: session.state is S.IDLE)
    await session.run("2")
    await session.shutdown()
    assert [state for state in states if state is not S.IDLE] == [
        *(S.WARMING, S.READY, S.BUSY, S.READY, S.BUSY, S.READY, S.SHUTTING_DOWN, S.TERMINATED)
    ]
    assert {before for before, after in pairwise(states) if after is S.IDLE} == {S.READY}


async def test_a_listener_that_fails_or_is_removed_changes_nothing(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(old: SessionState, new: SessionState) -> None:
        raise ValueError("listener")

    states: list[SessionState] = []

    def notes(old: SessionState, new: SessionState) -> None:
        states.append(new)

    session.add_state_listener(fails)
    session.add_state_listener(notes)
    await session.run("1")
    assert states[:2] == [S.BUSY, S.READY]
    assert "listener" in caplog.text
    session.remove_state_listener(notes)
    session.remove_state_listener(fails)
    states.clear()
    await session.run("1")
    assert states == []


async def test_an_idle_session_takes_executions(census: Census) -> None:
    async with session_of(census, timeouts=TimeoutSettings(idle_s=0.001)) as session:
        for i in range(5):
            await eventually(lambda: session.state is S.IDLE)
            assert session.is_alive
            assert (await session.run(str(i))).value == i


async def test_info_counts_the_work_of_the_session(session: Session) -> None:
    before = time.monotonic()
    await session.run("1")
    await end_of(session, "1 / 0")
    info = session.info
    assert (info.execution_count, info.error_count, info.restarts) == (2, 1, 0)
    assert info.created_at <= (info.ready_at or 0) <= before <= (info.last_used_at or 0)
    assert info.pid is not None
    assert info.running == ()
    assert info.session_id == session.session_id
    watched = Watched(session, "import time; time.sleep(3600)")
    await eventually(lambda: session.info.running)
    assert session.info.running == (watched.execution_id,)
    assert session.info.queues.executions == 1
    await session.shutdown()
    await watched.ended()
    assert session.info.pid is None


async def test_metrics_can_be_switched_off(census: Census) -> None:
    async with session_of(census, enable_metrics=False) as session:
        await session.run("1")
        assert session.metrics == {}


async def test_calls_in_the_wrong_state_raise_errors_with_advice(census: Census) -> None:
    session = session_of(census)
    with pytest.raises(SessionStateError, match=r"execute\(\) .* creating; call start\(\)"):
        await collect(session, "1")
    await session.start()
    with pytest.raises(SessionStateError, match=r"start\(\) .* ready; use restart\(\)"):
        await session.start()
    assert (await session.run("1")).value == 1
    await session.shutdown()
    with pytest.raises(SessionStateError, match=r"execute\(\) .* terminated; call restart\(\)"):
        await collect(session, "1")
    with pytest.raises(SessionStateError, match=r"start\(\) .* terminated"):
        await session.start()


# --- stopping ------------------------------------------------------------------------------------


async def test_shutdown_lets_finally_blocks_run_and_their_output_arrive(census: Census) -> None:
    session = session_of(census)
    await session.start()
    watched = Watched(
        session,
        "import time\n"
        "try:\n"
        "    print('in', flush=True)\n"
        "    time.sleep(3600)\n"
        "finally:\n"
        "    print('and out')",
    )
    await watched.until_output("in")
    await session.shutdown("enough")
    error = await watched.ended()
    assert (error.kind, text(watched.messages)) == (ErrorKind.SHUTDOWN, "in\nand out\n")
    assert session.state is S.TERMINATED


async def test_shutdown_kills_tasks_that_do_not_stop(census: Census) -> None:
    session = session_of(census, timeouts=TimeoutSettings(shutdown_s=0.1))
    await session.start()
    watched = Watched(session, STUBBORN)
    await watched.until_output("no")
    await session.shutdown()
    error = await watched.ended()
    assert error.kind == ErrorKind.SHUTDOWN
    assert session.state is S.TERMINATED


@pytest.mark.parametrize("call", ["shutdown", "terminate"])
async def test_callers_see_the_end_as_an_error_not_as_their_own_cancellation(
    census: Census, call: str
) -> None:
    session = session_of(census)
    await session.start()
    executing = asyncio.ensure_future(collect(session, "import time; time.sleep(3600)"))
    hearing = asyncio.ensure_future(session.receive_message())
    await eventually(lambda: session.info.running)
    await getattr(session, call)()
    error = (await asyncio.wait_for(executing, HANG_S))[-1]
    assert isinstance(error, Error)
    assert error.kind == ErrorKind.SHUTDOWN
    with pytest.raises(SessionLost, match="the session was"):
        await asyncio.wait_for(hearing, HANG_S)
    assert session.metrics["cancel_event_triggers"] == 2


@pytest.mark.parametrize("first", ["shutdown", "terminate"])
@pytest.mark.parametrize("second", ["shutdown", "terminate"])
async def test_stopping_twice_from_two_tasks_is_safe(
    census: Census, first: str, second: str
) -> None:
    session = session_of(census)
    await session.start()
    watched = Watched(session, "import time; time.sleep(3600)")
    await eventually(lambda: session.info.running)
    async with asyncio.timeout(HANG_S):
        await asyncio.gather(getattr(session, first)(), getattr(session, second)())
        await getattr(session, second)()
    assert (await watched.ended()).kind == ErrorKind.SHUTDOWN
    assert session.state is S.TERMINATED


@pytest.mark.parametrize("call", ["shutdown", "terminate"])
async def test_stopping_before_the_start_ends_the_session(census: Census, call: str) -> None:
    session = session_of(census)
    await getattr(session, call)()
    assert session.state is S.TERMINATED
    with pytest.raises(SessionStateError):
        await session.start()
    await session.restart()
    assert (await session.run("1")).value == 1
    await session.shutdown()


async def test_ready_is_not_resurrected_by_an_execution_that_ends_after_terminate(
    census: Census,
) -> None:
    """The consumer reads on, and its `finally` runs, long after the session is over."""
    session = session_of(census)
    await session.start()
    stream = session.execute("import time\nprint('on', flush=True)\ntime.sleep(3600)")
    await anext(stream)
    await anext(stream)
    await session.terminate()
    states = states_of(session)
    async with asyncio.timeout(HANG_S):
        rest = [message async for message in stream]
    assert rest[-1].kind == ErrorKind.SHUTDOWN
    await session.terminate()
    await session.shutdown()
    assert (session.state, states, session.is_alive) == (S.TERMINATED, [], False)


async def test_a_consumer_that_leaves_after_terminate_does_not_resurrect_ready(
    census: Census,
) -> None:
    session = session_of(census)
    await session.start()
    stream = session.execute("import time; time.sleep(3600)")
    await anext(stream)
    await session.terminate()
    await stream.aclose()
    assert session.state is S.TERMINATED


# --- stopping a start ----------------------------------------------------------------------------

SLOW_WARMUP = "import time; time.sleep(3600)"


@pytest.mark.parametrize("call", ["shutdown", "terminate"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8])
async def test_stopping_during_the_start_ends_both(census: Census, call: str, steps: int) -> None:
    session = session_of(census, warmup=SLOW_WARMUP)
    starting = asyncio.ensure_future(session.start())
    for _ in range(steps):
        await asyncio.sleep(0)
    async with asyncio.timeout(HANG_S):
        await getattr(session, call)()
        with pytest.raises((SessionStartFailed, SessionStateError)):
            await starting
    assert session.state is S.TERMINATED


@pytest.mark.parametrize("call", ["shutdown", "terminate"])
async def test_stopping_during_the_warmup_ends_both(census: Census, call: str) -> None:
    session = session_of(census, warmup=SLOW_WARMUP)
    starting = asyncio.ensure_future(session.start())
    await eventually(lambda: session.info.running == ("warmup",))
    async with asyncio.timeout(HANG_S):
        await getattr(session, call)()
        with pytest.raises(SessionStartFailed):
            await starting
    assert session.state is S.TERMINATED


async def test_a_cancelled_start_leaves_nothing_and_can_be_repeated(census: Census) -> None:
    session = session_of(census, warmup=SLOW_WARMUP)
    starting = asyncio.ensure_future(session.start())
    await eventually(lambda: session.info.running == ("warmup",))
    pid = session.info.pid
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert session.state is S.ERROR
    assert pid is not None
    await until_exited(pid)
    assert not session.is_alive


# --- restarting ----------------------------------------------------------------------------------


async def test_a_restart_after_a_crash_is_a_new_life(census: Census) -> None:
    async with session_of(census) as session:
        await session.run("x = 1")
        pid = session.info.pid
        error = await end_of(session, "import os; os._exit(3)")
        assert "exited with status 3" in error.message
        assert session.state is S.ERROR
        with pytest.raises(SessionStateError, match="restart"):
            await collect(session, "1")
        await session.restart()
        info = session.info
        assert (info.state, info.restarts, info.execution_count, info.error_count) == (
            S.READY,
            1,
            0,
            0,
        )
        assert info.pid != pid
        assert info.last_error == ""
        assert (await end_of(session, "x")).type == "NameError"


async def test_a_restart_while_busy_ends_what_runs(census: Census) -> None:
    async with session_of(census) as session:
        watched = Watched(session, "import time; time.sleep(3600)")
        await eventually(lambda: session.info.running)
        await session.restart()
        assert (await watched.ended()).kind == ErrorKind.SHUTDOWN
        assert (await session.run("'new'")).value == "new"
        assert session.state is S.READY


async def test_restarts_that_come_together_share_one_child(census: Census) -> None:
    async with session_of(census) as session:
        await asyncio.gather(*(session.restart() for _ in range(5)))
        assert session.info.restarts == 1
        assert (await session.run("1")).value == 1


async def test_an_execution_waits_for_the_restart_under_way(census: Census) -> None:
    async with session_of(census) as session:
        await session.run("x = 1")
        restarting = asyncio.ensure_future(session.restart())
        await asyncio.sleep(0)
        assert (await end_of(session, "x")).type == "NameError"
        await restarting


@pytest.mark.parametrize("call", ["shutdown", "terminate"])
async def test_stopping_a_restart_does_not_cancel_its_waiters(census: Census, call: str) -> None:
    session = session_of(census)
    await session.start()
    restarting = asyncio.ensure_future(session.restart())
    waiting = asyncio.ensure_future(collect(session, "1"))
    await eventually(lambda: session.state is not S.READY)
    async with asyncio.timeout(HANG_S):
        await getattr(session, call)()
        for caller in (restarting, waiting):
            with pytest.raises((SessionStateError, SessionStartFailed)):
                await caller
    assert session.state is S.TERMINATED


async def test_stop_and_restart_any_number_of_times_leave_nothing(census: Census) -> None:
    session = session_of(census)
    await session.start()
    for _ in range(5):
        await session.run("import threading; threading.Thread(target=print).start()")
        await session.restart()
    assert session.info.restarts == 5
    await session.shutdown()


# --- clocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [-1e9, 1e9], ids=["back", "ahead"])
async def test_a_jump_of_the_wall_clock_ends_and_delays_nothing(
    census: Census, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    clock: Callable[[], float] = time.time
    async with session_of(census) as session:
        await session.run(f"import time\nreal = time.time\ntime.time = lambda: real() + {jump}")
        watched = Watched(session, "input()", timeout_s=3600.0)
        await eventually(lambda: session.info.inputs.pending)
        monkeypatch.setattr(time, "time", lambda: clock() + jump)
        assert await session.cancel(watched.execution_id, grace_s=HANG_S) == "interrupted"
        await watched.ended()
        assert (await session.run("2", timeout_s=HANG_S)).value == 2
