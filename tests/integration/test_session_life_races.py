"""Starts, stops and restarts that meet each other. Each of these once went wrong."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Callable
from typing import Any

import pytest

from capsule_tasks.errors import SessionStartFailed, SessionStateError
from capsule_tasks.protocol.messages import Output
from capsule_tasks.sessions import Session, SessionConfig, SessionState
from capsule_tasks.settings import ChildSettings, OutputSettings, TimeoutSettings
from tests.chaos.census import Census
from tests.chaos.workloads import STUBBORN
from tests.sessions import HANG_S, Watched, text


async def until_holds(condition: Callable[[], bool]) -> None:
    """Wait, without a pause, for the very turn of the loop in which something becomes true."""
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0)


async def test_a_child_that_dies_as_it_becomes_ready_leaves_no_ready_session() -> None:
    session = Session()
    starting = asyncio.create_task(session.start())
    await until_holds(lambda: session.info.pid is not None)
    child: Any = session._child
    select.select([child.process.descriptors.control], [], [], HANG_S)  # it is ready; now it dies
    os.kill(child.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - on purpose
    with pytest.raises(SessionStartFailed):
        await starting
    assert session.state is SessionState.ERROR


async def test_restarts_that_meet_a_terminate_leave_one_child() -> None:
    census = Census()
    session = Session(SessionConfig(env=census.environment()))
    await session.start()
    calls = [session.terminate(), session.restart(), session.terminate(), session.restart()]
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(ends[1], SessionStateError)
    assert ends[0] is ends[2] is ends[3] is None
    assert session.state is SessionState.READY
    assert census.processes() == [session.info.pid]
    assert (await session.run("1 + 1")).value == 2
    await session.terminate()
    del session, calls, ends  # a session keeps its last child, an error the session
    await census.back_to_start()


async def test_terminating_the_session_does_not_cancel_the_caller_of_start() -> None:
    session = Session()
    starting = asyncio.create_task(session.start())
    await until_holds(lambda: session.info.pid is not None)
    await session.terminate()
    with pytest.raises(SessionStartFailed):
        await starting
    assert session.state is SessionState.TERMINATED


async def test_a_cancelled_start_is_an_error_at_whatever_step() -> None:
    for steps in range(4):
        session = Session()
        starting = asyncio.create_task(session.start())
        for _ in range(steps):
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert session.state in (SessionState.ERROR, SessionState.CREATING)
        assert session.info.pid is None


async def test_a_session_that_is_terminated_while_its_child_is_killed_does_not_come_back() -> None:
    census = Census()
    session = Session(SessionConfig(env=census.environment()))
    await session.start()
    watched = Watched(session, STUBBORN["swallows"])
    await watched.until(Output)
    cancelling = asyncio.create_task(session.cancel(watched.execution_id, 0.0))
    child: Any = session._child
    await until_holds(lambda: child._kill_reason is not None)
    await session.terminate()
    assert await cancelling == "killed"
    await watched.ended()
    assert session.state is SessionState.TERMINATED
    assert census.processes() == []


async def test_a_second_shutdown_does_not_cut_the_first_one_short() -> None:
    session = Session()
    await session.start()
    watched = Watched(
        session,
        "import time\n"
        "try: print('begun'), time.sleep(300)\n"
        "finally: time.sleep(0.3), print('cleaned up')",
    )
    await watched.until(Output)
    await asyncio.gather(session.shutdown(), session.shutdown())
    await watched.ended()
    assert text(watched.messages) == "begun\ncleaned up\n"


async def test_a_shutdown_lets_coroutines_clean_up() -> None:
    session = Session()
    await session.start()
    watched = Watched(
        session,
        "import asyncio\n"
        "print('begun')\n"
        "try: await asyncio.sleep(300)\n"
        "finally:\n"
        "    await asyncio.sleep(0.05)\n"
        "    print('cleaned up')",
    )
    await watched.until(Output)
    await session.shutdown()
    await watched.ended()
    assert text(watched.messages) == "begun\ncleaned up\n"


async def test_a_paused_consumer_does_not_hold_up_a_shutdown() -> None:
    timeouts = TimeoutSettings(shutdown_s=2 * HANG_S)
    output = OutputSettings(window_bytes=1000)
    session = Session(SessionConfig(child=ChildSettings(output=output), timeouts=timeouts))
    await session.start()
    messages = session.execute("try:\n  while True: print('x' * 99)\nfinally: print('cleaned up')")
    await anext(messages)
    await until_holds(lambda: session.info.queues.buffered_bytes > output.window_bytes)
    async with asyncio.timeout(HANG_S):
        await session.shutdown()
    rest = [message async for message in messages]
    assert text(rest).endswith("cleaned up\n")
    assert rest[-1].kind == "shutdown"


async def test_output_of_the_session_still_arrives_after_a_checkpoint() -> None:
    async with Session() as session:
        await session.checkpoint()
        await session.run("import threading\nthreading.Timer(0.05, print, ['late']).start()")
        message = await session.receive_message(HANG_S)
        assert (type(message), message.data) == (Output, "late")


async def test_a_message_is_not_lost_with_a_receiver_that_is_cancelled_as_it_comes() -> None:
    async with Session() as session:
        first = asyncio.create_task(session.receive_message())
        second = asyncio.create_task(session.receive_message(HANG_S))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        session.add_message_interceptor(
            lambda m: isinstance(m, Output) and loop.call_soon(first.cancel)
        )
        once = "import os, threading\nthreading.Timer(0.05, os.write, [1, b'late']).start()"
        await session.run(once)
        assert (await second).data == "late"
        assert first.cancelled()


async def test_a_child_that_dies_while_its_stack_is_taken_leaves_the_loop_in_order() -> None:
    session = Session()
    await session.start()
    deaf = "import os, signal\nsignal.signal(28, signal.SIG_IGN)\nos.write(1, b'deaf')\n"
    watched = Watched(session, deaf + STUBBORN["holds the GIL"])
    await watched.until(Output)
    asking = asyncio.create_task(session.stack())
    child: Any = session._child
    stacks = child.process.descriptors.stacks
    registered: Any = asyncio.get_running_loop()
    await until_holds(lambda: stacks in registered._selector.get_map())
    os.kill(child.process.pid, signal.SIGKILL)
    await watched.ended()
    await asyncio.wait({asking})
    assert stacks not in registered._selector.get_map()
    await session.terminate()
