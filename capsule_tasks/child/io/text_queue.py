"""Text of one sink that waits for credit, and the count of what was dropped from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from capsule_tasks.protocol.flow import OVERHEAD, utf8_size
from capsule_tasks.protocol.messages import Stream

Segment = tuple[str | None, Stream, str]
"""Text of one stream, with the execution that wrote it."""


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
            kept.append((execution_id, stream, rest[:chars]))
            self._count_drop(stream, rest[chars:])
            chars = max(0, chars - len(rest))
        self._segments = kept
        self._until_gap = len(kept)

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
