"""From `print` to frames: attributed, batched, bounded.

Each execution has one `Sink`. Writers append to a list, which costs a fraction of a microsecond;
the text leaves in three ways: the writer sends it when a chunk is full (where that is asked for,
also a line after a rest), the pump when it has waited long enough, and the end of the execution
before its terminal message.

What may be on its way is bounded by credit that the parent grants as its consumer reads. Without
credit a writer waits (`block`) or the oldest text is dropped and counted (`drop_oldest`).
"""

from __future__ import annotations

import codecs
import io
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from capsule_tasks.child.io.streams import SessionStream
from capsule_tasks.child.outbox import Outbox
from capsule_tasks.child.stopping.condition import Gate
from capsule_tasks.child.stopping.deferred_stop import interruptible, landing
from capsule_tasks.errors import ExecutionCancelled
from capsule_tasks.protocol.flow import OVERHEAD, message_cost, utf8_size
from capsule_tasks.protocol.messages import Gap, Message, Output, Stream
from capsule_tasks.protocol.values import sendable
from capsule_tasks.settings import OutputSettings

_MOST_LOST_PER_S = 256 * 1024 * 1024
"""Bytes that a writer may lose in a second; a tight loop would lose several times as many."""
_GIVE_WAY_S = 0.002
"""What is too short to sleep for."""


class OutputLimitReached(ExecutionCancelled):
    """An execution wrote more than it may."""


class _StderrText(str):
    """Text bound for stderr, told apart from stdout's by its type alone."""

    __slots__ = ()


