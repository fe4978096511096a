"""How much output may wait for Redis: of one execution, of all, and how fast it may come."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from capsule_tasks.protocol.flow import message_cost, utf8_size
from capsule_tasks.protocol.messages import Output, RunEvent
from capsule_tasks.settings import PublishSettings

if TYPE_CHECKING:
    from capsule_tasks.executions.publishing.stream_writer import StreamWriter


class OutputBudget:
    """Tells whether an execution may write more, and resumes its output when it may."""

    def __init__(self, settings: PublishSettings, *, may_drop: bool) -> None:
        self.waiting_bytes = 0
        """Bytes of all executions that wait for Redis."""
        self.may_drop = may_drop
        """Whether output is dropped if there is no room; otherwise the execution waits."""
        self._window_bytes = settings.window_bytes
        self._total_bytes = settings.total_bytes
        self._rate = settings.rate_bytes_per_second
        self._paused: set[StreamWriter] = set()
        self._slowed: set[StreamWriter] = set()
        """Writers to descriptors: they are read again at the rate, whether Redis answers or not."""
        self._tokens = float(self._rate)
        """Below zero by at most a second's worth, so that others do not wait for a whole flood."""
        self._tokens_at = 0.0
        self._refill: asyncio.TimerHandle | None = None

    def has_room(self, writer: StreamWriter, output: Output | RunEvent) -> bool:
        """Whether an execution may write more: below the rate of all, and with room in its window.

        Where output may be dropped, writes to a descriptor wait for the rate only.
        """
        self._refresh()
        self._tokens = max(-self._rate, self._tokens - size_of(output))
        is_raw = isinstance(output, Output) and output.raw
        is_lossy = is_raw and self.may_drop  # its buffer may drop it, and it has no credit
        if self._tokens < 0:
            self._await_refill()
        elif is_lossy or not self._is_full(writer):
            return True
        (self._slowed if is_lossy else self._paused).add(writer)
        return False

    def resume_output(self, writer: StreamWriter) -> None:
        """Output of the writer was stored: resume those that waited for room."""
        if not self._paused or self._refill is not None:
            return
        has_space = self.waiting_bytes <= self._total_bytes // 2
        for one in list(self._paused) if has_space else [writer]:
            if one in self._paused and _waiting(one) <= self._window_bytes // 2:
                self._paused.discard(one)
                one.execution.resume_output()

    def _is_full(self, writer: StreamWriter) -> bool:
        return _waiting(writer) > self._window_bytes or self.waiting_bytes > self._total_bytes

    def _refresh(self) -> None:
        now = asyncio.get_running_loop().time()
        self._tokens = min(self._rate / 10, self._tokens + (now - self._tokens_at) * self._rate)
        self._tokens_at = now

    def _await_refill(self) -> None:
        if self._refill is None:
            wait_s = -self._tokens / self._rate + 0.001
            self._refill = asyncio.get_running_loop().call_later(wait_s, self._on_refill)

    def _on_refill(self) -> None:
        self._refill = None
        self._refresh()
        if self._tokens < 0:  # more has come since
            self._await_refill()
            return
        slowed, self._slowed = self._slowed, set()
        for writer in slowed:
            writer.execution.resume_output()
        for writer in list(self._paused):
            self.resume_output(writer)


def size_of(output: Output | RunEvent) -> int:
    """The bytes that count while the output waits: of events of runs, also a fixed part of each."""
    return utf8_size(output.data) if isinstance(output, Output) else message_cost(output)


def _waiting(writer: StreamWriter) -> int:
    """Bytes of one execution that wait for Redis."""
    return writer.buffer.waiting_bytes if writer.buffer is not None else 0
