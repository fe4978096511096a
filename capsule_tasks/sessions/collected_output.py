"""The output that `run` collects: the newest, within a bound, and how much was dropped."""

from __future__ import annotations

from collections import deque

from capsule_tasks.protocol.flow import message_cost, utf8_size
from capsule_tasks.protocol.messages import Gap, Message, Output, Stream


class CollectedOutput:
    """The output of one execution; `max_bytes` includes a constant for each message."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._kept: deque[Output] = deque()
        self._gaps: dict[Stream, Gap] = {}

    def add(self, message: Message) -> None:
        """Keep output, and count the output that the child has dropped."""
        if isinstance(message, Output):
            self._kept.append(message)
            self._size += message_cost(message)
            while self._size > self._max_bytes:
                dropped = self._kept.popleft()
                self._size -= message_cost(dropped)
                self._count(dropped.stream, utf8_size(dropped.data), 1)
        elif isinstance(message, Gap):
            self._count(message.stream, message.lost_bytes, message.lost_messages)

    def text(self, stream: Stream) -> str:
        return "".join(output.data for output in self._kept if output.stream == stream)

    def gaps(self) -> tuple[Gap, ...]:
        """One for each stream of which output was dropped."""
        return tuple(self._gaps.values())

    def _count(self, stream: Stream, lost_bytes: int, lost_messages: int) -> None:
        gap = self._gaps.setdefault(stream, Gap(stream=stream, lost_bytes=0, lost_messages=0))
        gap.lost_bytes += lost_bytes
        gap.lost_messages += lost_messages
