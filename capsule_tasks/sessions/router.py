"""Routing of a child's messages: to executions, to requests, or to the session's own queue."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, get_args

from capsule_tasks.errors import BadFrame, FrameTooLarge, SessionLost
from capsule_tasks.protocol import messages as wire
from capsule_tasks.protocol.codec import Unknown, encode_frame
from capsule_tasks.protocol.flow import message_cost, utf8_size
from capsule_tasks.sessions.info import Counters
from capsule_tasks.sessions.listeners import Interceptors
from capsule_tasks.sessions.stream import ExecutionStream
from capsule_tasks.settings import RoutingSettings

if TYPE_CHECKING:
    from capsule_tasks.sessions.process.live_child import LiveChild

log = logging.getLogger("capsule_tasks.sessions")

_MAX_PENDING_INPUTS = 10_000
_MAX_WARNINGS = 10
_NO_CEILING = 2**32 - 1
_REPLIES: dict[type[wire.Message], type[wire.Message]] = {
    wire.Cancel: wire.CancelReply,
    wire.Interrupt: wire.InterruptReply,
    wire.StackRequest: wire.StackReply,
    wire.NamespaceRequest: wire.NamespaceSummary,
    wire.Checkpoint: wire.Checkpointed,
    wire.Restore: wire.Restored,
}


class SessionQueue:
    """Bounded in number and in bytes: drops the oldest messages, but never the newest."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: deque[tuple[Any, int]] = deque()
        self._bytes = 0
        self.dropped = 0

    def put(self, message: Any) -> None:
        size = _size(message)
        self._messages.append((message, size))
        self._bytes += size
        while len(self._messages) > 1 and (
            len(self._messages) > self._max_messages or self._bytes > self._max_bytes
        ):
            self.pop()
            self.dropped += 1

    def pop(self) -> Any:
        """Remove and return the oldest message."""
        message, size = self._messages.popleft()
        self._bytes -= size
        return message

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[Any]:
        return (message for message, _ in self._messages)


def _size(message: Any) -> int:
    if isinstance(message, wire.Streamed):
        return message_cost(message)
    return len(encode_frame(message, _NO_CEILING))  # a reply without a request, which is rare


