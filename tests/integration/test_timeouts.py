"""Deadlines of callers, and callers that go away: the work ends, the session stays usable."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from capsule_tasks.errors import ExecutionTimeout, SessionLost
from capsule_tasks.protocol.messages import Code, Error, ErrorKind, Message, Output, Result
from capsule_tasks.sessions import Session, SessionState
from capsule_tasks.settings import SessionConfig, TimeoutSettings
from tests.sessions import HANG_S, GilHold, Watched, collect, eventually, submitted, text

WORK = """
import asyncio, os, time
kept = 41
def work():
    try:
        print('at work')
        time.sleep(3600)
    finally:
        print('finally ran')
async def awork():
    try:
        print('at work')
        await asyncio.Event().wait()
    finally:
        print('finally ran')
def deaf():
    has_reported = 0
    while True:
        try:
            while True:
                has_reported = has_reported or os.write(1, b'at work')
        except BaseException:
            pass
async def adeaf():
    while True:
        with __import__('contextlib').suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
"""


DEADLINE_S = 4321.0
"""A deadline that nothing in a test misses, and that nothing else has."""


@pytest.fixture
async def worker(session: Session) -> Session:
    await session.run(WORK)
    return session


def obliging() -> Session:
    """One whose code is given all the time it needs to stop and to tell where it was."""
    timeouts = TimeoutSettings(grace_s=HANG_S, stack_s=HANG_S)
    return Session(SessionConfig(warmup=WORK, timeouts=timeouts))


def strict(stack_s: float = 0.5) -> Session:
    timeouts = TimeoutSettings(grace_s=0.1, drain_s=0.1, stack_s=stack_s, shutdown_s=0.1)
    return Session(SessionConfig(warmup=WORK, timeouts=timeouts))


async def until_timeout(session: Session, source: str, **options: Any) -> list[Message]:
    """All messages of an execution that ExecutionTimeout must end."""
    messages: list[Message] = []
    async with asyncio.timeout(HANG_S):
        with pytest.raises(ExecutionTimeout) as raised:  # noqa: PT012 - a loop is the call
            async for message in session.execute(source, **options):
                messages.append(message)  # noqa: PERF401 - needed although the loop raises
    terminal = messages[-1]
    assert isinstance(terminal, Error)
    assert (terminal.kind, terminal.type) == (ErrorKind.TIMEOUT, "ExecutionTimeout")
    assert raised.value.execution_id == terminal.execution_id
    assert raised.value.timeout_s == options["timeout_s"]
    assert terminal.stack in "".join(raised.value.__notes__)
    return messages


@pytest.mark.parametrize("source", ["work()", "await awork()"])
async def test_the_error_carries_the_stack_and_the_session_goes_on(source: str) -> None:
    async with obliging() as session:
        messages = await until_timeout(session, source, timeout_s=1.0)
        terminal = messages[-1]
        assert isinstance(terminal, Error)
        assert "ran longer than 1.0 s" in terminal.message
        assert source.removeprefix("await ").removesuffix("()") in terminal.stack
        assert text(messages) == "at work\nfinally ran\n"
        assert session.state is SessionState.READY
        assert (await session.run("kept + 1")).value == 42
        assert session.info.restarts == 0


async def test_run_raises_it_too(worker: Session) -> None:
    with pytest.raises(ExecutionTimeout, match=r"longer than 0\.05 s"):
        await worker.run("work()", timeout_s=0.05)
    assert (await worker.run("kept + 1")).value == 42


@pytest.mark.parametrize("source", ["deaf()", "await adeaf()", "hold_gil()"])
async def test_stubborn_code_is_killed_and_the_session_replaced(
    source: str, gil_hold: GilHold
) -> None:
    async with strict(stack_s=0.5 if source == "hold_gil()" else HANG_S) as session:
        await session.run(gil_hold.definition)
        pid = session.info.pid
        messages = await until_timeout(session, source, timeout_s=1.0)
        terminal = messages[-1]
        assert isinstance(terminal, Error)
        assert terminal.message.endswith("ran longer than 1.0 s (killed)")
        assert source.removeprefix("await ").removesuffix("()") in terminal.stack
        assert (await session.run("kept + 1")).value == 42
        assert session.info.pid != pid
        assert session.info.restarts == 1


@pytest.mark.parametrize("source", ["work()", "await awork()", "deaf()"])
async def test_a_submitted_execution_has_a_deadline_too(source: str) -> None:
    async with strict(stack_s=HANG_S) if source == "deaf()" else obliging() as session:
        messages = await submitted(session, source, timeout_s=0.1)
        terminal = messages[-1]
        assert isinstance(terminal, Error)
        assert (terminal.kind, terminal.type) == (ErrorKind.TIMEOUT, "ExecutionTimeout")
        assert "ran longer than 0.1 s" in terminal.message
        assert source.removeprefix("await ").removesuffix("()") in terminal.stack
        assert ("(killed)" in terminal.message) is (source == "deaf()")
        assert (await session.run("kept + 1")).value == 42


async def test_a_deadline_that_is_met_stops_nothing_later(
    worker: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline of one that has ended, and of one whose consumer went away."""
    loop = asyncio.get_running_loop()
    call_later = loop.call_later
    deadlines: list[asyncio.TimerHandle] = []

    def noted(delay: float, *args: Any, **options: Any) -> asyncio.TimerHandle:
        timer = call_later(delay, *args, **options)
        if delay == DEADLINE_S:
            deadlines.append(timer)
        return timer

    monkeypatch.setattr(loop, "call_later", noted)
    assert isinstance((await submitted(worker, "1", timeout_s=DEADLINE_S))[-1], Result)
    async with contextlib.aclosing(worker.execute("work()", timeout_s=DEADLINE_S)) as messages:
        async for _ in messages:
            break
    later = await worker.run("kept + 1", execution_id="submitted", on_busy="wait")
    assert later.value == 42
    assert len(deadlines) == 2
    # The end of the abandoned execution may arrive together with the result of the last one.
    await eventually(lambda: all(deadline.cancelled() for deadline in deadlines))
    with pytest.raises(TypeError, match="timeout_s"):
        worker.submit(Code(source="1"), print, execution_id="e", timeout_s="soon")  # type: ignore[arg-type]


