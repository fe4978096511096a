"""The child's two ways to speak: control, and bulk."""

from __future__ import annotations

import contextlib
import socket
import threading

from capsule_tasks.protocol.codec import encode_frame
from capsule_tasks.protocol.messages import Message


class Outbox:
    """Sends whole frames from any thread.

    A parent that is gone is not an error here: the control thread sees it too and ends the
    process, so whatever is still said on the way there is dropped.
    """

    def __init__(self, control: socket.socket, bulk: socket.socket, ceiling: int) -> None:
        self.ceiling = ceiling
        self._control = control
        self._bulk = bulk
        self._control_lock = threading.Lock()
        self._bulk_lock = threading.Lock()

    def control(self, message: Message) -> None:
        """Send on the channel that nothing large ever blocks."""
        frame = encode_frame(message, self.ceiling)
        with self._control_lock, contextlib.suppress(OSError):
            self._control.sendall(frame)

    def bulk(self, message: Message) -> None:
        """Send in order with output; FrameTooLarge leaves the channel as it was."""
        frame = encode_frame(message, self.ceiling)
        with self._bulk_lock, contextlib.suppress(OSError):
            self._bulk.sendall(frame)
