"""From any thread to the hub thread: calls in order, one wake-up for as many as there are."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from capsule_tasks.system.portable import IS_LINUX

log = logging.getLogger("capsule_tasks.taskpool")

Call = Callable[[], object]


class Bridge:
    """Calls that are waiting for the hub thread, and a descriptor that is readable when some are.

    `put` may be called from any thread. The calls are made by `drain`, which the hub calls when
    the descriptor is readable; without a hub a thread does (`serve_alone`).
    """

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()
        self._rung = False
        self._reader, self._writer = _wake_up_pair()
        self._alone: threading.Thread | None = None
        self._closing = False

    def put(self, call: Call) -> None:
        self._calls.append(call)
        self.flush()

    def put_lazily(self, call: Call) -> None:
        """The same, once somebody calls `flush` or `put`."""
        self._calls.append(call)

    def flush(self) -> None:
        """Wake the hub thread if calls are waiting."""
        if self._calls and not self._rung:
            self._rung = True
            self._ring()

    def register(self, hub: Any) -> None:
        """Have the hub drain; again after each reconnect, when it has forgotten."""
        hub.add_reader(self._reader, self.drain)

    def unregister(self, hub: Any) -> None:
        hub.remove_reader(self._reader)

    def drain(self) -> None:
        """Make every call that is waiting. MemoryError and exits of the worker pass through."""
        _empty(self._reader)
        self._rung = False  # before looking: what is put from now on rings again
        calls = self._calls
        while calls:
            call = calls.popleft()
            try:
                call()
            except Exception:
                log.exception("a callback of the pool failed: %r", call)
            except BaseException:
                if calls:  # an exit of the worker: the rest is for whoever drains next
                    self._ring()
                raise

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until there is something to drain, or the time is up."""
        select.select([self._reader], [], [], timeout_s)

    @property
    def is_served(self) -> bool:
        """Whether a thread of its own drains it."""
        return self._alone is not None

    def serve_alone(self) -> None:
        """Drain on a thread of its own: this worker has no hub."""
        if self._alone is None:
            self._alone = threading.Thread(
                target=self._serve, name="capsule-callbacks", daemon=True
            )
            self._alone.start()

    def close(self) -> None:
        """Release the descriptors; what was put and not drained is dropped."""
        if self._closing:
            return
        self._closing = True
        if self._alone is not None and self._alone is not threading.current_thread():
            self._ring()
            self._alone.join()
        for descriptor in {self._reader, self._writer}:
            os.close(descriptor)

    def _serve(self) -> None:
        while not self._closing:
            select.select([self._reader], [], [])
            self.drain()

    def _ring(self) -> None:
        try:
            os.write(self._writer, _ONE)
        except BlockingIOError:
            pass  # so many wake-ups are waiting already that one more makes no difference
        except OSError:
            if not self._closing:
                raise


_ONE = (1).to_bytes(8, "little")


def _wake_up_pair() -> tuple[int, int]:
    """An eventfd for both ends, or a socket pair where the system has none."""
    if IS_LINUX:
        descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return descriptor, descriptor
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    return reader.detach(), writer.detach()


def _empty(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # nothing is there, or the bridge was closed
        os.read(descriptor, 4096)
