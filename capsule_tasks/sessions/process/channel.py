"""All that connects a session with its child: control and bulk sockets, and descriptors 1 and 2.

Control frames have a socket of their own, so they never wait behind bulk in the kernel. Nor do they
wait here: every iteration handles control first, and while both kinds wait, each gets its share.
Raw output is what C code and subprocesses write to descriptors 1 and 2.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import fcntl
import os
import socket
import sys
import termios
from collections import deque
from collections.abc import Callable
from typing import Any

from capsule_tasks.errors import BadFrame, SessionLost
from capsule_tasks.protocol.codec import MessageDecoder, encode_frame
from capsule_tasks.protocol.messages import Message, Stream, ToParent
from capsule_tasks.sessions.process.child_process import ChildProcess
from capsule_tasks.settings import SessionConfig

_WRITE_BUFFER = 1024 * 1024
_DRAIN_BYTES = 256 * 1024
_HALF_FRAME_S = 1.0
"""A child writes a frame with one call; only a starved child leaves one half written so long."""
_MAX_UNREAD_CONTROL = 16 * 1024 * 1024
"""More than ever waits for an honest child, even for one that is stopped."""
_RAW_BYTES = 64 * 1024

RawConsumer = Callable[[Stream, str, int], bool]
"""Called with the stream, its text and the number of bytes; False asks for a pause."""


class _Writer:
    """Writes frames to one socket, in order, without blocking."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self._loop = loop
        self._sock = sock
        self._waiting: deque[memoryview] = deque()
        self._drained = asyncio.Event()
        self.buffered = 0

    def write(self, frame: bytearray) -> None:
        sent = 0 if self._waiting else self._send(frame)
        if sent is None or sent == len(frame):
            return
        if not self._waiting:
            self._loop.add_writer(self._sock, self._flush)
        self._waiting.append(memoryview(frame)[sent:])
        self.buffered += len(frame) - sent

    async def drained(self) -> None:
        """Wait until the buffer is small again."""
        while self.buffered > _WRITE_BUFFER:
            self._drained.clear()
            await self._drained.wait()

    def close(self) -> None:
        if self._waiting:
            self._loop.remove_writer(self._sock)
        self._waiting.clear()
        self.buffered = 0
        self._drained.set()

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
        self._drained.set()


class _Reader:
    """Reads messages from one socket and queues them. `weight` is its share of an iteration."""

    def __init__(self, sock: socket.socket, ceiling: int, weight: int) -> None:
        self.sock = sock
        self.weight = weight
        self.handled = 0
        self.queue: deque[Any] = deque()
        self.at_end = False
        self.received = 0
        self.decoder: MessageDecoder[Any] = MessageDecoder(ToParent, ceiling)

    def pull(self, size: int) -> bool:
        """Read once and decode; False at the end. Messages before a BadFrame are queued."""
        try:
            data = self.sock.recv(size)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        self.received += len(data)
        self.queue.extend(self.decoder.feed(data))
        return bool(data)

    def pull_all(self) -> None:
        """Read and decode all that a dead child sent; half a frame at the end is dropped."""
        with contextlib.suppress(OSError, BadFrame):
            while data := self.sock.recv(_DRAIN_BYTES):
                self.queue.extend(self.decoder.feed(data))


class RawOutput:
    """Reads one descriptor for as long as the child lives, with pauses."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, descriptor: int, stream: Stream, deliver: RawConsumer
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
            self._loop.add_reader(self._descriptor, self._read)

    def catch_up(self) -> None:
        """Read the bytes that are in the pipe now, even in a pause."""
        waiting = 0 if self._at_end else _bytes_waiting(self._descriptor)
        while waiting > 0 and (count := self._read()):
            waiting -= count

    def finish(self) -> None:
        """Read the remaining bytes of a dead child, an incomplete character included."""
        self.catch_up()
        if not self._at_end and (rest := self._decoder.decode(b"", final=True)):
            self._deliver(self._stream, rest, 0)
        self.close()

    def close(self) -> None:
        self._pause()
        self._at_end = True

    def _read(self) -> int:
        try:
            data = os.read(self._descriptor, _RAW_BYTES)
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
    answer = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


class Channel:
    """The only reader of a child's sockets and of its descriptors 1 and 2, from `start` on."""

    def __init__(self, process: ChildProcess, config: SessionConfig) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._process = process
        self._routing = routing = config.routing
        self._ceiling = ceiling = config.child.max_frame_bytes
        self._bulk_alone = config.child.tasks is not None
        """Whether no bulk message has to come after a control message."""
        descriptors = process.descriptors
        self._control = _Reader(descriptors.control, ceiling, routing.control_weight)
        self._bulk = _Reader(descriptors.bulk, ceiling, routing.bulk_weight)
        self._control_out = _Writer(loop, descriptors.control)
        self._bulk_out = _Writer(loop, descriptors.bulk)
        self._closed = False
        self._dispatch_planned = False
        self.priority_reads = 0
        """Iterations in which control was handled before bulk that waited."""

    def start(
        self, deliver: Callable[[Any], None], raw: RawConsumer, lost: Callable[[str], None]
    ) -> None:
        """`deliver` gets every message from now on, `raw` the raw output, `lost` the fault."""
        self._deliver = deliver
        self._lost = lost
        descriptors = self._process.descriptors
        self._raw = (
            RawOutput(self._loop, descriptors.stdout, "stdout", raw),
            RawOutput(self._loop, descriptors.stderr, "stderr", raw),
        )
        self._listen()

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
        self._control.pull_all()
        self._bulk.pull_all()
        while self._control.queue or self._bulk.queue:
            self._dispatch_share()
        for raw in self._raw:
            raw.finish()

    def resume_raw(self) -> None:
        """Read raw output again: what asked for the pause has room, or has ended."""
        for raw in self._raw:
            raw.resume()

    def catch_up_raw(self) -> None:
        """Handle the raw output that has arrived, even in a pause."""
        for raw in self._raw:
            raw.catch_up()

    def close(self) -> None:
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
        if reader.at_end:
            return
        try:
            open_still = reader.pull(self._routing.read_bytes)
        except BadFrame as fault:
            self._end(reader, f"the child broke the protocol: {fault}")
            return
        if not open_still:
            self._end(reader, "the child closed its end of the connection")
        elif reader.decoder.pending_bytes:
            self._loop.call_later(_HALF_FRAME_S, self._check_half_frame, reader, reader.received)

    def _check_half_frame(self, reader: _Reader, received: int) -> None:
        """Fail on half a frame with nothing behind it: garbage that looks like the start of one."""
        if reader.received != received or not reader.decoder.pending_bytes or self._closed:
            return
        if self._process.process_stats()[0] in ("T", "t"):  # stopped
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
        if not self._dispatch_planned:
            self._listen()

    def _listen(self) -> None:
        for reader, call in ((self._control, self._on_control), (self._bulk, self._on_bulk)):
            if not reader.at_end:
                self._loop.add_reader(reader.sock, call)

    def _dispatch_share(self) -> None:
        """Handle at most `weight` messages of each kind, control before bulk."""
        if self._control.queue and self._bulk.queue:
            self.priority_reads += 1
        for reader in (self._control, self._bulk):
            queue, handled = reader.queue, 0
            while queue and handled < reader.weight:
                handled += 1
                self._deliver(queue.popleft())
            reader.handled += handled
