"""Raw output: bytes that C code and subprocesses write to descriptors 1 and 2."""

from __future__ import annotations

import asyncio
import codecs
import fcntl
import os
import struct
import termios
from collections.abc import Callable

from capsule_tasks.protocol.messages import Stream

_READ_BYTES = 64 * 1024

Deliver = Callable[[Stream, str, int], bool]
"""Called with the stream, its text and the number of bytes; False asks for a pause."""


class RawOutput:
    """Reads one descriptor for as long as the child lives, with pauses."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, descriptor: int, stream: Stream, deliver: Deliver
    ) -> None:
        self._loop = loop
        self._descriptor = descriptor
        self._stream: Stream = stream
        self._deliver = deliver
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._reading = False
        self._at_end = False
        self.resume()

    def resume(self) -> None:
        if not self._reading and not self._at_end:
            self._reading = True
            self._loop.add_reader(self._descriptor, self._on_readable)

    def catch_up(self) -> None:
        """Read the bytes that are in the pipe now, even in a pause."""
        if self._at_end:
            return
        waiting = _bytes_waiting(self._descriptor)
        while waiting > 0 and not self._at_end:
            waiting -= self._read(min(waiting, _READ_BYTES))

    def finish(self) -> None:
        """Read the remaining bytes of a dead child, an incomplete character included."""
        self.catch_up()
        if not self._at_end and (rest := self._decoder.decode(b"", final=True)):
            self._deliver(self._stream, rest, 0)
        self.close()

    def close(self) -> None:
        self._pause()
        self._at_end = True

    def _on_readable(self) -> None:
        self._read(_READ_BYTES)

    def _read(self, size: int) -> int:
        try:
            data = os.read(self._descriptor, size)
        except (BlockingIOError, InterruptedError):
            return 0
        text = self._decoder.decode(data, final=not data)
        if text and not self._deliver(self._stream, text, len(data)):
            self._pause()
        if not data:
            self.close()
        return len(data)

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._descriptor)


def _bytes_waiting(descriptor: int) -> int:
    answer = fcntl.ioctl(descriptor, termios.FIONREAD, b"\0\0\0\0")
    waiting: int = struct.unpack("i", answer)[0]
    return waiting
