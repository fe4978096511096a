"""The parent's side of one execution: a bounded queue between the router and one consumer."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable

from capsule_tasks.errors import BadFrame
from capsule_tasks.protocol.flow import OVERHEAD, message_cost, utf8_size
from capsule_tasks.protocol.messages import (
    Ack,
    Error,
    ErrorKind,
    Message,
    Output,
    Stream,
    Terminal,
)
from capsule_tasks.settings import OutputSettings

_UNCREDITED_MAX = 1024 * 1024
"""For what a child may send without credit: questions of many threads, and the last messages."""
CANCEL_CREDIT = 256 * 1024
"""Granted with a cancel, so that a paused consumer does not hold up `finally` blocks."""


@dataclasses.dataclass
class Stop:
    """Why the parent is stopping an execution; the first reason stands."""

    kind: ErrorKind
    message: str
    stack: str = ""


class ExecutionStream:
    """What one execution said and its consumer has not read.

    Output is charged when it arrives and credited to the child when it is read, so the queue
    holds a window of it at most. A child that sends more than it has credit for is at fault.
    With a `consumer` there is no queue: it is handed each message as it comes. One that returns
    False has no room for more: what it was given stays charged until `resume_output` is called.
    """

    def __init__(
        self,
        execution_id: str,
        seq: int,
        settings: OutputSettings,
        grant: Callable[[str, int], None],
        resume_raw: Callable[[], None],
        consumer: Callable[[Message], object] | None = None,
    ) -> None:
        self.execution_id = execution_id
        self.task_name = ""
        """Of one that runs a Celery task."""
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
        self._most = 3 * settings.window_bytes + 32 * settings.chunk_bytes + _UNCREDITED_MAX
        self._limit: int | None = None
        self._on_excess: Callable[[ExecutionStream, str], None] | None = None
        self._grant = grant
        self._resume_raw = resume_raw
        self._consumer = consumer
        self._unread: list[tuple[int, bool]] = []
        self._queue: deque[tuple[Message, int, bool]] = deque()
        self._unread_bytes = 0
        self._ungranted_bytes = 0
        self._received_bytes: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        self._early: list[tuple[Message, int, bool]] = []
        self._reader: asyncio.Future[None] | None = None

    def limit_output(
        self, most_bytes: int | None, on_excess: Callable[[ExecutionStream, str], None]
    ) -> None:
        """Call `on_excess`, with the reason, once when more than `most_bytes` was written."""
        self._limit, self._on_excess = most_bytes, on_excess

    @property
    def label(self) -> str:
        """What it is called in a log."""
        return f"{self.task_name}[{self.execution_id}]" if self.task_name else self.execution_id

    @property
    def is_running(self) -> bool:
        """Whether its code has started; an execution may also wait for its turn."""
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

    def allow_more(self, amount: int) -> None:
        """The child was granted credit beyond what was read."""
        self._most += amount

    def push(self, message: Message) -> None:
        """Queue what the child said; BadFrame if it ignores its credit."""
        if isinstance(message, Ack):
            if self.acked:
                raise BadFrame(f"execution {self.execution_id} was acknowledged twice")
            self.acked = True
            if not message.queued:
                self.mark_started()
            self._put(message, 0)
            self._put_early()
            return
        cost = message_cost(message)
        self._unread_bytes += cost
        if self._unread_bytes > self._most:
            raise BadFrame(f"execution {self.execution_id} sent more than it had credit for")
        if isinstance(message, Output):
            self._received_bytes[message.stream] += cost - OVERHEAD
            if self._limit is not None:
                self._check_limit(self._limit)
        if self.acked:
            self._put(message, cost)
        else:  # many control messages were in its way: the Ack still comes first
            self._early.append((message, cost, False))

    def push_raw(self, message: Output, size: int) -> None:
        """Queue bytes read from a descriptor; the reader pauses while too many wait."""
        self._received_bytes[message.stream] += utf8_size(message.data)
        if self._limit is not None:
            self._check_limit(self._limit)
        self.raw_waiting += size
        if self.acked:
            self._put(message, size, raw=True)
        else:  # it came by a shorter way than the Ack
            self._early.append((message, size, True))

    def _check_limit(self, limit: int) -> None:
        written = sum(self._received_bytes.values())
        if written > limit and self._on_excess is not None:
            self._limit = None
            self._on_excess(self, f"output limit of {limit} bytes: {written} were written")

    def finish(self, terminal: Terminal) -> None:
        """Queue the last message. The first one wins; later ones are ignored."""
        if self.terminal is not None:
            return
        self._put_early()
        self.terminal = terminal
        # What came from descriptors is known here only, and a killed child counts nothing.
        terminal.stdout_bytes = self._received_bytes["stdout"]
        terminal.stderr_bytes = self._received_bytes["stderr"]
        self._put(terminal, 0)
        self.ended.set_result(terminal)

    def abandon(self) -> None:
        """Nobody reads any more: what waits and what comes is dropped, and credited."""
        self.abandoned = True
        while self._queue:
            self._account(*self._queue.popleft()[1:])

    def resume_output(self) -> None:
        """The consumer has room again: what it had not read it has read now."""
        unread, self._unread = self._unread, []
        for cost, raw in unread:
            self._account(cost, raw)

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

    def _put(self, message: Message, cost: int, *, raw: bool = False) -> None:
        if self.abandoned or self.ended.done():
            self._account(cost, raw)
            return
        if self._consumer is not None:
            has_room = self._consumer(message) is not False
            if cost and has_room:
                self._account(cost, raw)
            elif cost:
                self._unread.append((cost, raw))
            return
        self._queue.append((message, cost, raw))
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _put_early(self) -> None:
        early, self._early = self._early, []
        for message, cost, raw in early:
            self._put(message, cost, raw=raw)

    def _account(self, cost: int, raw: bool) -> None:
        if raw:
            was_full = self.raw_is_full
            self.raw_waiting -= cost
            if was_full and not self.raw_is_full:
                self._resume_raw()
            return
        self._unread_bytes -= cost
        self._ungranted_bytes += cost
        if self._ungranted_bytes * 4 >= self._window and self.terminal is None:
            self._grant(self.execution_id, self._ungranted_bytes)
            self._ungranted_bytes = 0


def ending(execution_id: str, kind: ErrorKind, type_: str, message: str, stack: str = "") -> Error:
    """A terminal message that the parent writes, because the child cannot."""
    return Error(execution_id=execution_id, kind=kind, type=type_, message=message, stack=stack)
