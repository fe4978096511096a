"""Output of one execution on its way from `print` to frames: attributed, batched, bounded.

Each execution has an `OutputSink`. Writers append text to a list, which takes a fraction of a
microsecond. The text is sent by the writer when a chunk is full (with `lines_at_once` also when a
line is written after a pause), by the pump when it has waited long enough, and by the end of the
execution before its terminal message.

Credit that the parent grants as its consumer reads bounds how much is on its way. Without credit a
writer waits (`block`), or the oldest text is dropped and counted (`drop_oldest`).

Signal safety: a stop is raised in the main thread by a signal handler, between any two bytecodes.
Writers therefore take no lock before a flush, and a flush runs in frames of this module, which are
not `interruptible`: the handler defers the stop until `write` is about to return to user code.
Only `InterruptibleCondition.wait` can be left by a stop while this module is on the stack.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from capsule_tasks.child.outbox import Outbox
from capsule_tasks.child.stopping.deferred_stop import InterruptibleCondition
from capsule_tasks.errors import ExecutionCancelled
from capsule_tasks.protocol.flow import OVERHEAD, message_cost, utf8_size
from capsule_tasks.protocol.messages import Gap, Message, Output, Progress, RunEvent, Stream
from capsule_tasks.protocol.values import sendable
from capsule_tasks.settings import OutputSettings

Segment = tuple[str | None, Stream, str]
"""Text of one stream, with the execution that wrote it."""
_MAX_DROPPED_PER_S = 256 * 1024 * 1024
"""Bytes that a writer may lose in a second; a tight loop would lose several times as many."""
_MIN_SLEEP_S = 0.002


class OutputLimitReached(ExecutionCancelled):
    """An execution wrote more than it may."""


class StderrText(str):
    """Text for stderr; its type alone tells it from text for stdout."""

    __slots__ = ()


class OutputSink:
    """The output of one execution, or of the session while no execution is meant."""

    def __init__(
        self,
        execution_id: str | None,
        outbox: Outbox,
        settings: OutputSettings,
        *,
        late: OutputSink | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self.execution_id = execution_id
        self.parts: list[str] = []
        self.size = 0
        self.flush_at_chars = 1
        """A writer whose text makes `size` reach this number calls `flush_if_due`."""
        self.over_limit = ""
        self.uses_stderr = False
        self.sent: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        self.on_credit: Callable[[], None] | None = None
        self._outbox = outbox
        self._late = late
        self._limit = limit_bytes
        self._granted = self._window = settings.window_bytes
        self._used = 0
        self._written = 0
        """Bytes that have been queued, which count against the limit."""
        self._is_with_pump = False
        self._lines_at_once = settings.lines_at_once
        self._has_sent_line = False
        """Since the pump's last call."""
        chunk = self._chunk = settings.chunk_bytes
        # Less than a chunk: text beyond a full chunk would be sent as a second, small message.
        self._full = chunk - chunk // 8
        self._blocks = settings.backpressure == "block" and late is not None
        self._queue = TextQueue(chunk)
        self._throttled_until = 0.0
        self._lock = threading.RLock()
        self._condition = InterruptibleCondition()
        self._is_paused = False
        self._is_closed_for_writers = False
        self.is_closed = False
        """Whether the execution has ended, or its terminal message is about to be sent."""

    @property
    def credit(self) -> int:
        """Bytes that may be sent.

        Control adds to `_granted`, and only holders of the lock add to `_used`: with one variable
        for both, two threads could each read the old value, and one update would be lost.
        """
        is_paused = self._is_paused and not self._is_closed_for_writers
        return 0 if is_paused else self._granted - self._used

    @property
    def backlog(self) -> int:
        """Characters that have not been sent, roughly."""
        return self.size + self._queue.chars

    def flush_if_due(self) -> None:
        """Send or hand to the pump; called by a writer whose text reached `flush_at_chars`."""
        if self._is_closed_for_writers:
            self._forward_late()
            return
        is_full = self.size >= self._full
        # `parts[-1:]`, not `parts[-1]`: the pump may be emptying the list.
        ends_a_line = self._lines_at_once and "".join(self.parts[-1:]).endswith("\n")
        self._check_limit()
        if is_full:
            self.flush()
            return
        was_with_pump, self._is_with_pump = self._is_with_pump, True
        if not self._lines_at_once:
            self._leave_to_pump()
        elif ends_a_line and not self._has_sent_line:
            self._has_sent_line = True
            self.flush_ready()
            self._leave_to_pump()
        if not was_with_pump:
            self._outbox.pump.add(self.flush_from_pump)

    def flush(self) -> None:
        """Send everything; waits for credit, or drops, as configured."""
        if not self._blocks:
            if not self._send_ready():
                self._throttle(self._drop_excess())
            return
        try:
            while not self._send_ready() and not self._is_closed_for_writers:
                self._wait_for_credit()
        except ExecutionCancelled:
            self._keep_oldest(self._chunk)
            raise

    def flush_ready(self) -> None:
        """Send what credit allows now; never waits for the consumer."""
        if not self._send_ready() and not self._blocks:
            self._drop_excess()

    def send(self, message: Progress | RunEvent, *, needs_credit: bool = True) -> bool:
        """Send a message in order with the text, at the price of its size; whether it was sent.

        Without credit it is not sent, unless output blocks: the next one supersedes or counts it.
        """
        self.flush()
        if self._blocks and needs_credit:
            self._wait_for_credit()
        elif self.credit <= 0 and needs_credit:
            return False
        if self._is_closed_for_writers:
            return False
        self._send_at_cost(message)
        return True

    def send_question(self, message: Message) -> None:
        """Send a question behind the text; it never waits for credit."""
        self.flush()
        self._send_at_cost(message)

    def add_credit(self, amount: int) -> None:
        self._granted += amount
        self._condition.notify_all()
        if self.backlog:
            self._outbox.pump.add(self.flush_from_pump)
        if self.on_credit is not None:
            self.on_credit()

    def pause(self) -> None:
        """Send nothing until `resume`: credit granted now is for output after the stop."""
        self._is_paused = True

    def resume(self) -> None:
        """Send again, as the stop is about to be raised. Called by a signal handler: no locks."""
        self._is_paused = False
        self._condition.notify_all()

    def try_finish(self) -> bool:
        """Send the rest and close, if credit allows or the mode never waits."""
        self._close_for_writers()
        with self._lock:
            if not self._blocks:
                self.flush_ready()
            self.is_closed = self._send_ready(overdraw=not self._blocks)
            return self.is_closed

    def _close_for_writers(self) -> None:
        """Treat text written from now on as late, so that no thread can delay the end."""
        if self._is_closed_for_writers:
            return
        with self._lock:
            self._enqueue_written()
            self._is_closed_for_writers = True
            self.flush_at_chars = 1
        self._condition.notify_all()
        # A thread may have appended text after `_take_written`, and compared its size with the
        # old `flush_at_chars`: then that thread does not call `flush_if_due`.
        if self.parts:
            self._forward_late()

    def finish(self) -> None:
        """Send the rest and close; waits for the consumer for as long as it takes."""
        while not self.try_finish():
            self._condition.wait(lambda: self.credit > 0)

    def flush_from_pump(self) -> bool:
        """Send what waits; True if the pump should call again."""
        if self._is_closed_for_writers:
            self._forward_late()
            return False
        sent_any = bool(self.parts or self._queue or self._has_sent_line)
        self._has_sent_line = False
        self.flush_ready()
        if sent_any:
            self._leave_to_pump()
            return not self._queue  # without credit: `add_credit` adds this sink again
        self._is_with_pump = False
        self.flush_at_chars = 1
        if not self.parts:
            return False
        # A writer appended text before `flush_at_chars` was lowered, and left it to the pump.
        self._is_with_pump = True
        self._leave_to_pump()
        return True

    def _leave_to_pump(self) -> None:
        """Have writers call `flush_if_due` only when a chunk is full: the pump sends the rest."""
        self.flush_at_chars = self._full
        self._watch_limit()

    def _watch_limit(self) -> None:
        """Have a writer who may reach the limit call `flush_if_due`."""
        if self._limit is not None:
            # A character has four bytes at most: less text than this is within the limit.
            within = max(1, (self._limit - self._written) // 4)
            self.flush_at_chars = min(self.flush_at_chars, within)

    def _wait_for_credit(self) -> None:
        self._condition.wait(lambda: self.credit > 0 or self._is_closed_for_writers)

    def _send_ready(self, *, overdraw: bool = False) -> bool:
        """Send what credit allows; True if nothing is left."""
        with self._lock:
            if self.is_closed:
                return True
            while self._queue or self._enqueue_written():
                if self.credit <= 0 and not overdraw:
                    return False
                self._send_gaps()
                execution_id, stream, text = self._queue.next_piece()
                if text:
                    is_late = execution_id != self.execution_id
                    self.sent[stream] += utf8_size(text)
                    self._send_at_cost(
                        Output(execution_id=execution_id, stream=stream, data=text, late=is_late)
                    )
            self._send_gaps()
            return True

    def _send_gaps(self) -> None:
        while (gap := self._queue.next_gap()) is not None:
            stream, lost_bytes, lost_messages = gap
            self._send_at_cost(
                Gap(
                    execution_id=self.execution_id,
                    stream=stream,
                    lost_bytes=lost_bytes,
                    lost_messages=lost_messages,
                )
            )

    def _send_at_cost(self, message: Message) -> None:
        with self._lock:
            self._used += message_cost(message)
            self._outbox.bulk(message)

    def _enqueue_written(self) -> bool:
        """Queue what was written, unless that is late by now; whether there was any."""
        if self._is_closed_for_writers or not self.parts:
            return False
        self._queue.extend(self._take_written())
        self._keep_to_limit()
        return True

    def _take_written(self) -> list[Segment]:
        """Take what was written, as segments of one stream each. Under the lock."""
        count = len(self.parts)  # writers append without the lock: later text stays in the list
        if not count:
            return []
        parts = self.parts[:count]
        del self.parts[:count]
        self.size = 0
        one_run: list[tuple[type, Iterable[str]]] = [(str, parts)]
        segments: list[Segment] = []
        for kind, run in itertools.groupby(parts, key=type) if self.uses_stderr else one_run:
            text = sendable("".join(run))
            segments.append((self.execution_id, "stderr" if kind is StderrText else "stdout", text))
            if self._limit is not None:
                self._written += utf8_size(text)
        return segments

    def _throttle(self, dropped: int) -> None:
        """Slow down a writer whose output is dropped, so that other processes get the CPU."""
        now = time.monotonic()
        self._throttled_until = max(self._throttled_until, now) + dropped / _MAX_DROPPED_PER_S
        if self._throttled_until - now > _MIN_SLEEP_S:
            time.sleep(self._throttled_until - now)

    def _drop_excess(self) -> int:
        """Drop the oldest text beyond one window; the credit that it would have taken."""
        with self._lock:
            self._enqueue_written()
            return self._queue.drop_oldest(self._window)

    def _keep_oldest(self, chars: int) -> None:
        """Drop text of an interrupted write, but for what may be earlier output."""
        with self._lock:
            self._enqueue_written()
            self._queue.keep_oldest(chars)

    def _forward_late(self) -> None:
        """Send text written after the end as session output, under its execution's id."""
        with self._lock:
            late = self._take_written()
        if self._late is not None:
            self._late.accept(late)

    def accept(self, segments: Iterable[Segment]) -> None:
        """Send late text of another sink, or text of this package itself."""
        with self._lock:
            self._enqueue_written()
            self._queue.extend(segments)
        self.flush()

    def _keep_to_limit(self) -> None:
        """Drop text beyond the limit, whoever took it from the writers. Under the lock."""
        if self._limit is None:
            return
        self._watch_limit()
        if self._written > self._limit:
            self._queue.keep_oldest_bytes(self._limit - sum(self.sent.values()))
            self.over_limit = f"output limit of {self._limit} bytes: {self._written} were written"

    def _check_limit(self) -> None:
        if self._limit is None:
            return
        with self._lock:
            self._enqueue_written()
        if self.over_limit:
            raise OutputLimitReached(self.over_limit)


class TextQueue:
    """Segments in the order in which they were written. The sink's lock guards every call."""

    def __init__(self, chunk_chars: int) -> None:
        self._chunk = chunk_chars
        self._segments: deque[Segment] = deque()
        self._position = 0
        """Characters of the first segment that have been sent or dropped."""
        self._dropped: dict[Stream, list[int]] = {}
        self._until_gap = 0
        """Segments that were written before the text that was dropped."""

    def __bool__(self) -> bool:
        return bool(self._segments)

    @property
    def chars(self) -> int:
        """Characters that wait. Approximate: other threads may call this without the lock."""
        return sum(len(text) for _, _, text in list(self._segments)) - self._position

    def extend(self, segments: Iterable[Segment]) -> None:
        self._segments.extend(segments)

    def next_piece(self) -> Segment:
        """Take the oldest text, one chunk at most."""
        execution_id, stream, text = self._segments[0]
        start, end = self._position, self._position + self._chunk
        self._advance(text, end)
        return execution_id, stream, text[start:end]

    def next_gap(self) -> tuple[Stream, int, int] | None:
        """Take a count of dropped bytes and pieces, once all text before them has been sent."""
        if not self._dropped or self._until_gap:
            return None
        stream, (dropped_bytes, pieces) = self._dropped.popitem()
        return stream, dropped_bytes, pieces

    def drop_oldest(self, max_cost: int) -> int:
        """Keep the newest text that `max_cost` bytes of credit can send.

        Returns the credit that it would have taken to send the dropped text.
        """
        start, excess, dropped = self._position, -max_cost, 0
        for _, _, text in self._segments:
            excess += self._cost(text, start)
            start = 0
        while excess > 0 and self._segments:
            _, stream, text = self._segments[0]
            start, cost = self._position, self._cost(text, self._position)
            share = excess * (len(text) - start) // max(1, cost)  # the next pass drops the rest
            end = min(len(text), start + max(1, share))
            self._count_drop(stream, text[start:end])
            freed = cost - self._cost(text, end)
            excess -= freed
            dropped += freed
            self._advance(text, end)
        return dropped

    def keep_oldest(self, chars: int) -> None:
        """Keep the first `chars` characters and drop the rest."""
        kept: deque[Segment] = deque()
        for execution_id, stream, text in self._segments:
            rest, self._position = text[self._position :], 0
            if chars:
                kept.append((execution_id, stream, rest[:chars]))
            self._count_drop(stream, rest[chars:])
            chars = max(0, chars - len(rest))
        self._segments = kept
        self._until_gap = len(kept)

    def keep_oldest_bytes(self, max_bytes: int) -> None:
        """Keep the first characters that have `max_bytes` at most, and drop the rest."""
        chars, start = 0, self._position
        for _, _, text in self._segments:
            fitting = text[start:].encode()[:max_bytes].decode(errors="ignore")
            chars += len(fitting)
            if len(fitting) < len(text) - start:
                break
            max_bytes -= utf8_size(fitting)
            start = 0
        self.keep_oldest(chars)

    def _advance(self, text: str, position: int) -> None:
        self._position = position
        if position >= len(text):
            self._segments.popleft()
            self._position = 0
            self._until_gap = max(0, self._until_gap - 1)

    def _cost(self, text: str, start: int) -> int:
        """The credit that it takes to send a text from `start` to its end."""
        rest = len(text) - start
        size = rest if text.isascii() else utf8_size(text[start:])
        return size + OVERHEAD * -(-rest // self._chunk)

    def _count_drop(self, stream: Stream, text: str) -> None:
        if text:
            dropped = self._dropped.setdefault(stream, [0, 0])
            dropped[0] += utf8_size(text)
            dropped[1] += 1
