"""Both ends of one execution's output: what an honest child sends, its parent never refuses.

The child's `OutputSink` and the parent's `ExecutionStream` count the same bytes, each on its side.
Here they are joined without a process between them, and all else happens in any order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule_tasks.child.stopping.deferred_stop import InterruptibleCondition
from capsule_tasks.errors import BadFrame
from capsule_tasks.protocol.flow import OVERHEAD, message_cost, utf8_size
from capsule_tasks.protocol.messages import (
    Ack,
    Gap,
    InputClosed,
    InputRequest,
    Message,
    Output,
    Progress,
    Result,
)
from capsule_tasks.sessions.stream import ExecutionStream
from capsule_tasks.settings import OutputSettings
from tests.unit.child.io.sinks import Bench
from tests.unit.strategies import any_text


class PullingGate(InterruptibleCondition):
    """A writer that waits lets the consumer read, one message at a time."""

    pull: Callable[[], object] = lambda: None

    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        while not ready():
            self.pull()
        return True


class Wire:
    """A sink, its parent's stream, and credit on its way from one to the other."""

    def __init__(self, settings: OutputSettings, limit_bytes: int | None = None) -> None:
        self.credit: deque[int] = deque()
        self.read: list[Message] = []
        channel: Any = SimpleNamespace(send_control=lambda credit: self.credit.append(credit.bytes))
        self.stream = ExecutionStream("e", 1, settings, channel)
        self.stream.push(Ack(ack_of="x", execution_id="e", accepted_at=0.0))
        self.bench = Bench(
            limit_bytes=limit_bytes,
            backpressure=settings.backpressure,
            window_bytes=settings.window_bytes,
            chunk_bytes=settings.chunk_bytes,
        )
        self.bench.outbox.on_message = self.stream.push
        self.granted = 0
        gate = PullingGate()
        gate.pull = self.read_and_grant
        self.bench.sink._condition = gate
        self._open: list[str] = []

    def read_one(self) -> None:
        if self.stream.buffered_messages:
            turn = self.stream.next()
            with pytest.raises(StopIteration) as done:
                turn.send(None)
            self.read.append(done.value.value)

    def grant_one(self) -> None:
        if self.credit:
            self.granted += self.credit[0]
            self.bench.sink.add_credit(self.credit.popleft())

    def read_and_grant(self) -> None:
        assert self.stream.buffered_messages or self.credit, "the writer would wait for ever"
        self.read_one()
        self.grant_one()

    def question(self) -> None:
        request = InputRequest(execution_id="e", prompt="?" * 100)
        self.bench.sink.send_question(request)
        self._open.append(request.id)

    def answer(self) -> None:
        if self._open:
            closed = InputClosed(execution_id="e", request_id=self._open.pop(), reason="answered")
            self.bench.outbox.bulk(closed)  # as `InputRequests` does: without credit

    def progress(self) -> None:
        self.bench.sink.send(Progress(execution_id="e", done=0.5, note="n" * 50))

    def end(self) -> None:
        self.bench.sink.finish()
        while self._open:
            self.answer()
        self.bench.outbox.on_message = lambda _: None
        self.stream.finish(Result(execution_id="e"))
        while self.stream.buffered_messages:
            self.read_one()

    def credit_by_the_books(self) -> int:
        """Bytes that the child may send, from what it sent and the credit it was granted."""
        paid = sum(map(message_cost, self.bench.outbox.messages))
        return self.bench.settings.window_bytes + self.granted - paid

    def received(self, stream: str) -> str:
        return "".join(m.data for m in self.read if isinstance(m, Output) and m.stream == stream)

    def lost(self, stream: str) -> int:
        return sum(m.lost_bytes for m in self.read if isinstance(m, Gap) and m.stream == stream)


texts = any_text | st.text("ab😀", max_size=3).map(lambda text: text * 50)
steps = st.lists(
    st.tuples(st.just("stdout"), texts)
    | st.tuples(st.just("stderr"), texts)
    | st.sampled_from(
        ["pump", "flush", "read", "read", "grant", "question", "answer", "progress"]
    ).map(lambda name: (name, "")),
    max_size=60,
)
shapes = st.builds(
    OutputSettings,
    backpressure=st.sampled_from(["block", "drop_oldest"]),
    window_bytes=st.sampled_from([1, 100, 1000, 5000]),
    chunk_bytes=st.sampled_from([1, 10, 100, 1000]),
)


async def play(wire: Wire, story: list[tuple[str, str]]) -> dict[str, str]:
    written = {"stdout": "", "stderr": ""}
    bench = wire.bench
    moves: dict[str, Callable[[], object]] = {
        "pump": bench.sink.flush_from_pump,
        "flush": bench.stdout.flush,
        "read": wire.read_one,
        "grant": wire.grant_one,
        "question": wire.question,
        "answer": wire.answer,
        "progress": wire.progress,
    }
    for name, text in story:
        if name in written:
            getattr(bench, name).write(text)
            written[name] += text
        else:
            moves[name]()
    wire.end()
    return {name: _travelled(text) for name, text in written.items()}


