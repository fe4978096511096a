"""Cancels that come too early, too late, twice or from elsewhere, and code that resists them."""

from __future__ import annotations

import asyncio
import random

import pytest

from capsule_tasks.protocol.messages import Ack, Cancel, Error, ErrorKind, InputRequest, Result
from capsule_tasks.sessions import Session, SessionState
from capsule_tasks.settings import SessionConfig, TimeoutSettings
from tests.sessions import HANG_S, GilHold, Watched, collect, eventually, text

SLEEP = "import time\nprint('asleep')\ntime.sleep(3600)"


async def test_an_execution_that_waits_ends_at_once_and_never_runs(session: Session) -> None:
    first = Watched(session, SLEEP, execution_id="first")
    await first.until_output("asleep")
    waiting = Watched(session, "print('ran')", execution_id="waiting", on_busy="wait")
    await eventually(lambda: waiting.messages)
    assert await session.cancel("waiting", grace_s=HANG_S) == "interrupted"
    terminal = await waiting.ended()
    assert (terminal.kind, terminal.type) == (ErrorKind.CANCELLED, "ExecutionCancelled")
    assert text(waiting.messages) == ""
    assert session.info.running == ("first",)
    assert await session.cancel("first", grace_s=HANG_S) == "interrupted"
    assert (await first.ended()).kind == ErrorKind.CANCELLED


async def test_an_execution_that_waits_is_ended_without_harm_to_the_call_that_holds_the_gil(
    gil_hold: GilHold,
) -> None:
    async with Session() as session:
        first = Watched(session, gil_hold.source, execution_id="first")
        await gil_hold.until_held()
        waiting = Watched(session, "print('ran')", execution_id="waiting", on_busy="wait")
        await eventually(lambda: "waiting" in session.info.running)
        assert await session.cancel("waiting", grace_s=0.05) == "interrupted"
        assert (await waiting.ended()).kind == ErrorKind.CANCELLED
        assert [type(message) for message in first.messages] == [Ack]
        assert session.state is SessionState.BUSY
        assert session.info.restarts == 0
        with pytest.raises(ValueError, match="waiting"):
            await collect(session, "1", execution_id="waiting", on_busy="wait")
        assert await session.cancel("first", grace_s=0) == "killed"
        assert (await first.ended()).kind == ErrorKind.KILLED


async def test_an_execution_ended_while_the_gil_was_held_does_not_run_later(
    session: Session, gil_hold: GilHold
) -> None:
    """The child reads the cancel when the C call returns, together with the execution."""
    first = Watched(session, gil_hold.source)
    await gil_hold.until_held()
    waiting = Watched(session, "ran = True", execution_id="waiting", on_busy="wait")
    await eventually(lambda: "waiting" in session.info.running)
    await session.cancel("waiting", grace_s=0.05)
    assert (await waiting.ended()).kind == ErrorKind.CANCELLED
    gil_hold.let_go()
    assert isinstance(await first.ended(), Result)
    await eventually(lambda: session.state is not SessionState.BUSY)
    assert (await session.run("'ran' in globals()")).value is False
    assert (await session.run("1", execution_id="waiting")).value == 1


async def test_a_cancel_right_behind_its_execute_is_never_lost(session: Session) -> None:
    for turn in range(300):
        watched = Watched(session, "import time\ntime.sleep(3600)", execution_id=f"turn-{turn}")
        await eventually(lambda w=watched: w.execution_id in session.info.running)
        for _ in range(turn % 7):
            await asyncio.sleep(0)
        assert await session.cancel(watched.execution_id, grace_s=HANG_S) == "interrupted"
        terminal = await watched.ended()
        assert (terminal.kind, terminal.type) == (ErrorKind.CANCELLED, "ExecutionCancelled")
    assert session.info.restarts == 0


async def test_a_cancel_that_overtook_a_refused_execute_does_not_hit_its_successor(
    session: Session,
) -> None:
    """The successor has the same id; a cancel kept for the one before must not wait for it."""
    first = Watched(session, SLEEP, execution_id="first")
    await first.until_output("asleep")
    for _ in range(100):
        refused = Watched(session, "1", execution_id="again")
        await eventually(lambda r=refused: "again" in session.info.running or r.messages)
        assert await session.cancel("again", grace_s=HANG_S) in ("not_running", "interrupted")
        assert (await refused.ended()).kind in (ErrorKind.BUSY, ErrorKind.CANCELLED)
    assert await session.cancel("first", grace_s=HANG_S) == "interrupted"
    await first.ended()
    assert (await session.run("40 + 2", execution_id="again")).value == 42


