"""Sending frames to the parent, on the control and on the bulk channel, at once or soon."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import msgspec

from capsule_tasks.protocol.codec import encode_frame
from capsule_tasks.protocol.messages import Message

EXIT_CHANNEL_CLOSED = 74
"""EX_IOERR: the connection to the parent was closed from within."""


class OwnThread(threading.Thread):
    """A thread of the session itself: stacks of the user's code leave it out."""


class OutputPump(msgspec.Struct, eq=False):
    """Makes the calls that flush output, every few milliseconds; sleeps while there are none.

    These calls send what no writer has sent in time. Each returns whether it is to be made again.
    """

    interval_s: float
    added: SimpleQueue[Callable[[], bool]] = msgspec.field(default_factory=SimpleQueue)

    def start(self) -> None:
        OwnThread(target=self._run, name="capsule-pump", daemon=True).start()

    def add(self, flush: Callable[[], bool]) -> None:
        """Call `flush` now, and again for as long as it asks for that."""
        self.added.put(flush)

    def _run(self) -> None:
        flushes: set[Callable[[], bool]] = set()
        while True:
            if not flushes:
                flushes.add(self.added.get())
            while not self.added.empty():
                flushes.add(self.added.get())
            flushes = {flush for flush in flushes if flush()}
            if flushes:
                time.sleep(self.interval_s)


class Outbox:
    """Sends whole frames from any thread.

    The end of the parent is not an error here: the control thread sees it, too, and ends the
    process; frames sent until then are dropped. A descriptor that user code has closed ends the
    process at once: otherwise the parent would notice only by a missing heartbeat.
    """

    def __init__(
        self, control: socket.socket, bulk: socket.socket, ceiling: int, flush_interval_s: float
    ) -> None:
        self.pump = OutputPump(flush_interval_s)
        self.ceiling = ceiling
        self.channels = control, bulk
        """The sockets, which the control thread reads."""
        self._control_lock = threading.Lock()
        self._bulk_lock = threading.Lock()
        self._deferred: bytearray | None = None
        self._pid = os.getpid()

    def control(self, message: Message) -> None:
        """Send on the channel that nothing large ever blocks."""
        frame = encode_frame(message, self.ceiling)
        with self._control_lock:
            self._send(self.channels[0], frame)

    def bulk(self, message: Message, *, deferred_until: float | None = None) -> None:
        """Send in order with output; FrameTooLarge leaves the channel as it was.

        A deferred message is sent with the next one, or after its time by `flush_deferred_soon`.
        """
        frame = encode_frame(message, self.ceiling)
        with self._bulk_lock:
            if self._deferred is not None:
                frame, self._deferred = self._deferred + frame, None
            if deferred_until is not None:
                self._deferred = frame
                # Checked after the frame was stored. The control thread looks for one
                # once, when the time has come: if it looked too early, this check sends the frame.
                if time.monotonic() < deferred_until:
                    return
                self._deferred = None
            self._send(self.channels[1], frame)

    def flush_deferred_soon(self) -> None:
        """Have the pump, which may block, send a message that still waits for the next one."""
        if self._deferred is not None:
            self.pump.add(self._flush_deferred)

    def _flush_deferred(self) -> bool:
        with self._bulk_lock:
            frame, self._deferred = self._deferred, None
            if frame is not None:
                self._send(self.channels[1], frame)
        return False

    def _send(self, sock: socket.socket, frame: bytearray) -> None:
        try:
            sock.sendall(frame)
        except OSError as fault:
            if fault.errno in (errno.EBADF, errno.ENOTSOCK) and os.getpid() == self._pid:
                os._exit(EXIT_CHANNEL_CLOSED)
