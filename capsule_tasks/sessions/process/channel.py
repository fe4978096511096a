"""The control and bulk sockets of a session, read under weights, written with priority.

Control frames have a socket of their own, so they never wait behind bulk in the kernel. Nor do they
wait here: every iteration handles control first, and while both kinds wait, each gets its share.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from capsule_tasks.errors import BadFrame, SessionLost
from capsule_tasks.protocol.codec import MessageDecoder, encode_frame
from capsule_tasks.protocol.messages import Message, ToParent
from capsule_tasks.settings import RoutingSettings

_WRITE_BUFFER = 1024 * 1024
_DRAIN_BYTES = 256 * 1024
_HALF_FRAME_S = 1.0
"""A child writes a frame with one call; only a starved child leaves one half written so long."""
_MAX_UNREAD_CONTROL = 16 * 1024 * 1024
"""More than ever waits for an honest child, even for one that is stopped."""

Deliver = Callable[[Any], None]


class _Writer:
    """Writes frames to one socket, in order, without blocking."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self._loop = loop
        self._sock = sock
        self._waiting: deque[memoryview] = deque()
        self._drained: asyncio.Future[None] | None = None
        self.buffered = 0

    def write(self, frame: bytearray) -> None:
        if not self._waiting:
            sent = self._send(frame)
            if sent is None or sent == len(frame):
                return
            self._loop.add_writer(self._sock, self._flush)
            self._queue(memoryview(frame)[sent:])
        else:
            self._queue(memoryview(frame))

    async def drained(self) -> None:
        """Wait until the buffer is small again."""
        while self.buffered > _WRITE_BUFFER:
            if self._drained is None or self._drained.done():
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)

    def close(self) -> None:
        if self._waiting:
            self._loop.remove_writer(self._sock)
        self._waiting.clear()
        self.buffered = 0
        self._wake()

    def _queue(self, rest: memoryview) -> None:
        self._waiting.append(rest)
        self.buffered += len(rest)

    def _send(self, data: bytearray | memoryview) -> int | None:
        """How many bytes were taken; None if the child has closed its end."""
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return None  # the reader, or the exit, shows what became of the child

    def _flush(self) -> None:
        while self._waiting:
            head = self._waiting[0]
            sent = self._send(head)
            if sent is None:  # drop all frames: there may be a hundred thousand
                self.close()
                return
            self.buffered -= sent
            if sent < len(head):
                self._waiting[0] = head[sent:]
                return
            self._waiting.popleft()
        self._loop.remove_writer(self._sock)
        self._wake()

    def _wake(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)


class _Reader:
    """Reads messages from one socket and queues them. `weight` is its share of an iteration."""

    def __init__(self, sock: socket.socket, ceiling: int, weight: int) -> None:
        self.sock = sock
        self.weight = weight
        self.handled = 0
        self.queue: deque[Any] = deque()
        self.at_end = False
        self.received = 0
        self._decoder: MessageDecoder[Any] = MessageDecoder(ToParent, ceiling)

    @property
    def half_frame_bytes(self) -> int:
        """Bytes of a frame whose rest has not arrived."""
        return self._decoder.pending_bytes

    def pull(self, size: int) -> bool:
        """Read once and decode; False at the end. Messages before a BadFrame are queued."""
        try:
            data = self.sock.recv(size)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        self.received += len(data)
        self.queue.extend(self._decoder.feed(data))
        return bool(data)

    def pull_all(self) -> None:
        """Read and decode all that a dead child sent; half a frame at the end is dropped."""
        with contextlib.suppress(OSError, BadFrame):
            while data := self.sock.recv(_DRAIN_BYTES):
                self.queue.extend(self._decoder.feed(data))


