"""Frames: a big-endian 32-bit length and so many bytes of body."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from capsule_tasks.errors import BadFrame

HEADER = 4
_read_size = struct.Struct(">I").unpack_from


class FrameDecoder:
    """Turns bytes as they arrive into whole frame bodies; linear in the bytes.

    A length of zero or over the ceiling raises BadFrame at once, before the body is waited for.
    After that the decoder is spent: nothing behind a bad length can be trusted.
    """

    def __init__(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._pending = bytearray()
        self._needed = HEADER
        self._spent = False

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that has not arrived whole."""
        return len(self._pending)

    def spend(self) -> None:
        """Refuse whatever is fed from now on: a body was not what it should be."""
        self._spent = True

    def feed(self, data: bytes) -> Iterator[memoryview]:
        """The bodies completed by `data`; each is valid until the next is asked for."""
        if self._spent:
            raise BadFrame("the transport already carried a bad frame")
        source: bytes | bytearray = data
        if self._pending:
            self._pending += data
            if len(self._pending) < self._needed:
                return
            source = self._pending
        view = memoryview(source)
        position, end = 0, len(view)
        while end - position >= HEADER:
            size = self._size(view, position)
            if end - position < HEADER + size:
                break
            position += HEADER
            yield view[position : position + size]
            position += size
        if position < end or self._pending:
            self._keep(view[position:])

    def _size(self, view: memoryview, position: int) -> int:
        size: int = _read_size(view, position)[0]
        if 0 < size <= self._ceiling:
            return size
        self.spend()
        raise BadFrame(f"a frame claims {size} bytes; allowed are 1 to {self._ceiling}")

    def _keep(self, rest: memoryview) -> None:
        self._pending = bytearray(rest)
        whole = HEADER
        if len(rest) >= HEADER:
            whole += int.from_bytes(rest[:HEADER], "big")
        self._needed = whole
