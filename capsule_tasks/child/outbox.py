"""Sending frames to the parent, on the control and on the bulk channel."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time

from capsule_tasks.protocol.codec import encode_frame
from capsule_tasks.protocol.messages import Message

EXIT_CHANNEL_CLOSED = 74
"""EX_IOERR: the connection to the parent was closed from within."""


class Outbox:
    """Sends whole frames from any thread.

    The end of the parent is not an error here: the control thread sees it, too, and ends the
    process; frames sent until then are dropped. A descriptor that user code has closed ends the
    process at once: otherwise the parent would notice only by a missing heartbeat.
    """

    def __init__(self, control: socket.socket, bulk: socket.socket, ceiling: int) -> None:
        self.ceiling = ceiling
        self._control = control
        self._bulk = bulk
        self._control_lock = threading.Lock()
        self._bulk_lock = threading.Lock()
        self._deferred: bytearray | None = None
        self._pid = os.getpid()

    def control(self, message: Message) -> None:
        """Send on the channel that nothing large ever blocks."""
        frame = encode_frame(message, self.ceiling)
        with self._control_lock:
            self._send(self._control, frame)

    def bulk(self, message: Message, *, deferred_until: float | None = None) -> None:
        """Send in order with output; FrameTooLarge leaves the channel as it was.

        A deferred message is sent with the next one, or after its time by `flush_from_pump`.
        """
        frame = encode_frame(message, self.ceiling)
        with self._bulk_lock:
            if self._deferred is not None:
                frame, self._deferred = self._deferred + frame, None
            if deferred_until is not None:
                self._deferred = frame
                # Checked after the frame was stored. The control thread looks at `has_deferred`
                # once, when the time has come: if it looked too early, this check sends the frame.
                if time.monotonic() < deferred_until:
                    return
                self._deferred = None
            self._send(self._bulk, frame)

    @property
    def has_deferred(self) -> bool:
        """Whether a message waits to be sent with the next one."""
        return self._deferred is not None

    def flush_from_pump(self) -> bool:
        """Send the deferred message. Unlike the control thread, the pump may block."""
        with self._bulk_lock:
            frame, self._deferred = self._deferred, None
            if frame is not None:
                self._send(self._bulk, frame)
        return False

    def _send(self, sock: socket.socket, frame: bytearray) -> None:
        try:
            sock.sendall(frame)
        except OSError as fault:
            if fault.errno in (errno.EBADF, errno.ENOTSOCK) and os.getpid() == self._pid:
                os._exit(EXIT_CHANNEL_CLOSED)