def _travelled(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


@settings(max_examples=300)
@given(shapes, steps)
def test_the_parent_never_refuses_an_honest_child_and_every_byte_is_accounted_for(
    shape: OutputSettings, story: list[tuple[str, str]]
) -> None:
    async def scene() -> None:
        wire = Wire(shape)
        written = await play(wire, story)
        assert wire.bench.sink.credit == wire.credit_by_the_books()
        questions = sum(name == "question" for name, _ in story)
        assert sum(isinstance(m, InputRequest) for m in wire.read) == questions
        for name, text in written.items():
            if shape.backpressure == "block":
                assert wire.received(name) == text
                assert wire.lost(name) == 0
            else:
                assert len(wire.received(name).encode()) + wire.lost(name) == len(text.encode())
        terminal = wire.read[-1]
        assert isinstance(terminal, Result)
        assert terminal.stdout_bytes == len(wire.received("stdout").encode())
        assert terminal.stderr_bytes == len(wire.received("stderr").encode())

    asyncio.run(scene())


@pytest.mark.parametrize("text", ["x", "😀", "\ud800"], ids=ascii)
@pytest.mark.parametrize("window", [1, 1 << 20, 8 << 20])
async def test_an_unread_flood_is_dropped_and_not_a_fault(text: str, window: int) -> None:
    """A flood once ended the session: the rest at the end cost more than the parent allows."""
    wire = Wire(OutputSettings(backpressure="drop_oldest", window_bytes=window))
    for _ in range(40):
        wire.bench.stdout.write(text * (window // 16 + 100))
        wire.bench.stderr.write("!")
    wire.end()
    assert wire.lost("stdout") > 0


async def test_ten_thousand_questions_do_not_add_up_to_credit_that_was_not_granted() -> None:
    """They once did: the parent gave credit for each question's end, which cost the child none."""
    wire = Wire(OutputSettings())
    for _ in range(20_000):
        wire.question()
        wire.answer()
        while wire.stream.buffered_messages:
            wire.read_and_grant()
    while wire.credit:
        wire.grant_one()
    assert wire.bench.sink.credit <= wire.bench.settings.window_bytes


async def test_a_child_that_ignores_its_credit_is_at_fault() -> None:
    wire = Wire(OutputSettings(window_bytes=1000, chunk_bytes=100))
    flood = Output(execution_id="e", stream="stdout", data="x" * 100_000)
    pushes = (wire.stream.push(flood) for _ in range(100))
    with pytest.raises(BadFrame, match="execution e sent more than it had credit for"):
        deque(pushes, maxlen=0)
    assert wire.stream.buffered_bytes < 2 << 20


async def test_credit_for_what_was_read_is_granted_in_shares_of_the_window() -> None:
    wire = Wire(OutputSettings(window_bytes=100_000, chunk_bytes=1000))
    for _ in range(50):
        wire.bench.stdout.write("x" * 1000)
    assert not wire.credit
    while wire.stream.buffered_messages:
        wire.read_one()
    paid = sum(1000 + 256 for _ in range(50))
    assert 0 < sum(wire.credit) <= paid
    assert all(amount >= 100_000 // 4 for amount in wire.credit)


async def test_an_abandoned_stream_takes_everything_and_credits_it() -> None:
    wire = Wire(OutputSettings(window_bytes=5000, chunk_bytes=100))
    wire.bench.stdout.write("x" * 1000)
    wire.stream.abandon()
    wire.stream.abandon()
    assert wire.stream.buffered_messages == 0
    for _ in range(100):
        wire.bench.stdout.write("y" * 1000)
        while wire.credit:
            wire.grant_one()
    assert wire.stream.buffered_messages == 0


# --- what a message costs ---------------------------------------------------------------------


@given(st.text())
def test_the_size_of_text_is_that_of_its_utf8(text: str) -> None:
    assert utf8_size(text) == len(text.encode())


@pytest.mark.parametrize(
    ("message", "cost"),
    [
        (Output(stream="stdout", data="żółć", execution_id="e"), OVERHEAD + 8),
        (Progress(execution_id="e", done=1.0, note="½ done"), OVERHEAD + 7),
        (Gap(stream="stdout", lost_bytes=10**9, lost_messages=1), OVERHEAD),
        (InputRequest(execution_id="e", prompt="Name? "), 2 * OVERHEAD + 6),
        (InputClosed(execution_id="e", request_id="r", reason="answered"), 0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Message) else "",
)
def test_a_message_costs_its_text_and_a_little_and_a_question_pays_for_its_end(
    message: Message, cost: int
) -> None:
    assert message_cost(message) == cost


@given(st.text(max_size=2000))
def test_a_message_costs_no_less_than_the_bytes_it_has_on_the_wire(text: str) -> None:
    """So that a window of credit bounds the memory of both sides."""
    output = Output(stream="stdout", data=text, execution_id="e" * 64)
    assert message_cost(output) >= len(msgspec.msgpack.encode(output))
