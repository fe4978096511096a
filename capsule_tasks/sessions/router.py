"""Where each message goes: to its execution, to whoever asked, to the session, or to `general`."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from capsule_tasks.errors import BadFrame, FrameTooLarge, SessionLost
from capsule_tasks.protocol.codec import Unknown
from capsule_tasks.protocol.flow import message_cost, utf8_size
from capsule_tasks.protocol.messages import (
    Ack,
    Cancel,
    CancelReply,
    Checkpoint,
    Checkpointed,
    Credit,
    Error,
    Gap,
    Heartbeat,
    InputClosed,
    InputRequest,
    Interrupt,
    InterruptReply,
    Message,
    NamespaceRequest,
    NamespaceSummary,
    Output,
    Progress,
    Ready,
    Rejected,
    ReplyTooLarge,
    Restore,
    Restored,
    Result,
    StackReply,
    StackRequest,
    Started,
    Stream,
    TaskResult,
    Terminal,
    Unsupported,
)
from capsule_tasks.sessions.info import Counters
from capsule_tasks.sessions.session_queue import SessionQueue
from capsule_tasks.sessions.stream import ExecutionStream

log = logging.getLogger("capsule_tasks.sessions")

_MAX_PENDING_INPUTS = 10_000
_MAX_WARNINGS = 10
_ANSWERS: dict[type[Message], type[Message]] = {
    Cancel: CancelReply,
    Interrupt: InterruptReply,
    StackRequest: StackReply,
    NamespaceRequest: NamespaceSummary,
    Checkpoint: Checkpointed,
    Restore: Restored,
}
_NO_REPLY: tuple[None, None] = (None, None)


class Router:
    """Routes synchronously, one message at a time; whoever waits is woken, never called."""

    def __init__(
        self,
        session_id: str,
        session_queue: int,
        session_queue_bytes: int,
        log_output: bool,
        send_control: Callable[[Any], None],
        observe: Callable[[Any], None],
        on_ready: Callable[[Ready | Rejected], None],
        on_heartbeat: Callable[[Heartbeat], None],
        on_terminal: Callable[[ExecutionStream, Terminal], None],
    ) -> None:
        self.counters = Counters()
        self.on_session_output: Callable[[Output], object] = lambda _: None
        """Hears what is written by no execution, or by one that is over."""
        self.streams: dict[str, ExecutionStream] = {}
        self.inputs: dict[str, str] = {}
        self._answered: set[str] = set()
        self.session_messages = SessionQueue(session_queue, session_queue_bytes)
        self._unknown = 0
        self._output_level = logging.INFO if log_output else logging.NOTSET
        self._receivers: deque[asyncio.Future[None]] = deque()
        self._replies: dict[str, tuple[type, asyncio.Future[Any]]] = {}
        self._session_id = session_id
        self._send_control = send_control
        self._observe = observe
        self._on_terminal = on_terminal
        self._session_unread_bytes = 0
        self._handlers: dict[type, Callable[[Any], None]] = {
            Ready: on_ready,
            Rejected: on_ready,
            Heartbeat: on_heartbeat,
            Ack: self._on_ack,
            Started: self._on_started,
            Output: self._on_output,
            Progress: self._to_stream,
            Gap: self._to_stream,
            InputRequest: self._on_input_request,
            InputClosed: self._on_input_closed,
            Result: self._on_end,
            TaskResult: self._on_end,
            Error: self._on_end,
            CancelReply: self._on_reply,
            InterruptReply: self._on_reply,
            StackReply: self._on_reply,
            NamespaceSummary: self._on_reply,
            Checkpointed: self._on_reply,
            Restored: self._on_reply,
            Unsupported: self._on_unsupported,
            ReplyTooLarge: self._on_reply_too_large,
            Unknown: self._on_unknown,
        }

    def route(self, message: Any) -> None:
        """BadFrame if the message is one that an honest child does not send."""
        self._handlers[type(message)](message)

    # --- replies -------------------------------------------------------------------------------

    def expect(self, request: Message) -> asyncio.Future[Any]:
        """A future for the reply to a request that is about to be sent."""
        reply = asyncio.get_running_loop().create_future()
        self._replies[request.id] = _ANSWERS[type(request)], reply
        reply.add_done_callback(lambda _: self._replies.pop(request.id, None))
        return reply

    def fail_replies(self, reason: str) -> int:
        """The child is gone: every open question ends. How many there were."""
        replies = [reply for _, reply in self._replies.values() if not reply.done()]
        for reply in replies:
            reply.set_exception(SessionLost(reason))
        return len(replies)

    async def receive(self) -> Any:
        """The next message of no execution."""
        while not self.session_messages:
            waiter = asyncio.get_running_loop().create_future()
            self._receivers.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if self.session_messages:  # woken and cancelled at once: the message is another's
                    self._wake_receiver()
                raise
            finally:
                if waiter in self._receivers:
                    self._receivers.remove(waiter)
        return self.session_messages.pop()

    def fail_receivers(self, reason: str) -> int:
        """Wake every `receive` with the news; how many there were."""
        waiters = [waiter for waiter in self._receivers if not waiter.done()]
        for waiter in waiters:
            waiter.set_exception(SessionLost(reason))
            waiter.exception()  # retrieved: its `receive` may have been cancelled meanwhile
        return len(waiters)

    # --- raw bytes -----------------------------------------------------------------------------

    def raw_owner(self) -> ExecutionStream | None:
        """Whom descriptor bytes belong to: the only execution that runs, else nobody.

        They overtake the news that it runs, which comes by another way and, of a task, later: if
        none is known to run, it is the only one of which nothing is known yet.
        """
        streams = self.streams.values()
        running = [stream for stream in streams if stream.is_running]
        able = running or [stream for stream in streams if not stream.acked]
        return able[0] if len(able) == 1 else None

    def on_raw(self, stream_name: Stream, text: str, size: int) -> bool:
        """Whether more may be read right now."""
        owner = self.raw_owner()
        execution_id = owner.execution_id if owner is not None else None
        output = Output(execution_id=execution_id, stream=stream_name, data=text, raw=True)
        self._observe(output)
        if owner is None:
            self.on_session_output(output)
            self._queue_for_session(output)
            self._log("session %s %s: %s", self._session_id, stream_name, text.rstrip())
            return True
        owner.push_raw(output, size)
        return not owner.raw_is_full

    # --- executions ----------------------------------------------------------------------------

    def _to_stream(self, message: Any) -> None:
        execution_id = message.execution_id
        stream = self.streams.get(execution_id) if execution_id is not None else None
        if stream is not None:
            stream.push(message)
        else:
            self._to_session(message)

    def _on_output(self, message: Output) -> None:
        if message.late:  # not for a later execution of the same name
            self._to_session(message)
        else:
            self._to_stream(message)

    def _to_session(self, message: Output | Gap | Progress) -> None:
        """Output of the session itself, or of an execution that has already ended."""
        self._session_unread_bytes += message_cost(message)
        self._send_control(Credit(execution_id=None, bytes=self._session_unread_bytes))
        self._session_unread_bytes = 0
        if isinstance(message, Output):
            self.on_session_output(message)
            if message.execution_id is not None:
                self.counters.late_output_bytes += utf8_size(message.data)
            self._log(
                "session %s %s%s: %s",
                self._session_id,
                message.stream,
                f" after the end of {message.execution_id}" if message.execution_id else "",
                message.data.rstrip(),
            )
        self._queue_for_session(message)

    def _on_ack(self, message: Ack) -> None:
        stream = self._stream_of(message)
        if stream is not None:
            stream.push(message)

    def _log(self, text: str, *details: str) -> None:
        if self._output_level:
            log.log(self._output_level, text, *details)

    def _on_started(self, message: Started) -> None:
        stream = self._stream_of(message)
        if stream is not None:
            stream.mark_started()

    def _stream_of(self, message: Ack | Started) -> ExecutionStream | None:
        """The execution, unless that has ended, on the other channel, and this is its successor."""
        stream = self.streams.get(message.execution_id)
        if stream is not None and message.seq in (None, stream.seq):
            return stream
        return None

    def _on_end(self, message: Terminal) -> None:
        stream = self.streams.get(message.execution_id)
        if stream is not None:
            self._on_terminal(stream, message)

    def _on_input_request(self, message: InputRequest) -> None:
        if message.execution_id not in self.streams:
            return
        if len(self.inputs) >= _MAX_PENDING_INPUTS:
            raise BadFrame(f"more than {_MAX_PENDING_INPUTS} input requests are open")
        self.inputs[message.id] = message.execution_id
        stats = self.counters.inputs
        self.counters.inputs = dataclasses.replace(
            stats,
            pending=len(self.inputs),
            high_water=max(stats.high_water, len(self.inputs)),
        )
        self._to_stream(message)

    def take_answer(self, request_id: str, execution_id: str) -> bool:
        """Whether the execution waits for this answer; of two answers the first is taken."""
        if self.inputs.get(request_id) != execution_id or request_id in self._answered:
            return False
        self._answered.add(request_id)
        return True

    def return_answer(self, request_id: str) -> None:
        """It could not be sent: the execution waits for another."""
        self._answered.discard(request_id)

    def _on_input_closed(self, message: InputClosed) -> None:
        self._answered.discard(message.request_id)
        if self.inputs.pop(message.request_id, None) is None:
            return
        stats = self.counters.inputs
        self.counters.inputs = dataclasses.replace(
            stats,
            pending=len(self.inputs),
            answered=stats.answered + (message.reason == "answered"),
            timeouts=stats.timeouts + (message.reason == "timeout"),
            cancels=stats.cancels + (message.reason in ("cancelled", "eof")),
        )
        self._to_stream(message)

    def close_input(self, request_id: str) -> None:
        """The execution that asked is over."""
        self.inputs.pop(request_id, None)
        self._answered.discard(request_id)
        stats = self.counters.inputs
        self.counters.inputs = dataclasses.replace(
            stats, pending=len(self.inputs), cancels=stats.cancels + 1
        )

    # --- everything else -----------------------------------------------------------------------

    def _on_reply(self, message: Any) -> None:
        kind, reply = self._replies.get(message.in_reply_to, _NO_REPLY)
        if reply is None:
            self._queue_for_session(message)
        elif type(message) is not kind:
            raise BadFrame(f"a request was answered with a {type(message).__name__}")
        elif not reply.done():
            reply.set_result(message)

    def _on_unsupported(self, message: Unsupported) -> None:
        _, reply = self._replies.get(message.in_reply_to or "", _NO_REPLY)
        if reply is not None and not reply.done():
            reply.set_exception(SessionLost(f"the child does not know {message.what!r} messages"))
            return
        self._warn_unknown("session %s: a %r message is unknown", message.what)
        self._queue_for_session(message)

    def _on_reply_too_large(self, message: ReplyTooLarge) -> None:
        _, reply = self._replies.get(message.in_reply_to, _NO_REPLY)
        if reply is not None and not reply.done():
            reply.set_exception(FrameTooLarge(message.size, message.ceiling))

    def _on_unknown(self, message: Unknown) -> None:
        self._warn_unknown("session %s sent an unknown %r message", message.what)
        self._send_control(Unsupported(what=message.what, in_reply_to=message.id))

    def _warn_unknown(self, text: str, what: str) -> None:
        """A few times: a child can send as many of them as it likes."""
        self._unknown += 1
        if self._unknown <= _MAX_WARNINGS:
            log.warning(text, self._session_id, what[:100])

    def _queue_for_session(self, message: Any) -> None:
        self.session_messages.put(message)
        self._wake_receiver()

    def _wake_receiver(self) -> None:
        while self._receivers:
            waiter = self._receivers.popleft()
            if not waiter.done():
                waiter.set_result(None)
                break
