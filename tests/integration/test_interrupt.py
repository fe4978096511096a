"""Interrupts: the Ctrl-C of a session, which code may catch."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from capsule_tasks.protocol.messages import Error, ErrorKind, InputRequest, Result
from capsule_tasks.sessions import Session
from capsule_tasks.settings import SessionConfig, TimeoutSettings
from tests.sessions import HANG_S, GilHold, Watched, eventually, text, until_exited

SLEEP = "import time\nkept = 41\nprint('asleep')\ntime.sleep(3600)"
CATCHES = """
import time
caught = 0
while caught < 3:
    try:
        print('round', caught, flush=True)
        time.sleep(3600)
    except KeyboardInterrupt:
        caught += 1
caught
"""
DEAF = """
import os, subprocess
sleep = subprocess.Popen(['sleep', '3600'])
has_reported = 0
while True:
    try:
        while True:
            has_reported = has_reported or os.write(1, b'deaf %d.' % sleep.pid)
    except BaseException:
        pass
"""
HOLDS = "hold_gil()"


def quick() -> Session:
    return Session(SessionConfig(timeouts=TimeoutSettings(grace_s=0.2)))


async def test_uncaught_it_ends_the_execution_and_keeps_the_namespace(session: Session) -> None:
    watched = Watched(session, SLEEP)
    await watched.until_output("asleep")
    assert await session.interrupt(watched.execution_id) == "interrupted"
    terminal = await watched.ended()
    assert isinstance(terminal, Error)
    assert (terminal.kind, terminal.type) == (ErrorKind.RAISED, "KeyboardInterrupt")
    assert "time.sleep(3600)" in terminal.traceback
    assert (await session.run("kept + 1")).value == 42
    assert session.info.restarts == 0


async def test_code_that_catches_it_goes_on(session: Session) -> None:
    watched = Watched(session, CATCHES)
    for turn in range(3):
        await watched.until_output(f"round {turn}")
        assert await session.interrupt() == "interrupted"
    terminal = await watched.ended()
    assert isinstance(terminal, Result)
    assert terminal.value == 3


@pytest.mark.parametrize(
    "busy",
    ["while True: pass", "print('x', flush=True)\nwhile True: print('x', flush=True)", "input()"],
)
async def test_without_a_name_whatever_runs_is_interrupted(session: Session, busy: str) -> None:
    watched = Watched(session, busy)
    if busy == "input()":
        await watched.until(InputRequest)
    else:
        await eventually(lambda: watched.messages)
    # Not yet begun, it may be: then there is nothing to interrupt.
    while await session.interrupt() != "interrupted":
        pass
    assert (await watched.ended()).type == "KeyboardInterrupt"


async def test_an_interrupt_while_nothing_runs_does_nothing(session: Session) -> None:
    assert await Session().interrupt() == "not_running"
    assert await session.interrupt() == "not_running"
    assert await session.interrupt(force_restart=True) == "not_running"
    watched = Watched(session, SLEEP)
    await watched.until_output("asleep")
    waiting = Watched(session, "1", on_busy="wait", execution_id="waiting")
    await eventually(lambda: waiting.messages)
    assert await session.interrupt("unknown", force_restart=True) == "not_running"
    assert await session.interrupt("waiting") == "not_running"
    assert session.info.running == (watched.execution_id, "waiting")
    assert await session.interrupt(watched.execution_id) == "interrupted"
    assert (await waiting.ended()).value == 1


async def test_an_interrupt_stops_the_named_execution_and_no_neighbour(session: Session) -> None:
    forever = "import asyncio\nprint('at work')\nawait asyncio.Event().wait()"
    watched = {name: Watched(session, forever, execution_id=name) for name in ("a", "b")}
    for execution in watched.values():
        await execution.until_output("at work")
    assert await session.interrupt("a") == "interrupted"
    assert (await watched["a"].ended()).type == "KeyboardInterrupt"
    assert session.info.running == ("b",)
    assert await session.interrupt() == "interrupted"
    assert (await watched["b"].ended()).type == "KeyboardInterrupt"


async def test_a_coroutine_may_catch_it_as_a_cancelled_task_does(session: Session) -> None:
    watched = Watched(
        session,
        "import asyncio\n"
        "try:\n"
        "    print('at work')\n"
        "    await asyncio.Event().wait()\n"
        "except asyncio.CancelledError:\n"
        "    print('caught')\n"
        "await asyncio.sleep(0)\n"
        "'went on'",
    )
    await watched.until_output("at work")
    assert await session.interrupt(watched.execution_id) == "interrupted"
    assert (await watched.ended()).value == "went on"
    assert text(watched.messages) == "at work\ncaught\n"


async def test_a_coroutine_that_keeps_the_loop_is_interrupted_too(session: Session) -> None:
    source = "async def spin():\n    print('at work')\n    while True: pass\nawait spin()"
    watched = Watched(session, source)
    await watched.until_output("at work")
    assert await session.interrupt(watched.execution_id) == "interrupted"
    assert (await watched.ended()).type == "KeyboardInterrupt"


@pytest.mark.parametrize("stubborn", [DEAF, HOLDS], ids=["swallows it", "holds the GIL"])
async def test_with_force_restart_stubborn_code_is_killed_and_replaced(
    stubborn: str, gil_hold: GilHold
) -> None:
    async with quick() as session:
        pid = session.info.pid
        watched = Watched(session, gil_hold.definition + stubborn)
        await (watched.until_output(".") if stubborn is DEAF else gil_hold.until_held())
        assert await session.interrupt(watched.execution_id, force_restart=True) == "killed"
        terminal = await watched.ended()
        assert (terminal.kind, terminal.message) == (ErrorKind.KILLED, "cancelled (killed)")
        assert "<cell 1>" in terminal.stack
        if stubborn is DEAF:
            await until_exited(int(text(watched.messages).split(".")[0].split()[1]))
        assert (await session.run("40 + 2")).value == 42
        assert session.info.pid != pid
        assert session.info.restarts == 1


async def test_force_restart_spares_a_child_that_obeys() -> None:
    async with Session(SessionConfig(timeouts=TimeoutSettings(grace_s=HANG_S))) as session:
        watched = Watched(session, SLEEP)
        await watched.until_output("asleep")
        waiting = Watched(session, "input()", on_busy="wait")
        await eventually(lambda: waiting.messages)
        outcome = await session.interrupt(force_restart=True)
        assert outcome == "interrupted"
        assert (await watched.ended()).type == "KeyboardInterrupt"
        request = await waiting.until(InputRequest)
        await session.input_response(
            "spared", request_id=request.id, execution_id=waiting.execution_id
        )
        assert (await waiting.ended()).value == "spared"
        assert session.info.restarts == 0


async def test_without_force_stubborn_code_runs_on(session: Session) -> None:
    watched = Watched(session, DEAF)
    await watched.until_output(".")
    assert await session.interrupt(watched.execution_id) == "interrupted"
    assert session.info.running == (watched.execution_id,)
    assert await session.cancel(watched.execution_id, grace_s=0.05) == "killed"
    assert (await watched.ended()).kind == ErrorKind.KILLED


async def test_an_interrupt_never_takes_the_place_of_a_cancel(session: Session) -> None:
    """Sent at the same moment to code that goes on after every plain Ctrl-C."""
    source = """
