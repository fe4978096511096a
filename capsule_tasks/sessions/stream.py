"""The parent's side of one execution: a bounded queue between the router and one consumer."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable

from capsule_tasks.errors import BadFrame
from capsule_tasks.protocol.flow import OVERHEAD, message_cost, utf8_size
from capsule_tasks.protocol.messages import (
    Ack,
    Credit,
    Error,
    ErrorKind,
    Message,
    Output,
    Stream,
    Terminal,
)
from capsule_tasks.sessions.process.channel import Channel
from capsule_tasks.settings import OutputSettings

_UNCREDITED_MAX = 1024 * 1024
"""For what a child may send without credit: questions of many threads, and the last messages."""
CANCEL_CREDIT = 256 * 1024
"""Granted with a cancel, so that a paused consumer does not hold up `finally` blocks."""
ERROR_TYPES = {ErrorKind.TIMEOUT: "ExecutionTimeout", ErrorKind.LIMIT: "LimitReached"}
"""The `type` of errors that are named after why an execution was stopped."""


@dataclasses.dataclass
class Stop:
    """Why the parent is stopping an execution; the first reason stands."""

    kind: ErrorKind
    message: str
    stack: str = ""


class ExecutionStream:
    """The messages of one execution that its consumer has not read.

    Output is charged when it arrives and credited to the child when it is read, so the queue
    holds a window of it at most. A child that sends more than it has credit for is at fault.
    With a `consumer` there is no queue: each message is handed to it as it comes. A consumer that
    returns False has no room: its output stays charged until `resume_output` is called.
    """

    def __init__(
        self,
        execution_id: str,
        seq: int,
        settings: OutputSettings,
        channel: Channel,
        consumer: Callable[[Message], object] | None = None,
    ) -> None:
        self.execution_id = execution_id
        self.task_name = ""
        """The name of the Celery task, if the execution runs one."""
        self.seq = seq
        self.acked = False
        self.terminal: Terminal | None = None
        self.stop: Stop | None = None
        self.abandoned = False
        self.was_killed = False
        self.is_counted = False
        self.raw_waiting = 0
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[Terminal] = loop.create_future()
        self._window = settings.window_bytes
        self._max_unread = 3 * settings.window_bytes + 32 * settings.chunk_bytes + _UNCREDITED_MAX
        self._limit: int | None = None
        self._on_excess: Callable[[ExecutionStream, str], None] | None = None
        self._channel = channel
        self._consumer = consumer
        self._unread: list[tuple[int, bool]] = []
        self._queue: deque[tuple[Message, int, bool]] = deque()
        self._unread_bytes = 0
        self._ungranted_bytes = 0
        self._received_bytes: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        self._before_ack: list[tuple[Message, int, bool]] = []
        self._reader: asyncio.Future[None] | None = None

    def limit_output(
        self, max_bytes: int | None, on_excess: Callable[[ExecutionStream, str], None]
    ) -> None:
        """Call `on_excess`, with the reason, once when more than `max_bytes` was written."""
        self._limit, self._on_excess = max_bytes, on_excess

    @property
    def label(self) -> str:
        """The name of the execution in a log."""
        return f"{self.task_name}[{self.execution_id}]" if self.task_name else self.execution_id

    @property
    def is_running(self) -> bool:
        """Whether the code of the execution has started; it may also wait for others."""
        return self.started.done()

    def mark_started(self) -> None:
        if not self.started.done():
            self.started.set_result(None)

    @property
    def buffered_messages(self) -> int:
        return len(self._queue)

    @property
    def buffered_bytes(self) -> int:
        return sum(cost for _, cost, _ in self._queue)

    @property
    def raw_is_full(self) -> bool:
        return self.raw_waiting >= self._window

    def allow_cancel_credit(self) -> int:
        """Accept output for credit that is granted with a cancel; the credit, to be sent."""
        self._max_unread += CANCEL_CREDIT
        return CANCEL_CREDIT

    def push(self, message: Message) -> None:
        """Queue a message of the child; BadFrame if the child ignores its credit."""
        if isinstance(message, Ack):
            if self.acked:
                raise BadFrame(f"execution {self.execution_id} was acknowledged twice")
            self.acked = True
            if not message.queued:
                self.mark_started()
            self._put(message, 0, False)
            self._put_deferred()
            return
        cost = message_cost(message)
        self._unread_bytes += cost
        if self._unread_bytes > self._max_unread:
            raise BadFrame(f"execution {self.execution_id} sent more than it had credit for")
        if isinstance(message, Output):
            self._count_output(message.stream, cost - OVERHEAD)
        self._put(message, cost, False)

    def push_raw(self, message: Output, size: int) -> None:
        """Queue bytes read from a descriptor; the reader pauses while too many wait."""
        self._count_output(message.stream, utf8_size(message.data))
        self.raw_waiting += size
        self._put(message, size, True)

    def _count_output(self, stream: Stream, size: int) -> None:
        self._received_bytes[stream] += size
        if self._limit is None or self._on_excess is None:
            return
        limit, written = self._limit, sum(self._received_bytes.values())
        if written > limit:
            self._limit = None
            self._on_excess(self, f"output limit of {limit} bytes: {written} were written")

    def name_after_stop(self, terminal: Terminal) -> None:
        """Make a cancel in the child a timeout or a limit, if that is why it was cancelled."""
        stop = self.stop
        if (
            stop is not None
            and stop.kind in ERROR_TYPES
            and isinstance(terminal, Error)
            and terminal.kind == ErrorKind.CANCELLED
        ):
            terminal.kind, terminal.type = stop.kind, ERROR_TYPES[stop.kind]
            terminal.message, terminal.stack = stop.message, stop.stack

    def finish(self, terminal: Terminal) -> None:
        """Queue the last message. The first one wins; later ones are ignored."""
        if self.terminal is not None:
            return
        self.terminal = terminal
        self._put_deferred()
        # Bytes from descriptors are counted by the parent only, and a killed child counts nothing.
        terminal.stdout_bytes = self._received_bytes["stdout"]
        terminal.stderr_bytes = self._received_bytes["stderr"]
        self._put(terminal, 0, False)
        self.ended.set_result(terminal)

    def abandon(self) -> None:
        """Drop and credit queued and future messages, for a consumer that has stopped reading."""
        self.abandoned = True
        while self._queue:
            self._account(*self._queue.popleft()[1:])

    def resume_output(self) -> None:
        """Credit what the consumer had no room for; it has room again."""
        unread, self._unread = self._unread, []
        for entry in unread:
            self._account(*entry)

    async def next(self) -> Message:
        """The next message, in order; waits for one."""
        while not self._queue:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        message, cost, raw = self._queue.popleft()
        if cost:
            self._account(cost, raw)
        return message

    @property
    def is_waited_for(self) -> bool:
        """Whether the consumer is waiting for a message right now."""
        return self._reader is not None

    def _put_deferred(self) -> None:
        deferred, self._before_ack = self._before_ack, []
        for entry in deferred:
            self._put(*entry)

    def _put(self, message: Message, cost: int, raw: bool) -> None:
        """Hand on a message, behind the Ack: raw bytes, and bulk, may arrive before it."""
        if not self.acked and self.terminal is None:
            self._before_ack.append((message, cost, raw))
        elif self.abandoned or self.ended.done():
            self._account(cost, raw)
        elif self._consumer is not None:
            has_room = self._consumer(message) is not False
            if cost and has_room:
                self._account(cost, raw)
            elif cost:
                self._unread.append((cost, raw))
        else:
            self._queue.append((message, cost, raw))
            if self._reader is not None and not self._reader.done():
                self._reader.set_result(None)

    def _account(self, cost: int, raw: bool) -> None:
        if raw:
            was_full = self.raw_is_full
            self.raw_waiting -= cost
            if was_full and not self.raw_is_full:
                self._channel.resume_raw()
            return
        self._unread_bytes -= cost
        self._ungranted_bytes += cost
        if self._ungranted_bytes * 4 >= self._window and self.terminal is None:
            credit = Credit(execution_id=self.execution_id, bytes=self._ungranted_bytes)
            self._ungranted_bytes = 0
            self._channel.send_control(credit)


class Streams(dict[str, ExecutionStream]):
    """The executions of one child that have not ended, by id."""

    def __init__(self, settings: OutputSettings, channel: Channel) -> None:
        self._settings = settings
        self._channel = channel
        self._seq = itertools.count(1)

    def open(
        self, execution_id: str, consumer: Callable[[Message], object] | None = None
    ) -> ExecutionStream:
        """Register an execution before it is sent, so that none of its messages can be missed."""
        self[execution_id] = stream = ExecutionStream(
            execution_id, next(self._seq), self._settings, self._channel, consumer
        )
        return stream

    @property
    def raw_owner(self) -> ExecutionStream | None:
        """The execution that descriptor bytes belong to: the only one that runs; else None.

        The bytes may arrive before the message that their execution has started. So if none is
        known to run, they belong to the only execution that was not acknowledged yet.
        """
        running = [stream for stream in self.values() if stream.is_running]
        candidates = running or [stream for stream in self.values() if not stream.acked]
        return candidates[0] if len(candidates) == 1 else None
