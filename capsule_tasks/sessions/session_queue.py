"""The queue of messages that belong to no execution."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from capsule_tasks.protocol.codec import encode_frame
from capsule_tasks.protocol.flow import message_cost
from capsule_tasks.protocol.messages import Gap, Output, Progress

_NO_CEILING = 2**32 - 1


class SessionQueue:
    """Bounded in number and in bytes: drops the oldest messages, but never the newest."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: deque[tuple[Any, int]] = deque()
        self._bytes = 0
        self.dropped = 0

    def put(self, message: Any) -> None:
        size = _size(message)
        self._messages.append((message, size))
        self._bytes += size
        while len(self._messages) > 1 and (
            len(self._messages) > self._max_messages or self._bytes > self._max_bytes
        ):
            self.pop()
            self.dropped += 1

    def pop(self) -> Any:
        """Remove and return the oldest message."""
        message, size = self._messages.popleft()
        self._bytes -= size
        return message

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[Any]:
        return (message for message, _ in self._messages)


def _size(message: Any) -> int:
    if isinstance(message, Output | Gap | Progress):
        return message_cost(message)
    return len(encode_frame(message, _NO_CEILING))  # a reply without a request, which is rare
