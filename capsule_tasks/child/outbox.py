"""The child's two ways to speak: control, and bulk."""

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

    A parent that is gone is not an error here: the control thread sees it too and ends the
    process, so whatever is still said on the way there is dropped. Descriptors that user code
    closed under our feet are the end: nobody else would notice before the next heartbeat.
    """

    def __init__(self, control: socket.socket, bulk: socket.socket, ceiling: int) -> None:
        self.ceiling = ceiling
        self._control = control
        self._bulk = bulk
        self._control_lock = threading.Lock()
        self._bulk_lock = threading.Lock()
        self._held: bytearray | None = None
        self._pid = os.getpid()

    def control(self, message: Message) -> None:
        """Send on the channel that nothing large ever blocks."""
        frame = encode_frame(message, self.ceiling)
        with self._control_lock:
            self._send(self._control, frame)

    def bulk(self, message: Message) -> None:
        """Send in order with output; FrameTooLarge leaves the channel as it was."""
        frame = encode_frame(message, self.ceiling)
        with self._bulk_lock:
            if self._held is not None:
                frame, self._held = self._held + frame, None
            self._send(self._bulk, frame)

    def bulk_by(self, message: Message, deadline: float) -> None:
        """Send with the next bulk message, or by `flush_from_pump` after the deadline."""
        frame = encode_frame(message, self.ceiling)
        with self._bulk_lock:
            if self._held is not None:
                frame = self._held + frame
            self._held = frame
            if time.monotonic() >= deadline:  # looked at last: whoever calls then saw it is held
                self._held = None
                self._send(self._bulk, frame)

    @property
    def is_holding(self) -> bool:
        """Whether a message waits for the next one."""
        return self._held is not None

    def flush_from_pump(self) -> bool:
        """Send what is held: on the pump, which may wait for the parent to read."""
        with self._bulk_lock:
            frame, self._held = self._held, None
            if frame is not None:
                self._send(self._bulk, frame)
        return False

    def _send(self, sock: socket.socket, frame: bytearray) -> None:
        try:
            sock.sendall(frame)
        except OSError as fault:
            if fault.errno in (errno.EBADF, errno.ENOTSOCK) and os.getpid() == self._pid:
                os._exit(EXIT_CHANNEL_CLOSED)
