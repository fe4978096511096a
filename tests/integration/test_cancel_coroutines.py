"""Cancelling coroutines: the one meant, its neighbours unharmed, and a child that is condemned."""

from __future__ import annotations

import asyncio
import textwrap

import pytest

from capsule_tasks.errors import SessionStateError
from capsule_tasks.protocol.messages import (
    Error,
    ErrorKind,
    InputRequest,
    Result,
)
from capsule_tasks.sessions import Session
from capsule_tasks.settings import SessionConfig, TimeoutSettings
from tests.sessions import HANG_S, GilHold, Watched, collect, eventually, text

FOREVER = "await asyncio.Event().wait()"
ASKS = "await asyncio.to_thread(input, 'go on? ')"
IGNORES = """
while True:
    try:
        print('deaf')
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        pass
"""
HOLDS = "await asyncio.sleep(0)\nhold_gil()"


async def a_session_with_imports(session: Session) -> None:
    await session.run("import asyncio, os, threading, time\nkept = 41")


@pytest.fixture
async def ready(session: Session) -> Session:
    await a_session_with_imports(session)
    return session


def impatient(drain_s: float) -> Session:
    return Session(SessionConfig(timeouts=TimeoutSettings(drain_s=drain_s)))


async def until_deaf(target: Watched, gil_hold: GilHold) -> None:
    """Wait until a stubborn execution cannot be reached any more."""
    if HOLDS in target.source:
        await gil_hold.until_held()
    else:
        await target.until_output("deaf")


async def answer(session: Session, watched: Watched) -> None:
    request = await watched.until(InputRequest)
    await session.input_response("yes", request_id=request.id, execution_id=watched.execution_id)


OBEDIENT = {
    "top-level await": FOREVER,
    "an async def": f"async def job():\n    {FOREVER}\nawait job()",
    "a task group": f"""
async def job():
    {FOREVER}
async with asyncio.TaskGroup() as group:
    group.create_task(job())
    group.create_task(job())
""",
    "an async for": """
async def ticks():
    while True:
        yield await asyncio.sleep(0)
async for _ in ticks():
    pass
""",
    "a busy loop in a coroutine": "async def job():\n    while True: pass\nawait job()",
    "a blocking sleep in a coroutine": "async def job():\n    time.sleep(3600)\nawait job()",
    "a flood of awaits": "while True: await asyncio.sleep(0)",
    "a wait for a thread": "await asyncio.to_thread(threading.Event().wait, 5)",
}


@pytest.mark.parametrize("source", OBEDIENT.values(), ids=OBEDIENT.keys())
async def test_a_coroutine_is_cancelled_and_its_finally_block_may_await(
    ready: Session, source: str
) -> None:
    pid = ready.info.pid
    body = textwrap.indent(source, "    ")
    watched = Watched(
        ready,
        f"print('at work')\ntry:\n{body}\n"
        "finally:\n    await asyncio.sleep(0.001)\n    print('finally ran')",
    )
    await watched.until_output("at work")
    assert await ready.cancel(watched.execution_id, grace_s=HANG_S) == "interrupted"
    terminal = await watched.ended()
    assert isinstance(terminal, Error)
    assert (terminal.kind, terminal.type) == (ErrorKind.CANCELLED, "ExecutionCancelled")
    assert text(watched.messages) == "at work\nfinally ran\n"
    assert (ready.info.pid, ready.info.restarts) == (pid, 0)
    assert (await ready.run("kept + 1")).value == 42


async def test_other_executions_are_left_alone(ready: Session) -> None:
    neighbours = [Watched(ready, f"{ASKS} + '{n}'", execution_id=f"n{n}") for n in range(3)]
    for neighbour in neighbours:
        await neighbour.until(InputRequest)
    target = Watched(ready, f"print('at work')\n{FOREVER}")
    await target.until_output("at work")
    assert await ready.cancel(target.execution_id, grace_s=HANG_S) == "interrupted"
    assert (await target.ended()).kind == ErrorKind.CANCELLED
    for neighbour in neighbours:
        await answer(ready, neighbour)
    assert [(await n.ended()).value for n in neighbours] == ["yes0", "yes1", "yes2"]