class Sink:
    """The output of one execution, or of the session while none is meant."""

    def __init__(
        self,
        execution_id: str | None,
        outbox: Outbox,
        settings: OutputSettings,
        pump: Pump,
        *,
        late: Sink | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self.execution_id = execution_id
        self.parts: list[str] = []
        self.size = 0
        self.mark = 1
        self.over_limit = ""
        self.uses_stderr = False
        self.sent: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        self.on_credit: Callable[[], None] | None = None
        self._outbox = outbox
        self._pump = pump
        self._late = late
        self._limit = limit_bytes
        self._granted = settings.window_bytes
        self._used = 0
        self._written = 0
        self._counted = 0
        self._gathered = False
        self._lines_at_once = settings.lines_at_once
        self._has_sent_line = False
        """Since the pump's last turn."""
        self._window = settings.window_bytes
        self._chunk = settings.chunk_bytes
        # A little less than a chunk, or what goes over the mark would be a message of its own.
        self._full = self._chunk - self._chunk // 8
        self._blocks = settings.backpressure == "block" and late is not None
        self._segments: deque[tuple[str | None, Stream, str]] = deque()
        self._position = 0
        self._lost: dict[Stream, list[int]] = {}
        self._before_loss = 0
        self._throttled_until = 0.0
        self._lock = threading.RLock()
        self._gate = Gate()
        self._held = False
        self._sealed = False
        self._closed = False

    @property
    def credit(self) -> int:
        """Bytes that may be sent. Two sums with one writer each: no update can be lost."""
        return 0 if self._held and not self._sealed else self._granted - self._used

    @property
    def is_closed(self) -> bool:
        """Whether its execution is over, or about to say so."""
        return self._closed

    @property
    def backlog(self) -> int:
        """Characters not sent yet, roughly."""
        queued = sum(len(text) for _, _, text in list(self._segments))
        return self.size + queued - self._position

    def settle(self) -> None:
        """Called by a writer whose text reached the mark; near a limit that is every writer."""
        if self._sealed:
            self._relay()
            return
        if self._limit is not None:
            self._check_limit(self._limit)
        if self.size >= self._full:
            self.flush()
            return
        is_gathered, self._gathered = self._gathered, True
        if not self._lines_at_once:
            self._rest()
        elif not self._has_sent_line and self._ends_a_line():
            self._has_sent_line = True
            self.flush_ready()
            self._rest()
        if not is_gathered:
            self._pump.gather(self)

    def _ends_a_line(self) -> bool:
        last = self.parts[-1:]  # the pump may take it just now
        return bool(last) and last[0].endswith("\n")

    def flush(self) -> None:
        """Send everything; waits for credit, or drops, as configured."""
        if not self._blocks:
            if not self._send_ready():
                self._throttle(self._drop_excess())
            return
        try:
            while not self._send_ready() and not self._sealed:
                self._gate.wait(lambda: self._has_credit() or self._sealed)
        except ExecutionCancelled:
            self._cut_to(self._chunk)
            raise

    def flush_ready(self) -> None:
        """Send what credit allows now; never waits for the consumer."""
        if not self._send_ready() and not self._blocks:
            self._drop_excess()

    def say(self, message: Message) -> None:
        """Send a message in order with the text, at the price of its size."""
        self.flush()
        if self._blocks:
            self._gate.wait(lambda: self._has_credit() or self._sealed)
        elif self.credit <= 0:
            return  # progress that nobody reads in time is superseded by the next
        if self._sealed:
            return
        with self._lock:
            self._used += message_cost(message)
            self._outbox.bulk(message)

    def ask(self, message: Message) -> None:
        """Send a question behind the text; it never waits for credit."""
        self.flush()
        with self._lock:
            self._used += message_cost(message)
            self._outbox.bulk(message)

    def add_credit(self, amount: int) -> None:
        self._granted += amount
        self._gate.open()
        if self.backlog:
            self._pump.gather(self)
        if self.on_credit is not None:
            self.on_credit()

    def hold(self) -> None:
        """Send nothing more until `release`: what is granted now is for after an interrupt."""
        self._held = True

    def release(self) -> None:
        """The interrupt is on its way into the code; runs in a signal handler."""
        self._held = False
        self._gate.open()

    def try_finish(self) -> bool:
        """Send the rest and close, if credit allows or the mode never waits."""
        self._seal()
        with self._lock:
            if not self._blocks:
                self.flush_ready()
            self._closed = self._send_ready(overdraw=not self._blocks)
            return self._closed

    def _seal(self) -> None:
        """What is written from now on is late, so that no thread can put off the end."""
        if self._sealed:
            return
        with self._lock:
            self._take(self._segments)
            self._sealed = True
            self.mark = 1
        self._gate.open()
        if self.parts:  # a thread slipped it in before it saw the mark
            self._relay()

    def finish(self) -> None:
        """Send the rest and close; waits for the consumer for as long as it takes."""
        while not self.try_finish():
            self._gate.wait(self._has_credit)

    def flush_from_pump(self) -> bool:
        """The pump's turn: whether this sink wants another one."""
        if self._sealed:
            self._relay()
            return False
        sent_any = bool(self.parts or self._segments or self._has_sent_line)
        self._has_sent_line = False
        self.flush_ready()
        if sent_any:
            self._rest()
            return not self._segments  # out of credit: `add_credit` rings again
        self._gathered = False
        self.mark = 1
        if not self.parts:
            return False
        self._gathered = True  # written between the two looks
        self._rest()
        return True

    def _rest(self) -> None:
        """The pump has this sink in hand: writers need not come before a chunk is full."""
        if self._limit is None:
            self.mark = self._full
        else:  # a character has four bytes at most: what stays below is within the limit
            self.mark = max(1, min(self._full, (self._limit - self._written) // 4))

    def _has_credit(self) -> bool:
        return self.credit > 0

    def _send_ready(self, *, overdraw: bool = False) -> bool:
        with self._lock:
            if self._closed:
                return True
            while self._segments or (not self._sealed and self._take(self._segments)):
                if self.credit <= 0 and not overdraw:
                    return False
                self._send_piece()
            self._report_loss()
            return True

    def _take(self, segments: deque[tuple[str | None, Stream, str]]) -> bool:
        """Move what was written into segments of one stream each."""
        count = len(self.parts)
        if not count:
            return False
        parts = self.parts[:count]
        if self._limit is not None:
            self._count(parts)
        del self.parts[:count]
        self.size = self._counted = 0
        if not self.uses_stderr:
            segments.append((self.execution_id, "stdout", sendable("".join(parts))))
            return True
        for kind, run in itertools.groupby(parts, key=type):
            stream: Stream = "stderr" if kind is _StderrText else "stdout"
            segments.append((self.execution_id, stream, sendable("".join(run))))
        return True

    def _send_piece(self) -> None:
        execution_id, stream, text = self._segments[0]
        self._report_loss()
        start, end = self._position, self._position + self._chunk
        piece = text if start == 0 and len(text) <= self._chunk else text[start:end]
        if end >= len(text):
            self._segments.popleft()
            self._position = 0
            self._before_loss = max(0, self._before_loss - 1)
        else:
            self._position = end
        if not piece:
            return
        is_late = execution_id != self.execution_id
        message = Output(execution_id=execution_id, stream=stream, data=piece, late=is_late)
        self.sent[stream] += utf8_size(message.data)
        self._used += message_cost(message)
        self._outbox.bulk(message)

    def _throttle(self, lost: int) -> None:
        """A writer that writes for nobody leaves the machine to those who do not."""
        now = time.monotonic()
        self._throttled_until = max(self._throttled_until, now) + lost / _MOST_LOST_PER_S
        if self._throttled_until - now > _GIVE_WAY_S:
            time.sleep(self._throttled_until - now)

    def _drop_excess(self) -> int:
        """Keep the newest of what waits for credit, as much as can be sent for one window.

        Returns the price of what was lost.
        """
        lost = 0
        with self._lock:
            if not self._sealed:
                self._take(self._segments)
            start, excess = self._position, -self._window
            for _, _, text in self._segments:
                excess += self._price(text, start)
                start = 0
            while excess > 0 and self._segments:
                _, stream, text = self._segments[0]
                start, price = self._position, self._price(text, self._position)
                share = excess * (len(text) - start) // max(1, price)  # the rest goes next turn
                end = self._position = min(len(text), start + max(1, share))
                self._count_loss(stream, text[start:end])
                freed = price - self._price(text, end)
                excess -= freed
                lost += freed
                if end == len(text):
                    self._segments.popleft()
                    self._position = 0
                    self._before_loss = max(0, self._before_loss - 1)
        return lost

    def _price(self, text: str, start: int) -> int:
        """The credit that it takes to send a text from there to its end."""
        rest = len(text) - start
        size = rest if text.isascii() else utf8_size(text[start:])
        return size + OVERHEAD * -(-rest // self._chunk)

    def _cut_to(self, keep: int) -> None:
        """After an interrupted write: keep what may be earlier output, count the rest as lost."""
        with self._lock:
            if not self._sealed:
                self._take(self._segments)
            room = keep
            kept: deque[tuple[str | None, Stream, str]] = deque()
            for execution_id, stream, text in self._segments:
                rest, self._position = text[self._position :], 0
                kept.append((execution_id, stream, rest[:room]))
                self._count_loss(stream, rest[room:])
                room = max(0, room - len(rest))
            self._segments = kept
            self._before_loss = len(kept)

    def _count_loss(self, stream: Stream, text: str) -> None:
        if text:
            lost = self._lost.setdefault(stream, [0, 0])
            lost[0] += utf8_size(text)
            lost[1] += 1

    def _report_loss(self) -> None:
        while self._lost and not self._before_loss:
            stream, (lost_bytes, lost_messages) = self._lost.popitem()
            gap = Gap(
                execution_id=self.execution_id,
                stream=stream,
                lost_bytes=lost_bytes,
                lost_messages=lost_messages,
            )
            self._used += message_cost(gap)
            self._outbox.bulk(gap)

    def _relay(self) -> None:
        """Text written after the end goes to the session, under its old name."""
        late: deque[tuple[str | None, Stream, str]] = deque()
        with self._lock:
            self._take(late)
        if self._late is not None:
            self._late.accept(late)

    def accept_text(self, stream: Stream, text: str) -> None:
        """Queue text that comes from this package itself."""
        self.accept(deque([(self.execution_id, stream, sendable(text))]))

    def accept(self, segments: deque[tuple[str | None, Stream, str]]) -> None:
        with self._lock:
            self._take(self._segments)
            self._segments.extend(segments)
        self.flush()

    def _check_limit(self, limit: int) -> None:
        with self._lock:
            self._count(self.parts)
            if self._written <= limit:
                return
            self._cut_to(max(0, limit - sum(self.sent.values())))
            self.over_limit = f"output limit of {limit} bytes: {self._written} were written"
        raise OutputLimitReached(self.over_limit)

    def _count(self, parts: list[str]) -> None:
        """Add the bytes of those parts that have not been counted."""
        fresh = parts[self._counted :]
        self._counted += len(fresh)
        self._written += sum(utf8_size(sendable(text)) for text in fresh)


class UnattributedSink:
    """Stands in where no context names an execution: each access asks anew whose output it is."""

    def __init__(self, owner: Callable[[], Sink]) -> None:
        self._owner = owner

    @property
    def parts(self) -> list[str]:
        return self._owner().parts

    @property
    def size(self) -> int:
        return self._owner().size

    @size.setter
    def size(self, value: int) -> None:
        self._owner().size = value

    @property
    def mark(self) -> int:
        return self._owner().mark

    @property
    def uses_stderr(self) -> bool:
        return self._owner().uses_stderr

    @uses_stderr.setter
    def uses_stderr(self, value: bool) -> None:
        self._owner().uses_stderr = value

    def settle(self) -> None:
        self._owner().settle()

    def flush_ready(self) -> None:
        self._owner().flush_ready()


class Settling(Protocol):
    """What the pump serves."""

    def flush_from_pump(self) -> bool:
        """Send what has waited; whether it wants another turn."""


class Pump:
    """Sends what has waited long enough. Asleep while there is none."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._bell: SimpleQueue[Settling] = SimpleQueue()

    def start(self) -> None:
        threading.Thread(target=self._run, name="capsule-pump", daemon=True).start()

    def gather(self, source: Settling) -> None:
        """Have it settled now, and again for as long as it wants to be."""
        self._bell.put(source)

    def _run(self) -> None:
        busy: set[Settling] = set()
        while True:
            if not busy:
                busy.add(self._bell.get())
            while not self._bell.empty():
                busy.add(self._bell.get())
            busy = {source for source in busy if source.flush_from_pump()}
            if busy:
                time.sleep(self._interval_s)


class CapturedStream(SessionStream):
    """`sys.stdout` or `sys.stderr` of a session: text goes to the sink of the caller's context."""

    encoding = "utf-8"
    errors = "backslashreplace"
    line_buffering = write_through = False

    def __init__(
        self, name: Stream, descriptor: int, sink: Callable[[], Sink | UnattributedSink]
    ) -> None:
        self._sink = sink
        self._descriptor = descriptor
        self.mode = "w"
        self.name = f"<{name}>"
        self.buffer = _Buffer(self)
        self.write = self._writer(sink)  # type: ignore[method-assign]

    def _writer(self, current: Callable[[], Sink | UnattributedSink]) -> Callable[[str], int]:
        """`write` as the stream's own function: found and called faster, a `print` takes 3/4."""

        @interruptible
        def write(text: str) -> int:
            if type(text) is not str:
                text = _plain(text)
            sink = current()
            sink.parts.append(text)
            count = len(text)
            size = sink.size = sink.size + count
            if size >= sink.mark:
                sink.settle()
                if landing.pending:
                    landing.raise_pending()
            return count

        return write

    @interruptible
    def flush(self) -> None:
        self._sink().flush_ready()
        if landing.pending:
            landing.raise_pending()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """The raw descriptor; what is written there arrives too, behind no promise of order."""
        return self._descriptor


class CapturedErrorStream(CapturedStream):
    """`sys.stderr`: its text is marked, so that it keeps its place between stdout's."""

    def _writer(self, current: Callable[[], Sink | UnattributedSink]) -> Callable[[str], int]:
        @interruptible
        def write(text: str) -> int:
            sink = current()
            sink.uses_stderr = True  # before the text, so that no flush takes it for stdout's
            sink.parts.append(_StderrText(_plain(text)))
            size = sink.size = sink.size + len(text)
            if size >= sink.mark:
                sink.settle()
                if landing.pending:
                    landing.raise_pending()
            return len(text)

        return write


class _Buffer(io.RawIOBase):
    """`sys.stdout.buffer`: bytes, decoded as UTF-8 on their way into the text."""

    def __init__(self, text: CapturedStream) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    @interruptible
    def write(self, data: object) -> int:
        raw = memoryview(data)  # type: ignore[arg-type]
        self._text.write(self._decoder.decode(bytes(raw)))
        return raw.nbytes

    @interruptible
    def flush(self) -> None:
        self._text.write(self._decoder.decode(b"", final=True))
        self._text.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._text.fileno()

    def close(self) -> None:
        """A session's streams outlive whoever closes them."""


def _plain(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"write() argument must be str, not {type(text).__name__}")
    return str.__str__(text)


def plain_streams() -> tuple[io.TextIOWrapper, io.TextIOWrapper]:
    """Ordinary unbuffered text streams on descriptors 1 and 2."""
    out, err = (
        io.TextIOWrapper(
            io.FileIO(descriptor, "w", closefd=False),
            "utf-8",
            "backslashreplace",
            write_through=True,
        )
        for descriptor in (1, 2)
    )
    return out, err