async def test_a_coroutine_past_its_time_that_ignores_it_takes_its_neighbours_along() -> None:
    async with strict() as session:
        neighbour = Watched(session, "await awork()")
        await neighbour.until_output("at work")
        await until_timeout(session, "await adeaf()", timeout_s=0.05)
        assert (await neighbour.ended()).kind == ErrorKind.LOST_WITH_NEIGHBOUR
        assert (await session.run("kept + 1")).value == 42


async def test_a_busy_child_is_never_behind_a_ready_state(gil_hold: GilHold) -> None:
    async with strict() as session:
        seen: list[tuple[SessionState, tuple[str, ...]]] = []

        def watch(_: SessionState, new: SessionState) -> None:
            seen.append((new, session.info.running))

        session.add_state_listener(watch)
        for source in ("work()", "await awork()", "deaf()", gil_hold.source):
            await until_timeout(session, source, timeout_s=0.05, on_busy="wait")
            async with contextlib.aclosing(session.execute("await awork()")) as messages:
                await anext(messages)
            await eventually(lambda: session.state is SessionState.READY)
        assert [running for state, running in seen if state is SessionState.READY] == [()] * 8


async def test_an_execution_that_waits_for_its_turn_may_time_out(worker: Session) -> None:
    first = Watched(worker, "work()")
    await first.until_output("at work")
    messages = await until_timeout(worker, "print('ran')", timeout_s=0.05, on_busy="wait")
    assert text(messages) == ""
    assert worker.info.running == (first.execution_id,)
    assert await worker.cancel(first.execution_id, grace_s=HANG_S) == "interrupted"
    assert (await first.ended()).kind == ErrorKind.CANCELLED