async def test_tasks_the_user_left_running_go_on(ready: Session) -> None:
    await ready.run(
        "ticks = 0\n"
        "async def tick():\n"
        "    global ticks\n"
        "    while True:\n"
        "        ticks += 1\n"
        "        await asyncio.sleep(0.001)\n"
        "background = asyncio.create_task(tick())\n"
        "await asyncio.sleep(0)"
    )
    for source in (FOREVER, "async def job():\n    while True: pass\nawait job()"):
        target = Watched(ready, f"print('at work')\n{source}")
        await target.until_output("at work")
        assert await ready.cancel(target.execution_id, grace_s=HANG_S) == "interrupted"
        await target.ended()
        goes_on = "before = ticks\nwhile ticks < before + 3: await asyncio.sleep(0.001)\n'yes'"
        assert (await ready.run(goes_on)).value == "yes"
    assert (await ready.run("background.done()")).value is False


async def test_a_task_that_keeps_the_loop_is_not_hit_in_its_neighbours_place(
    ready: Session,
) -> None:
    await ready.run(
        "hits = []\n"
        "async def spin():\n"
        "    try:\n"
        "        os.write(1, b'spinning')\n"
        "        end = time.monotonic() + 0.5\n"
        "        while time.monotonic() < end:\n"
        "            pass\n"
        "    except BaseException as error:\n"
        "        hits.append(error)\n"
    )
    target = Watched(ready, f"background = asyncio.create_task(spin())\n{FOREVER}")
    await target.until_output("spinning")
    assert await ready.cancel(target.execution_id, grace_s=HANG_S) == "interrupted"
    assert (await target.ended()).kind == ErrorKind.CANCELLED
    assert (await ready.run("background.done() and hits")).value == []


async def test_a_coroutine_that_catches_the_cancel_and_returns_has_a_result(ready: Session) -> None:
    source = (
        f"print('at work')\ntry:\n    {FOREVER}\nexcept asyncio.CancelledError:\n    kept = 7\n7"
    )
    watched = Watched(ready, source)
    await watched.until_output("at work")
    assert await ready.cancel(watched.execution_id, grace_s=HANG_S) == "interrupted"
    terminal = await watched.ended()
    assert isinstance(terminal, Result)
    assert terminal.value == 7
    assert (await ready.run("kept")).value == 7


@pytest.mark.parametrize("source", [FOREVER, "time.sleep(3600)\n" + FOREVER])
async def test_a_cancel_right_behind_its_execute_is_never_lost(ready: Session, source: str) -> None:
    for turn in range(200):
        watched = Watched(ready, source, execution_id=f"turn-{turn}")
        await eventually(lambda w=watched: w.execution_id in ready.info.running)
        for _ in range(turn % 5):
            await asyncio.sleep(0.0001 * turn % 0.002)
        assert await ready.cancel(watched.execution_id, grace_s=HANG_S) == "interrupted"
        terminal = await watched.ended()
        assert (terminal.kind, terminal.type) == (ErrorKind.CANCELLED, "ExecutionCancelled")
    assert ready.info.restarts == 0


async def test_a_cancel_that_comes_while_the_event_loop_is_being_made_is_not_lost(
    session: Session,
) -> None:
    await session.run(
        "import asyncio, os, time\n"
        "make = asyncio.new_event_loop\n"
        "def make_slowly():\n"
        "    os.write(1, b'making')\n"
        "    time.sleep(0.5)\n"
        "    return make()\n"
        "asyncio.new_event_loop = make_slowly"
    )
    watched = Watched(session, f"print('began')\n{FOREVER}")
    await watched.until_output("making")
    assert await session.cancel(watched.execution_id, grace_s=HANG_S) == "interrupted"
    assert (await watched.ended()).kind == ErrorKind.CANCELLED
    assert text(watched.messages) == "making"


@pytest.mark.parametrize("stubborn", [IGNORES, HOLDS], ids=["deaf", "holds the GIL"])
async def test_a_stubborn_coroutine_alone_is_killed_after_the_grace(
    stubborn: str, gil_hold: GilHold
) -> None:
    stack_s = HANG_S if stubborn is IGNORES else 0.1
    timeouts = TimeoutSettings(drain_s=3600, stack_s=stack_s)
    async with Session(SessionConfig(timeouts=timeouts)) as session:
        await a_session_with_imports(session)
        target = Watched(session, gil_hold.definition + stubborn)
        await until_deaf(target, gil_hold)
        assert await session.cancel(target.execution_id, grace_s=0.1) == "killed"
        terminal = await target.ended()
        assert (terminal.kind, terminal.message) == (ErrorKind.KILLED, "cancelled (killed)")
        assert "<cell 2>" in terminal.stack
        assert (await session.run("'kept' in globals()")).value is False
        assert session.info.restarts == 1


