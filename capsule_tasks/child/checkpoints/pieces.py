"""The data of a checkpoint as pieces: written while it is made, read where it is needed.

Neither side has the data as one block: a namespace of 100 MB costs as much memory again where it is
restored, and almost nothing where it is saved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from pickle import PickleBuffer


class TooLarge(Exception):
    """A checkpoint has more bytes than the caller allows."""


class PieceWriter:
    """A file for a pickler, which sends full pieces on at once."""

    def __init__(
        self, send: Callable[[int, memoryview], None], piece_bytes: int, max_bytes: int
    ) -> None:
        self._send = send
        self._piece_bytes = piece_bytes
        self.max_bytes = max_bytes
        self._buffer = bytearray()
        self.size = 0
        """Bytes that were written so far."""

    def write(self, data: bytes | PickleBuffer) -> int:
        """Take bytes, or the memory of an array, which is not copied."""
        view = data.raw() if isinstance(data, PickleBuffer) else memoryview(data)
        size, at = len(view), 0
        if self.size + size > self.max_bytes:
            raise TooLarge
        while at < size:
            if not self._buffer and size - at >= self._piece_bytes:  # not copied
                self._send(self.size + at, view[at : at + self._piece_bytes])
                at += self._piece_bytes
                continue
            part = view[at : at + self._piece_bytes - len(self._buffer)]
            self._buffer += part
            at += len(part)
            if len(self._buffer) == self._piece_bytes:
                self._send_buffer(self.size + at)
        self.size += size
        return size

    def flush(self) -> None:
        """Send what is left, which is less than a piece."""
        if self._buffer:
            self._send_buffer(self.size)

    def _send_buffer(self, end: int) -> None:
        buffer, self._buffer = self._buffer, bytearray()
        self._send(end - len(buffer), memoryview(buffer))


class PieceReader:
    """A file for an unpickler. It takes the pieces out of their list, and frees them when told."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = [piece for piece in pieces if piece]
        pieces.clear()
        self._freed = 0
        self._ends = list(accumulate(map(len, self._pieces)))
        self.size = self._ends[-1] if self._ends else 0
        self._count = len(self._pieces)
        self.seek(0)

    def seek_to(self, data: bytes) -> None:
        """Continue with these bytes, which are no part of the pieces."""
        self._pieces[self._count :] = [data]
        self._number, self._at = self._count, 0

    def free(self, position: int) -> None:
        """Free the pieces before this position, which is not sought again."""
        whole = bisect_right(self._ends, position)
        self._pieces[self._freed : whole] = [b""] * (whole - self._freed)
        self._freed = whole

    def seek(self, position: int) -> None:
        """Continue there."""
        self._number = bisect_right(self._ends, position)
        begin = self._ends[self._number - 1] if self._number else 0
        self._at = position - begin

    def read(self, size: int) -> bytes:
        found = self._next(size)
        if len(found) == size or not found:
            return found
        parts = [found]
        missing = size - len(found)
        while missing and (part := self._next(missing)):
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def readinto(self, buffer: bytearray | memoryview) -> int:
        view = memoryview(buffer)
        filled = 0
        while filled < len(view) and (part := self._next(len(view) - filled)):
            view[filled : filled + len(part)] = part
            filled += len(part)
        return filled

    def readline(self) -> bytes:
        """Bytes up to the next line feed; only the oldest formats of pickles have lines."""
        line = b""
        while not line.endswith(b"\n") and (byte := self._next(1)):
            line += byte
        return line

    def _next(self, size: int) -> bytes:
        """At most so many bytes, from one piece."""
        if self._number >= len(self._pieces):
            return b""
        piece = self._pieces[self._number]
        found = piece[self._at : self._at + size]
        self._at += len(found)
        if self._at == len(piece):
            self._number, self._at = self._number + 1, 0
        return found