class Channel:
    """The only reader of a session's sockets: `deliver` gets every message, `lost` the fault."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        control: socket.socket,
        bulk: socket.socket,
        routing: RoutingSettings,
        ceiling: int,
        deliver: Deliver,
        lost: Callable[[str], None],
        is_stopped: Callable[[], bool],
        *,
        bulk_alone: bool = False,
    ) -> None:
        """`bulk_alone` says that no bulk message has to come after a control message."""
        self._loop = loop
        self._ceiling = ceiling
        self._routing = routing
        self._deliver = deliver
        self._lost = lost
        self._is_stopped = is_stopped
        self._bulk_alone = bulk_alone
        self._control = _Reader(control, ceiling, routing.control_weight)
        self._bulk = _Reader(bulk, ceiling, routing.bulk_weight)
        self._control_out = _Writer(loop, control)
        self._bulk_out = _Writer(loop, bulk)
        self._closed = False
        self._dispatch_planned = False
        self.priority_reads = 0
        """Iterations in which control was handled before bulk that waited."""
        loop.add_reader(control, self._on_control)
        loop.add_reader(bulk, self._on_bulk)

    @property
    def handled(self) -> tuple[int, int]:
        """How many control and bulk messages were handled."""
        return self._control.handled, self._bulk.handled

    def send_control(self, message: Message) -> None:
        """Send at once; control frames are small and never wait for bulk."""
        if self._closed:
            return
        self._control_out.write(encode_frame(message, self._ceiling))
        if self._control_out.buffered > _MAX_UNREAD_CONTROL and not self._control.at_end:
            self._end(self._control, "the child does not read its control messages")

    def post_bulk(self, message: Message) -> None:
        """Send in order, for a caller that waits for a reply and so does not send more."""
        if self._closed:
            raise SessionLost("the session's child has exited")
        self._bulk_out.write(encode_frame(message, self._ceiling))

    async def send_bulk(self, message: Message) -> None:
        """Send in order; waits while much is buffered. FrameTooLarge changes nothing."""
        self.post_bulk(message)
        if self._bulk_out.buffered > _WRITE_BUFFER:
            await self._bulk_out.drained()

    def drain(self) -> None:
        """Handle everything that has arrived, for a child that is dead."""
        if self._closed:
            return
        self._control.pull_all()
        self._bulk.pull_all()
        while self._control.queue or self._bulk.queue:
            self._dispatch_share()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for reader in (self._control, self._bulk):
            self._loop.remove_reader(reader.sock)
        self._control_out.close()
        self._bulk_out.close()

    def _on_control(self) -> None:
        self._pull(self._control)
        self._dispatch()

    def _on_bulk(self) -> None:
        # Control first: the Ack of an execution must not be seen after its output.
        if not self._bulk_alone:
            self._pull(self._control)
        self._pull(self._bulk)
        self._dispatch()

    def _pull(self, reader: _Reader) -> None:
        if self._closed or reader.at_end:
            return
        try:
            open_still = reader.pull(self._routing.read_bytes)
        except BadFrame as fault:
            self._end(reader, f"the child broke the protocol: {fault}")
            return
        if not open_still:
            self._end(reader, "the child closed its end of the connection")
        elif reader.half_frame_bytes:
            self._loop.call_later(_HALF_FRAME_S, self._check_half_frame, reader, reader.received)

    def _check_half_frame(self, reader: _Reader, received: int) -> None:
        """Fail on half a frame with nothing behind it: garbage that looks like the start of one."""
        if reader.received != received or not reader.half_frame_bytes or self._closed:
            return
        if self._is_stopped():
            self._loop.call_later(_HALF_FRAME_S, self._check_half_frame, reader, received)
        else:
            self._end(reader, f"the child left a frame unfinished for {_HALF_FRAME_S} s")

    def _end(self, reader: _Reader, reason: str) -> None:
        reader.at_end = True
        self._loop.remove_reader(reader.sock)
        self._loop.call_soon(self._lost, reason)

    def _dispatch(self) -> None:
        """Handle a share; while messages are left, no more is read than is due."""
        self._dispatch_share()
        if (self._bulk.queue or self._control.queue) and not self._dispatch_planned:
            self._dispatch_planned = True
            for reader in (self._control, self._bulk):
                self._loop.remove_reader(reader.sock)
            self._loop.call_soon(self._dispatch_rest)

    def _dispatch_rest(self) -> None:
        self._dispatch_planned = False
        if self._closed:
            return
        if not self._control.queue:
            self._pull(self._control)
        self._dispatch()
        if self._dispatch_planned or self._closed:
            return
        for reader, call in ((self._control, self._on_control), (self._bulk, self._on_bulk)):
            if not reader.at_end:
                self._loop.add_reader(reader.sock, call)

    def _dispatch_share(self) -> None:
        """Handle at most `weight` messages of each kind, control before bulk."""
        if self._control.queue and self._bulk.queue:
            self.priority_reads += 1
        for reader in (self._control, self._bulk):
            queue, handled = reader.queue, 0
            while queue and handled < reader.weight and not self._closed:
                handled += 1
                self._deliver(queue.popleft())
            reader.handled += handled
        if self._closed:
            self._control.queue.clear()
            self._bulk.queue.clear()