async def test_a_condemned_child_takes_no_work_and_its_neighbours_may_finish() -> None:
    async with impatient(drain_s=HANG_S) as session:
        await a_session_with_imports(session)
        neighbour = Watched(session, f"{ASKS} + '!'")
        await neighbour.until(InputRequest)
        target = Watched(session, IGNORES, execution_id="deaf one")
        await target.until_output("deaf")
        cancelling = asyncio.create_task(session.cancel("deaf one", grace_s=0.05))
        assert await eventually(lambda: session.info.condemned_by) == "deaf one"
        with pytest.raises(SessionStateError, match="condemned by deaf one"):
            await collect(session, "1", on_busy="wait")
        await answer(session, neighbour)
        last = await neighbour.ended()
        assert isinstance(last, Result)
        assert last.value == "yes!"
        assert await cancelling == "killed"
        assert (await target.ended()).kind == ErrorKind.KILLED
        assert (await session.run("40 + 2")).value == 42
        assert session.info.condemned_by is None


@pytest.mark.parametrize("stubborn", [IGNORES, HOLDS], ids=["deaf", "holds the GIL"])
async def test_neighbours_that_do_not_finish_in_time_are_lost_with_it(
    stubborn: str, gil_hold: GilHold
) -> None:
    async with impatient(drain_s=0.1) as session:
        await a_session_with_imports(session)
        neighbours = [Watched(session, FOREVER, execution_id=f"n{n}") for n in range(3)]
        for neighbour in neighbours:
            await eventually(lambda n=neighbour: n.messages)
        target = Watched(session, gil_hold.definition + stubborn)
        await until_deaf(target, gil_hold)
        assert await session.cancel(target.execution_id, grace_s=0.05) == "killed"
        assert (await target.ended()).kind == ErrorKind.KILLED
        for neighbour in neighbours:
            last = await neighbour.ended()
            assert isinstance(last, Error)
            assert last.kind == ErrorKind.LOST_WITH_NEIGHBOUR
            assert target.execution_id in last.message
        assert (await session.run("40 + 2")).value == 42


async def test_the_coroutine_that_blocks_the_loop_is_named_if_another_cannot_stop() -> None:
    async with impatient(drain_s=0.1) as session:
        await a_session_with_imports(session)
        target = Watched(session, f"print('waits')\n{FOREVER}")
        await target.until_output("waits")
        source = "def hold():\n    print('held', flush=True)\n    time.sleep(3600)\nhold()\nawait x"
        holder = Watched(session, source, execution_id="the holder")
        await holder.until_output("held")
        assert await session.cancel(target.execution_id, grace_s=0.05) == "killed"
        last = await holder.ended()
        assert isinstance(last, Error)
        assert last.kind == ErrorKind.LOST_WITH_NEIGHBOUR
        assert "(the main thread was in the holder (hold))" in last.message


async def test_a_condemned_child_is_spared_if_the_coroutine_stops_after_all() -> None:
    async with impatient(drain_s=HANG_S) as session:
        await a_session_with_imports(session)
        neighbour = Watched(session, f"{ASKS} + '!'")
        await neighbour.until(InputRequest)
        slow = Watched(
            session,
            "try:\n    print('inside')\n    await asyncio.Event().wait()\n"
            "except asyncio.CancelledError:\n    await asyncio.to_thread(input, 'let go? ')",
        )
        await slow.until_output("inside")
        cancelling = asyncio.create_task(session.cancel(slow.execution_id, grace_s=0.05))
        await eventually(lambda: session.info.condemned_by)
        await answer(session, slow)
        assert await cancelling == "interrupted"
        await answer(session, neighbour)
        assert (await neighbour.ended()).value == "yes!"
        assert (await session.run("kept")).value == 41
        assert session.info.restarts == 0
