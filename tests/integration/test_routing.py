"""Control overtakes bulk in both directions; interceptors see everything and hold up nothing."""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import struct
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capsule_tasks.protocol.messages import (
    Ack,
    Error,
    Heartbeat,
    Message,
    NamespaceRequest,
    NamespaceSummary,
    Output,
    Result,
)
from capsule_tasks.sessions import Session, SessionConfig
from capsule_tasks.settings import (
    KIB,
    MIB,
    ChildSettings,
    DiagnosticSettings,
    OutputSettings,
    RoutingSettings,
    TimeoutSettings,
)
from tests.sessions import HANG_S, Watched, collect, eventually, text

NO_BEATS = DiagnosticSettings(heartbeat_interval_s=3600)
PATIENT = TimeoutSettings(unresponsive_s=7200)


def routed(**routing: Any) -> Session:
    return Session(SessionConfig(routing=RoutingSettings(**routing)))


def waiting_in(sock: Any) -> int:
    size: int = struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, b"\0\0\0\0"))[0]
    return size


def block_until(condition: Callable[[], Any]) -> None:
    """Wait without giving the event loop a turn."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


async def test_from_the_child_control_overtakes_the_bulk_that_came_before_it() -> None:
    """The loop stands still until a flood and, behind it, a reply have arrived; then it looks."""
    output = OutputSettings(window_bytes=16 * MIB, chunk_bytes=100)
    child = ChildSettings(output=output, diagnostics=NO_BEATS)
    async with Session(SessionConfig(child=child, timeouts=PATIENT)) as session:
        seen: list[Message] = []
        watched = Watched(session, "print('x' * 1_000_000)")
        await watched.until(Output)
        descriptors: Any = session._child.process.descriptors  # type: ignore[union-attr]
        session.add_message_interceptor(seen.append)
        block_until(lambda: waiting_in(descriptors.bulk) > 10 * KIB)
        session._child.send_control(NamespaceRequest())  # type: ignore[union-attr]
        block_until(lambda: select.select([descriptors.control], [], [], 0)[0])
        before = session.info.queues
        await eventually(lambda: any(isinstance(m, NamespaceSummary) for m in seen))
        assert isinstance(seen[0], NamespaceSummary)
        assert isinstance(await watched.ended(), Result)
        queues = session.info.queues
    assert queues.priority_reads > before.priority_reads
    assert queues.control_handled > before.control_handled
    assert queues.bulk_handled >= before.bulk_handled + 500
    assert text(watched.messages) == "x" * 1_000_000 + "\n"


async def test_a_flood_of_control_leaves_bulk_its_share(tmp_path: Path) -> None:
    """Both wait: in turns, as many of each kind as its weight."""
    child = ChildSettings(output=OutputSettings(chunk_bytes=100), diagnostics=NO_BEATS)
    routing = RoutingSettings(control_weight=4, bulk_weight=2)
    async with Session(SessionConfig(child=child, routing=routing, timeouts=PATIENT)) as session:
        seen: list[Message] = []
        descriptors: Any = session._child.process.descriptors  # type: ignore[union-attr]
        go = tmp_path / "go"
        os.mkfifo(go)
        watched = Watched(session, f"print('on', flush=True)\nopen({str(go)!r})\nprint('x' * 3000)")
        await watched.until_output("on")
        session.add_message_interceptor(seen.append)
        with go.open("w"):  # which is when it goes on
            block_until(lambda: waiting_in(descriptors.bulk) > 3000)
        for _ in range(40):
            session._child.send_control(NamespaceRequest())  # type: ignore[union-attr]
        block_until(lambda: waiting_in(descriptors.control) > 40 * 60)
        await watched.ended()
        await eventually(lambda: sum(isinstance(m, NamespaceSummary) for m in seen) == 40)
    kinds = "".join("c" if isinstance(m, NamespaceSummary) else "b" for m in seen)
    assert "ccccbbccccbbccccbb" in kinds


async def test_to_the_child_control_overtakes_bulk_that_is_still_on_its_way() -> None:
    child = ChildSettings(diagnostics=NO_BEATS)
    async with Session(SessionConfig(child=child, timeouts=PATIENT)) as session:
        seen: list[Message] = []
        session.add_message_interceptor(seen.append)
        padding = "#" * (2 * MIB)
        flood = [Watched(session, f"{n}\n{padding}", on_busy="wait") for n in range(10)]
        await eventually(lambda: len(session.info.running) == 10)
        await session.namespace_summary(timeout_s=HANG_S)
        acknowledged = sum(isinstance(m, Ack) for m in seen)
        for n, execution in enumerate(flood):
            assert (await execution.ended()).value == n
    assert acknowledged < 5


async def test_a_cancel_overtakes_executions_that_are_still_on_their_way() -> None:
    async with Session() as session:
        loop = Watched(session, "print('on', flush=True)\nwhile True: pass")
        await loop.until_output("on")
        padding = "#" * (2 * MIB)
        flood = [Watched(session, f"{n}\n{padding}", on_busy="wait") for n in range(10)]
        await eventually(lambda: len(session.info.running) == 11)
        assert await session.cancel(loop.execution_id, grace_s=HANG_S) == "interrupted"
        acknowledged = sum(isinstance(m, Ack) for e in flood for m in e.messages)
        for n, execution in enumerate(flood):
            assert (await execution.ended()).value == n
    assert acknowledged < 5


# --- interceptors ------------------------------------------------------------------------------


async def test_an_interceptor_sees_every_message_before_its_consumer_does() -> None:
    async with Session() as session:
        seen: list[Message] = []
        session.add_message_interceptor(seen.append)
        async for message in session.execute("print('hi')\n42", execution_id="e"):
            assert any(message is other for other in seen)
        assert await session.namespace_summary()
        of_it = [m for m in seen if getattr(m, "execution_id", None) == "e"]
        assert {type(m): None for m in of_it} == {Ack: None, Output: None, Result: None}
        assert isinstance(seen[-1], NamespaceSummary | Heartbeat)
        assert session.remove_message_interceptor(seen.append)
        assert not session.remove_message_interceptor(seen.append)
        seen.clear()
        await session.run("1")
        assert seen == []


async def test_an_interceptor_that_fails_is_counted_and_nothing_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(message: Any) -> None:
        raise ValueError(type(message).__name__)

    async with Session() as session:
        session.add_message_interceptor(failing)
        messages = await collect(session, "print('hi')\n42")
        assert [type(m) for m in (messages[0], messages[-1])] == [Ack, Result]
        assert text(messages) == "hi\n"
        assert session.metrics["interceptor_errors_total"] >= 3
        assert session.metrics["interceptor_quarantine_total"] == 0
    assert "failing" in caplog.text


async def test_an_interceptor_that_overruns_three_times_is_quarantined() -> None:
    """In quarantine it blocks for as long as it likes: output, a cancel and a restart go on."""
    gate, entered, calls = threading.Event(), threading.Event(), []

    def slow(message: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            calls.append(message)
            time.sleep(0.02)  # twice the budget
        else:
            entered.set()
            assert gate.wait(HANG_S)

    async with Session() as session:
        session.add_message_interceptor(slow)
        await session.run("print('hi')")
        await session.run("1")
        await eventually(lambda: session.metrics["interceptor_quarantine_total"] == 1)
        assert len(calls) == 3
        loop = Watched(session, "print('on', flush=True)\nwhile True: pass")
        await loop.until_output("on")
        assert await asyncio.to_thread(entered.wait, HANG_S)
        assert await session.cancel(loop.execution_id, grace_s=HANG_S) == "interrupted"
        assert isinstance(await loop.ended(), Error)
        assert (await session.run("print('x' * 1_000_000)")).stdout == "x" * 1_000_000 + "\n"
        entered.clear()
        await session.restart()
        await session.run("1")
        assert await asyncio.to_thread(entered.wait, HANG_S)  # still in quarantine, still called
        assert len(calls) == 3
        assert session.metrics["interceptor_quarantine_total"] == 0  # of the new child
        gate.set()


async def test_the_thread_of_a_quarantine_ends_with_a_child_that_dies_and_misses_nothing() -> None:
    seen: list[Any] = []

    def slow(message: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            time.sleep(0.002)
        else:
            seen.append(message)

    before = _quarantines()
    async with routed(interceptor_budget_s=0.001, interceptor_overruns=1) as session:
        session.add_message_interceptor(slow)
        await session.run("1")
        await session.run("2")
        (thread,) = _quarantines() - before
        *_, end = await collect(session, "import os; os._exit(3)")
        assert session.state == "error"
        await asyncio.to_thread(thread.join, HANG_S)
        assert not thread.is_alive()
        assert seen[-1] is end
        assert session.metrics["interceptor_skipped_total"] == 0


async def test_messages_that_an_interceptor_in_quarantine_misses_are_counted() -> None:
    gate = threading.Event()

    def stuck(_message: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            time.sleep(0.002)
        else:
            assert gate.wait(HANG_S)

    async with routed(
        interceptor_budget_s=0.001, interceptor_overruns=1, quarantine_queue=2
    ) as session:
        session.add_message_interceptor(stuck)
        for number in range(5):  # each is an Ack and a Result at least, and the queue holds two
            await session.run(f"{number}")
        assert session.metrics["interceptor_skipped_total"] >= 5
        gate.set()


def _quarantines() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "capsule-quarantine"}


async def test_the_budget_and_the_number_of_overruns_are_settings() -> None:
    def slow(_message: Any) -> None:
        time.sleep(0.002)

    async with routed(interceptor_budget_s=0.001, interceptor_overruns=1) as session:
        session.add_message_interceptor(slow)
        await session.run("1")
        assert session.metrics["interceptor_quarantine_total"] == 1
    async with routed(interceptor_budget_s=100.0) as session:
        session.add_message_interceptor(slow)
        for _ in range(5):
            await session.run("print('hi')")
        assert session.metrics["interceptor_quarantine_total"] == 0