async def test_a_waiting_execution_times_out_without_harm_to_the_one_that_holds_the_gil(
    gil_hold: GilHold,
) -> None:
    async with strict() as session:
        first = Watched(session, gil_hold.source)
        await gil_hold.until_held()
        await until_timeout(session, "print('ran')", timeout_s=0.05, on_busy="wait")
        assert first.execution_id in session.info.running
        assert session.info.restarts == 0


async def test_a_source_that_the_child_does_not_take_in_is_on_the_clock_too(
    gil_hold: GilHold,
) -> None:
    async with strict() as session:
        first = Watched(session, gil_hold.source)
        await gil_hold.until_held()
        source = "#" * 8_000_000
        await until_timeout(session, source, timeout_s=0.1, on_busy="wait")
        assert first.execution_id in session.info.running


async def test_code_that_is_in_time_is_left_alone(worker: Session) -> None:
    for number in range(100):
        assert (await worker.run(f"{number} + 1", timeout_s=HANG_S)).value == number + 1
    source = "try:\n    work()\nexcept KeyboardInterrupt:\n    pass\n7"
    assert (await worker.run(source, timeout_s=0.1)).value == 7


async def leave_by_break(session: Session, source: str) -> None:
    async for message in session.execute(source):
        if isinstance(message, Output):
            break


async def leave_by_aclose(session: Session, source: str) -> None:
    messages = session.execute(source)
    while not isinstance(await anext(messages), Output):
        pass
    await messages.aclose()


async def leave_by_an_error(session: Session, source: str) -> None:
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the way it is left is the point
        async for message in session.execute(source):
            if isinstance(message, Output):
                raise ZeroDivisionError


async def leave_by_task_cancel(session: Session, source: str) -> None:
    consumer = Watched(session, source)
    await consumer.until_output("at work")
    consumer._task.cancel()
    await asyncio.wait({consumer._task})
    assert consumer._task.cancelled()


async def leave_by_wait_for(session: Session, source: str) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(collect(session, source), 0.3)


LEAVE = [
    leave_by_break,
    leave_by_aclose,
    leave_by_an_error,
    leave_by_task_cancel,
    leave_by_wait_for,
]


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("source", ["work()", "await awork()"])
async def test_when_the_consumer_leaves_the_work_ends(leave: Any, source: str) -> None:
    async with obliging() as session:
        await leave(session, source)
        last = (await collect(session, "kept + 1", on_busy="wait"))[-1]
        assert isinstance(last, Result)
        assert last.value == 42
        assert session.info.restarts == 0
        assert session.metrics["executions_cancelled"] == 1
        await eventually(lambda: session.state is SessionState.READY)


async def test_when_the_consumer_of_stubborn_code_leaves_the_session_is_replaced() -> None:
    async with strict() as session:
        await leave_by_break(session, "deaf()")
        assert session.state is SessionState.BUSY
        await eventually(lambda: session.info.restarts == 1 and session.state is SessionState.READY)
        assert (await session.run("kept + 1")).value == 42


async def test_leaving_behind_the_end_cancels_nothing(worker: Session) -> None:
    messages = worker.execute("1")
    async for message in messages:
        if isinstance(message, Result):
            break
    await messages.aclose()
    assert worker.metrics["executions_cancelled"] == 0
    assert worker.state is SessionState.READY


async def test_every_wait_that_a_shutdown_ends_is_counted(worker: Session) -> None:
    first = Watched(worker, "await awork()")
    second = Watched(worker, "await awork()")
    for one in (first, second):
        await one.until_output("at work")
    listening = asyncio.create_task(worker.receive_message())
    await asyncio.sleep(0)
    assert worker.metrics["cancel_event_triggers"] == 0
    await worker.shutdown()
    for one in (first, second):
        assert (await one.ended()).kind == ErrorKind.SHUTDOWN
        assert text(one.messages) == "at work\nfinally ran\n"
    with pytest.raises(SessionLost, match="shut down"):
        await listening
    assert worker.metrics["cancel_event_triggers"] == 3
    assert worker.metrics["executions_cancelled"] == 2
    await worker.shutdown()
    assert worker.metrics["cancel_event_triggers"] == 3