async def test_twice_at_once_is_one_cancel(session: Session) -> None:
    watched = Watched(session, SLEEP)
    await watched.until_output("asleep")
    cancels = [session.cancel(watched.execution_id, grace_s=HANG_S) for _ in range(5)]
    assert await asyncio.gather(*cancels) == ["interrupted"] * 5
    assert (await watched.ended()).kind == ErrorKind.CANCELLED
    assert session.metrics["executions_cancelled"] == 1
    assert (await session.run("40 + 2")).value == 42


async def test_twice_at_once_on_stubborn_code_is_one_kill(
    session: Session, gil_hold: GilHold
) -> None:
    watched = Watched(session, gil_hold.source)
    await gil_hold.until_held()
    cancels = [session.cancel(watched.execution_id, grace_s=0.05) for _ in range(5)]
    assert await asyncio.gather(*cancels) == ["killed"] * 5
    assert (await watched.ended()).kind == ErrorKind.KILLED
    assert (await session.run("40 + 2")).value == 42
    assert session.info.restarts == 1


async def test_a_cancel_while_nothing_runs_does_nothing(session: Session) -> None:
    never_started = Session()
    assert await never_started.cancel("anything") == "not_running"
    assert await session.cancel("unknown") == "not_running"
    await collect(session, "1", execution_id="over")
    assert await session.cancel("over") == "not_running"
    watched = Watched(session, SLEEP)
    await watched.until_output("asleep")
    assert await session.cancel("unknown") == "not_running"
    assert await session.cancel("over") == "not_running"
    assert session.info.running == (watched.execution_id,)
    await session.shutdown()
    assert await session.cancel(watched.execution_id) == "not_running"


async def test_from_another_thread_and_loop(session: Session) -> None:
    watched = Watched(session, SLEEP)
    await watched.until_output("asleep")

    def cancel_there() -> str:
        return asyncio.run(session.cancel(watched.execution_id, grace_s=HANG_S))

    outcomes = await asyncio.gather(*(asyncio.to_thread(cancel_there) for _ in range(3)))
    assert "interrupted" in outcomes  # a thread that was late found nothing to stop
    assert set(outcomes) <= {"interrupted", "not_running"}
    assert (await watched.ended()).kind == ErrorKind.CANCELLED
    assert await asyncio.to_thread(cancel_there) == "not_running"


async def test_a_caller_that_does_not_wait_for_it_does_not_undo_it(gil_hold: GilHold) -> None:
    async with Session(SessionConfig(timeouts=TimeoutSettings(grace_s=0.1))) as session:
        watched = Watched(session, gil_hold.source)
        await gil_hold.until_held()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.cancel(watched.execution_id), 0.01)
        assert (await watched.ended()).kind == ErrorKind.KILLED
        assert (await session.run("40 + 2")).value == 42


@pytest.mark.parametrize("same_name", [True, False], ids=["one id", "many ids"])
async def test_a_cancel_never_hits_another_execution(session: Session, same_name: bool) -> None:
    """Short executions, each cancelled about when it ends, with another right behind it."""
    chance = random.Random(20)
    counts = {"ended": 0, "cancelled": 0}
    for turn in range(1000):
        name = "victim" if same_name else f"victim-{turn}"
        is_endless = turn % 50 == 0  # on a fast machine all others may be over before their cancel
        rounds = chance.choice((10, 1000, 30_000))
        work = "while True: pass" if is_endless else f"for _ in range({rounds}): pass"
        victim = Watched(session, work, execution_id=name)
        await eventually(lambda v=victim: v.execution_id in session.info.running or v.messages)
        bystander = asyncio.create_task(
            collect(
                session,
                f"y = 0\nfor i in range(100):\n    y += i\nprint(y)\n({turn}, y)",
                execution_id="bystander" if same_name else None,
                on_busy="wait",
            )
        )
        for _ in range(chance.randrange(6)):
            await asyncio.sleep(0)
        await session.cancel(name, grace_s=HANG_S)
        messages = await bystander
        assert isinstance(messages[-1], Result), messages[-1]
        assert messages[-1].value == (turn, 4950)
        assert text(messages) == "4950\n"
        counts["ended" if isinstance(await victim.ended(), Result) else "cancelled"] += 1
    assert session.info.restarts == 0
    assert counts["cancelled"], counts