import time
while True:
    try:
        print('on')
        time.sleep(3600)
    except KeyboardInterrupt as stop:
        if type(stop) is not KeyboardInterrupt:
            raise
"""
    for turn in range(50):
        watched = Watched(session, source, execution_id=f"turn-{turn}")
        await watched.until_output("on")
        interrupts = [session.interrupt() for _ in range(4)]
        outcomes = await asyncio.gather(session.cancel(f"turn-{turn}", HANG_S), *interrupts)
        assert outcomes[0] == "interrupted"
        assert (await watched.ended()).kind == ErrorKind.CANCELLED


async def test_from_another_thread_and_loop(session: Session) -> None:
    watched = Watched(session, SLEEP)
    await watched.until_output("asleep")
    outcome = await asyncio.to_thread(lambda: asyncio.run(session.interrupt()))
    assert outcome == "interrupted"
    assert (await watched.ended()).type == "KeyboardInterrupt"
    assert await asyncio.wait_for(session.interrupt(), HANG_S) == "not_running"


async def test_a_kill_that_overtakes_an_interrupt_is_its_answer_not_an_error() -> None:
    patient = SessionConfig(timeouts=TimeoutSettings(grace_s=HANG_S))
    async with asyncio.timeout(HANG_S), Session(patient) as session:
        watched = Watched(session, DEAF)
        await watched.until_output("deaf")
        assert session.info.pid is not None
        os.kill(session.info.pid, signal.SIGSTOP)  # nothing answers the interrupt
        interrupt = asyncio.create_task(session.interrupt())
        await asyncio.sleep(0)
        assert await session.cancel(watched.execution_id, grace_s=0) == "killed"
        assert await interrupt == "killed"
