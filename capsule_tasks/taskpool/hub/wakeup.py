"""A descriptor that one thread waits on and any thread makes readable."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

from capsule_tasks.system.portable import IS_LINUX

_ONE = (1).to_bytes(8, "little")


class WakeupFd:
    """Readable from the first `ring` until `clear`."""

    def __init__(self) -> None:
        self._reader, self._writer = _ends()
        self._closed = False
        self._closing = threading.Lock()

    def fileno(self) -> int:
        return self._reader

    def ring(self) -> None:
        if self._closed:
            return  # its number may be another descriptor's by now
        try:
            os.write(self._writer, _ONE)
        except BlockingIOError:
            pass  # so many wake-ups are waiting already that one more makes no difference
        except OSError:
            if not self._closed:
                raise

    def clear(self) -> None:
        if self._closed:
            return
        with contextlib.suppress(OSError):  # there was no ring, or it is closed
            os.read(self._reader, 4096)

    def close(self) -> None:
        """Release the descriptors; idempotent."""
        with self._closing:
            if not self._closed:
                self._closed = True
                for descriptor in {self._reader, self._writer}:
                    os.close(descriptor)


def _ends() -> tuple[int, int]:
    """An eventfd for both ends, or a socket pair where the system has none."""
    if IS_LINUX:
        descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return descriptor, descriptor
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    return reader.detach(), writer.detach()
