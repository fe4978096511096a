"""Frames: a body behind its length, a big-endian 32-bit number."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from capsule_tasks.errors import BadFrame

HEADER = 4
_read_size = struct.Struct(">I").unpack_from


class FrameDecoder:
    """Turns bytes as they arrive into whole frame bodies; linear in the bytes.

    A length of zero or over the ceiling raises BadFrame before the body is waited for. After that
    the decoder refuses all bytes: nothing behind a bad length can be trusted.
    """

    def __init__(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._pending = bytearray()
        self._needed = HEADER
        self._is_broken = False

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame whose rest has not arrived."""
        return len(self._pending)

    def refuse_all(self) -> None:
        """Refuse all bytes from now on, after a bad frame."""
        self._is_broken = True

    def feed(self, data: bytes) -> Iterator[memoryview]:
        """The bodies completed by `data`; each is valid until the next one is yielded."""
        if self._is_broken:
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
            self._store(view[position:])

    def _size(self, view: memoryview, position: int) -> int:
        size: int = _read_size(view, position)[0]
        if 0 < size <= self._ceiling:
            return size
        self.refuse_all()
        raise BadFrame(f"a frame claims {size} bytes; allowed are 1 to {self._ceiling}")

    def _store(self, rest: memoryview) -> None:
        self._pending = bytearray(rest)
        whole = HEADER
        if len(rest) >= HEADER:
            whole += int.from_bytes(rest[:HEADER], "big")
        self._needed = whole