class ArrivingPieces:
    """The pieces of one checkpoint."""

    def __init__(self, max_bytes: int, piece_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._piece_bytes = piece_bytes
        self.size = 0
        self.pieces: list[bytes] = []

    def add(self, message: wire.CheckpointPiece) -> None:
        if message.offset == 0:  # the first one, or the child begins again
            self.pieces.clear()
            self.size = 0
        # All but the last are full: a child cannot make us keep millions of little ones.
        if message.offset != self.size or self.size % self._piece_bytes or not message.data:
            size = len(message.data)
            raise BadFrame(f"a piece of a checkpoint has the offset {message.offset}, size {size}")
        self.size += len(message.data)
        if self.size > self._max_bytes:
            raise BadFrame(f"a checkpoint has more than {self._max_bytes} bytes")
        self.pieces.append(message.data)


class Router:
    """Routes one message at a time, without waiting; a message wakes its reader."""

    def __init__(
        self,
        child: LiveChild,
        session_id: str,
        routing: RoutingSettings,
        counters: Counters,
        interceptors: Interceptors,
    ) -> None:
        self._child = child
        self._streams = child.streams
        self.inputs: dict[str, str] = {}
        """The execution of each open question."""
        self._answered: set[str] = set()
        self.session_messages = SessionQueue(routing.session_queue, routing.session_queue_bytes)
        self._receivers: deque[asyncio.Future[None]] = deque()
        self._replies: dict[str, tuple[type, asyncio.Future[Any]]] = {}
        self._arriving: dict[str, ArrivingPieces] = {}
        self._unknown = 0
        self._session_id = session_id
        self._logs_output = routing.log_output
        self._channel = child.channel
        self._counters = counters
        self._interceptors = interceptors
        self._handlers: dict[type, Callable[[Any], None]] = {
            wire.Ready: child.on_ready,
            wire.Rejected: child.on_ready,
            wire.Heartbeat: child.on_heartbeat,
            wire.Ack: self._on_start,
            wire.Started: self._on_start,
            **dict.fromkeys(get_args(wire.Streamed), self._to_stream),
            wire.InputRequest: self._on_input_request,
            wire.InputClosed: self._on_input_closed,
            wire.Result: self._on_end,
            wire.TaskResult: self._on_end,
            wire.Error: self._on_end,
            **dict.fromkeys(_REPLIES.values(), self._on_reply),
            wire.CheckpointPiece: self._on_piece,
            wire.Unsupported: self._on_unsupported,
            wire.ReplyTooLarge: self._on_reply_too_large,
            Unknown: self._on_unknown,
        }

    def route(self, message: Any) -> None:
        """Show the interceptors a message, then hand it on."""
        if self._interceptors.registered:
            self._interceptors.observe(message)
        try:
            self._handlers[type(message)](message)
        except BadFrame as fault:  # an honest child does not send it
            self._child.on_fault(fault)

    # --- replies -------------------------------------------------------------------------------

    def expect(self, request: wire.Message) -> asyncio.Future[Any]:
        """A future for the reply to a request that is about to be sent."""
        reply = asyncio.get_running_loop().create_future()
        self._replies[request.id] = _REPLIES[type(request)], reply
        reply.add_done_callback(lambda _: self._replies.pop(request.id, None))
        return reply

    @contextlib.contextmanager
    def collecting(self, request: wire.Checkpoint, piece_bytes: int) -> Iterator[ArrivingPieces]:
        """The pieces of a checkpoint that is about to be requested, as they arrive."""
        self._arriving[request.id] = pieces = ArrivingPieces(request.max_bytes, piece_bytes)
        try:
            yield pieces
        finally:
            del self._arriving[request.id]

    def _on_piece(self, message: wire.CheckpointPiece) -> None:
        pieces = self._arriving.get(message.checkpoint_id)
        if pieces is not None:  # else the caller has given up
            pieces.add(message)

    def fail_replies(self, reason: str) -> None:
        """Fail every open request, for a child that has ended."""
        for _, reply in self._replies.values():
            if not reply.done():
                reply.set_exception(SessionLost(reason))

    def _open_reply(self, request_id: str | None) -> asyncio.Future[Any] | None:
        _, reply = self._replies.get(request_id or "", (None, None))
        return reply if reply is not None and not reply.done() else None

    def _on_reply(self, message: Any) -> None:
        kind, reply = self._replies.get(message.in_reply_to, (None, None))
        if reply is None:
            self._queue_for_session(message)
        elif type(message) is not kind:
            raise BadFrame(f"a request was answered with a {type(message).__name__}")
        elif not reply.done():
            reply.set_result(message)

    def _on_unsupported(self, message: wire.Unsupported) -> None:
        if reply := self._open_reply(message.in_reply_to):
            reply.set_exception(SessionLost(f"the child does not know {message.what!r} messages"))
            return
        self._warn_unknown("session %s: a %r message is unknown", message.what)
        self._queue_for_session(message)

    def _on_reply_too_large(self, message: wire.ReplyTooLarge) -> None:
        if reply := self._open_reply(message.in_reply_to):
            reply.set_exception(FrameTooLarge(message.size, message.ceiling))

    def _on_unknown(self, message: Unknown) -> None:
        self._warn_unknown("session %s sent an unknown %r message", message.what)
        self._channel.send_control(wire.Unsupported(what=message.what, in_reply_to=message.id))

    def _warn_unknown(self, text: str, what: str) -> None:
        """Log the first unknown messages only: a child can send as many as it likes."""
        self._unknown += 1
        if self._unknown <= _MAX_WARNINGS:
            log.warning(text, self._session_id, what[:100])

    # --- messages of the session ---------------------------------------------------------------

    async def receive(self) -> Any:
        """The next message of no execution; waits for one."""
        while not self.session_messages:
            receiver = asyncio.get_running_loop().create_future()
            self._receivers.append(receiver)
            try:
                await receiver
            except asyncio.CancelledError:
                if self.session_messages:  # woken and cancelled: another receiver gets the message
                    self._wake_receiver()
                raise
            finally:
                if receiver in self._receivers:
                    self._receivers.remove(receiver)
        return self.session_messages.pop()

    def fail_receivers(self, reason: str) -> int:
        """Fail every pending `receive`; how many there were."""
        receivers = [receiver for receiver in self._receivers if not receiver.done()]
        for receiver in receivers:
            receiver.set_exception(SessionLost(reason))
            receiver.exception()  # retrieved: its `receive` may have been cancelled meanwhile
        return len(receivers)

    def _queue_for_session(self, message: Any) -> None:
        self.session_messages.put(message)
        self._wake_receiver()

    def _wake_receiver(self) -> None:
        while self._receivers:
            receiver = self._receivers.popleft()
            if not receiver.done():
                receiver.set_result(None)
                break

    def _to_session(self, message: wire.Streamed) -> None:
        """Handle output of the session itself, or of an execution that has already ended."""
        self._channel.send_control(wire.Credit(execution_id=None, bytes=message_cost(message)))
        if isinstance(message, wire.Output):
            if message.execution_id is not None:
                self._counters.late_output_bytes += utf8_size(message.data)
            self._publish_session_output(message)
        self._queue_for_session(message)

    def _publish_session_output(self, output: wire.Output) -> None:
        self._child.on_session_output(output)
        if self._logs_output:
            name = output.execution_id
            after = f" after the end of {name}" if name else ""
            text = output.data.rstrip()
            log.info("session %s %s%s: %s", self._session_id, output.stream, after, text)

    # --- raw bytes -----------------------------------------------------------------------------

    def on_raw(self, stream_name: wire.Stream, text: str, size: int) -> bool:
        """Route bytes of a descriptor; whether more may be read right now."""
        owner = self._streams.raw_owner
        execution_id = owner.execution_id if owner is not None else None
        output = wire.Output(execution_id=execution_id, stream=stream_name, data=text, raw=True)
        self._interceptors.observe(output)
        if owner is None:
            self._publish_session_output(output)
            self._queue_for_session(output)
            return True
        owner.push_raw(output, size)
        return not owner.raw_is_full

    # --- messages of executions ----------------------------------------------------------------

    def end(self, stream: ExecutionStream, terminal: wire.Terminal) -> None:
        """End an execution by its last message."""
        self.remove(stream)
        self._child.on_stream_end(stream, terminal)
        self._channel.resume_raw()

    def remove(self, stream: ExecutionStream) -> None:
        """Forget an execution that has ended, with its open questions."""
        self._streams.pop(stream.execution_id, None)
        for request_id, execution_id in list(self.inputs.items()):
            if execution_id == stream.execution_id:
                self._close_input(request_id, "cancelled")

    def _to_stream(self, message: Any) -> None:
        stream = self._streams.get(message.execution_id)
        is_late = isinstance(message, wire.Output) and message.late
        if stream is None or is_late:  # not for a later execution of the same name
            self._to_session(message)
        else:
            stream.push(message)

    def _on_start(self, message: wire.Ack | wire.Started) -> None:
        stream = self._streams.get(message.execution_id)
        if stream is None or message.seq not in (None, stream.seq):
            return  # its end came first, on the other channel, and the id may be used again
        if isinstance(message, wire.Ack):
            stream.push(message)
        else:
            stream.mark_started()

    def _on_end(self, message: wire.Terminal) -> None:
        stream = self._streams.get(message.execution_id)
        if stream is not None:
            if not isinstance(message, wire.TaskResult) or message.has_unread_raw:
                self._channel.catch_up_raw()
            self.end(stream, message)

    # --- questions -----------------------------------------------------------------------------

    def _on_input_request(self, message: wire.InputRequest) -> None:
        if message.execution_id not in self._streams:
            return
        if len(self.inputs) >= _MAX_PENDING_INPUTS:
            raise BadFrame(f"more than {_MAX_PENDING_INPUTS} input requests are open")
        self.inputs[message.id] = message.execution_id
        stats = self._counters.inputs
        stats.pending = len(self.inputs)
        stats.high_water = max(stats.high_water, stats.pending)
        self._to_stream(message)

    def take_answer(self, request_id: str, execution_id: str) -> bool:
        """Whether the execution waits for this answer; of two answers the first is taken."""
        if self.inputs.get(request_id) != execution_id or request_id in self._answered:
            return False
        self._answered.add(request_id)
        return True

    def return_answer(self, request_id: str) -> None:
        """Accept another answer: the one that was taken could not be sent."""
        self._answered.discard(request_id)

    def _on_input_closed(self, message: wire.InputClosed) -> None:
        if self._close_input(message.request_id, message.reason):
            self._to_stream(message)

    def _close_input(self, request_id: str, reason: str) -> bool:
        """Close a question and count how it ended; False if it was not open."""
        self._answered.discard(request_id)
        if self.inputs.pop(request_id, None) is None:
            return False
        stats = self._counters.inputs
        stats.pending = len(self.inputs)
        if reason == "answered":
            stats.answered += 1
        elif reason == "timeout":
            stats.timeouts += 1
        else:
            stats.cancels += 1
        return True