async def test_a_cancel_of_the_past_never_hits_the_present(session: Session) -> None:
    """As if it had been on its way for long: sent behind the back of the parent's own checks."""
    child = session._child
    assert child is not None
    for turn in range(1, 21):
        watched = Watched(session, "input()", execution_id="same")
        request = await watched.until(InputRequest)
        child.send_control(Cancel(execution_id="same", seq=turn - 1))
        await session.stack()  # answered behind the cancel
        await session.input_response("fine", request_id=request.id, execution_id="same")
        terminal = await watched.ended()
        assert isinstance(terminal, Result), terminal
        assert terminal.value == "fine"


async def test_a_cancel_swallowed_in_a_finaliser_is_raised_again(session: Session) -> None:
    watched = Watched(
        session,
        "class Trap:\n"
        "    def __del__(self):\n"
        "        print('in __del__')\n"
        "        while True:\n"
        "            x = 1\n"
        "Trap()\n"
        "while True:\n"
        "    x = 1\n",
    )
    await watched.until_output("in __del__")
    assert await session.cancel(watched.execution_id, grace_s=HANG_S) == "interrupted"
    assert (await watched.ended()).kind == ErrorKind.CANCELLED
    assert text(watched.messages).startswith("in __del__\n")


async def test_code_that_treats_a_cancel_as_ctrl_c_and_returns_has_a_result(
    session: Session,
) -> None:
    body = SLEEP.replace("\n", "\n    ")
    source = f"try:\n    {body}\nexcept KeyboardInterrupt:\n    pass\n7"
    watched = Watched(session, source)
    await watched.until_output("asleep")
    assert await session.cancel(watched.execution_id, grace_s=HANG_S) == "interrupted"
    terminal = await watched.ended()
    assert isinstance(terminal, Result)
    assert terminal.value == 7


async def test_code_that_turns_a_cancel_into_its_own_error_was_still_cancelled(
    session: Session,
) -> None:
    body = SLEEP.replace("\n", "\n    ")
    source = (
        f"try:\n    {body}\nexcept BaseException as stop:\n    raise ValueError('mine') from stop"
    )
    watched = Watched(session, source)
    await watched.until_output("asleep")
    assert await session.cancel(watched.execution_id, grace_s=HANG_S) == "interrupted"
    terminal = await watched.ended()
    assert isinstance(terminal, Error)
    assert (terminal.kind, terminal.type) == (ErrorKind.CANCELLED, "ValueError")
    assert "ExecutionCancelled" in terminal.traceback


async def test_threads_of_the_execution_are_not_hit(session: Session) -> None:
    watched = Watched(
        session,
        "import threading, time\n"
        "ticks = 0\n"
        "def tick():\n"
        "    global ticks\n"
        "    while True:\n"
        "        ticks += 1\n"
        "        time.sleep(0.001)\n"
        "thread = threading.Thread(target=tick, daemon=True)\n"
        "thread.start()\n"
        "print('asleep')\n"
        "threading.Event().wait()",
    )
    await watched.until_output("asleep")
    assert await session.cancel(watched.execution_id, grace_s=HANG_S) == "interrupted"
    goes_on = "before = ticks\nwhile ticks < before + 3: time.sleep(0.001)\n'yes'"
    assert (await session.run(goes_on)).value == "yes"


async def test_how_long_cancels_took_is_in_the_metrics(session: Session) -> None:
    assert session.metrics["cancel_latency_ms"] == {
        "count": 0,
        "p50": None,
        "p99": None,
        "max": None,
    }
    for _ in range(3):
        watched = Watched(session, SLEEP, execution_id=f"e{_}")
        await watched.until_output("asleep")
        await session.cancel(watched.execution_id, grace_s=HANG_S)
        await watched.ended()
    await session.cancel("unknown")
    latency = session.metrics["cancel_latency_ms"]
    assert latency["count"] == 3
    assert 0 < latency["p50"] <= latency["p99"] <= latency["max"] < HANG_S * 1000
    assert session.metrics["executions_cancelled"] == 3
