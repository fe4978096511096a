"""One child from spawn to exit, and everything that lives exactly as long.

Every end of a child takes the same four steps, in `_finish`: its remaining output is routed, every
execution gets its terminal message, every open request its error, every descriptor is released.
A kill only records a reason and sends a signal; the exit does the rest.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any

from capsule_tasks.errors import (
    BadFrame,
    IncompatibleProtocol,
    SessionLost,
    SessionStartFailed,
    Unconfined,
)
from capsule_tasks.protocol import messages as wire
from capsule_tasks.protocol.negotiation import CAPABILITIES
from capsule_tasks.sessions.info import Counters, QueueStats
from capsule_tasks.sessions.process import stack_dump
from capsule_tasks.sessions.process.channel import Channel
from capsule_tasks.sessions.process.child_process import ChildProcess, ExitStatus
from capsule_tasks.sessions.process.raw_output import RawOutput
from capsule_tasks.sessions.router import Router
from capsule_tasks.sessions.stream import CANCEL_CREDIT, ERROR_TYPES, ExecutionStream
from capsule_tasks.settings import SessionConfig

_MAX_FINAL_OUTPUT = 4000
_MAX_NAMED = 10
_LOST_GRACE_S = 0.05
"""After a channel broke, the exit status may take so long before the child is killed."""


@dataclasses.dataclass(frozen=True)
class KillReason:
    """Why a child ends, and what that means for its executions."""

    message: str
    kind: wire.ErrorKind
    target: str | None = None
    """The execution at fault; the others are lost with it."""
    stack: str = ""
    replace: bool = False
    """Whether the session should go on with a new child."""
    expected: bool = True
    """Whether the session ended the child; False for an exit or a fault of the child's own."""
    is_asked: bool = False
    """Whether the session's owner sent the child a signal that ends it."""
    ran: tuple[str, ...] = ()
    """The executions that were lost with the child."""

    def __str__(self) -> str:
        """For the log: what became of the child, with its executions."""
        ran = ", ".join(self.ran[:_MAX_NAMED]) or "nothing"
        if len(self.ran) > _MAX_NAMED:
            ran += f" and {len(self.ran) - _MAX_NAMED} more"
        lost = "ended its child as asked" if self.is_asked else "lost its child"
        return f"{lost}, which ran {ran}: {self.message}"


class LiveChild:
    """A child process with its channels. `on_end` is called once, when nothing of it is left."""

    def __init__(
        self,
        session_id: str,
        config: SessionConfig,
        process: ChildProcess,
        counters: Counters,
        *,
        observe: Callable[[Any], None],
        on_heartbeat: Callable[[wire.Heartbeat], None],
        on_session_output: Callable[[wire.Output], None],
        on_stream_end: Callable[[ExecutionStream, wire.Terminal], None],
        on_end: Callable[[KillReason], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._observe = observe
        self._on_end = on_end
        self._on_stream_end = on_stream_end
        self._kill_reason: KillReason | None = None
        self._seq = 0
        self.is_over = False
        self.ready_at: float | None = None
        self.metadata: dict[str, Any] = {}
        """The negotiated protocol, once the child is ready."""
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.process = process
        self.channel = Channel(
            self._loop,
            process.descriptors.control,
            process.descriptors.bulk,
            config.routing,
            config.child.max_frame_bytes,
            self._deliver,
            self._on_broken,
            lambda: process.process_stats()[0] in ("T", "t"),
            bulk_alone=config.child.tasks is not None,
        )
        self.send_control = self.channel.send_control
        self.post_bulk = self.channel.post_bulk
        self.send_bulk = self.channel.send_bulk
        self.router = Router(
            session_id,
            config.routing,
            counters,
            self.send_control,
            observe,
            self._on_ready,
            on_heartbeat,
            self._on_terminal,
            on_session_output,
        )
        self._raw = (
            RawOutput(self._loop, process.descriptors.stdout, "stdout", self.router.on_raw),
            RawOutput(self._loop, process.descriptors.stderr, "stderr", self.router.on_raw),
        )
        self.process.exited.add_done_callback(self._on_exit)
        self.send_control(
            wire.Hello(
                versions=config.protocol_versions,
                session_id=session_id,
                capabilities=CAPABILITIES,
                config=config.child,
            )
        )

    # --- requests and executions ---------------------------------------------------------------

    async def ask(
        self, message: wire.Message, timeout_s: float | None, *, bulk: bool = False
    ) -> Any:
        """Send a request and wait for its reply; TimeoutError, or SessionLost if the child ends."""
        if self.is_over:
            raise SessionLost("the session's child has exited")
        reply = self.router.expect(message)
        try:
            (self.post_bulk if bulk else self.send_control)(message)
            async with asyncio.timeout(timeout_s):
                return await reply
        finally:
            reply.cancel()

    def open_stream(
        self, execution_id: str, consumer: Callable[[wire.Message], object] | None = None
    ) -> ExecutionStream:
        """Register an execution before it is sent, so that none of its messages can be missed."""
        self._seq += 1
        self.router.streams[execution_id] = stream = ExecutionStream(
            execution_id,
            self._seq,
            self._config.child.output,
            self._grant,
            self._resume_raw,
            consumer,
        )
        return stream

    def send_shutdown(self, reason: str) -> None:
        """Ask the child to stop; consumers that are paused do not hold up its final output."""
        for stream in self.router.streams.values():
            stream.allow_cancel_credit()
        self.send_control(wire.Shutdown(reason=reason, credit=CANCEL_CREDIT))

    def end_unstarted(self, stream: ExecutionStream) -> None:
        """End an execution that waits behind one that keeps the child from answering.

        The child has the cancel and will not start the execution. Until the child reports that, its
        id stays taken.
        """
        terminal = wire.Error(
            execution_id=stream.execution_id,
            kind=wire.ErrorKind.CANCELLED,
            type="ExecutionCancelled",
            message="cancelled before it began",
        )
        self._on_stream_end(stream, terminal)

    @property
    def queues(self) -> QueueStats:
        streams = self.router.streams.values()
        control_handled, bulk_handled = self.channel.handled
        return QueueStats(
            executions=len(streams),
            buffered_messages=sum(stream.buffered_messages for stream in streams),
            buffered_bytes=sum(stream.buffered_bytes for stream in streams),
            session_messages=len(self.router.session_messages),
            session_messages_dropped=self.router.session_messages.dropped,
            control_handled=control_handled,
            bulk_handled=bulk_handled,
            priority_reads=self.channel.priority_reads,
        )

    # --- the end -------------------------------------------------------------------------------

    def kill(self, reason: KillReason) -> None:
        """Kill the child and its descendants; the first reason stands. `ended` follows."""
        known = self._kill_reason
        if known is None or known.message == reason.message:  # the same one, with the stack
            self._kill_reason = reason
        self.process.kill_family()

    def expect_exit(self, reason: KillReason) -> None:
        """Record why the child was asked to stop, before it exits."""
        if self._kill_reason is None:
            self._kill_reason = reason

    def _on_exit(self, exited: asyncio.Future[ExitStatus]) -> None:
        reason, status = self._kill_reason, exited.result()
        message = f"the child {status}"
        if reason is None:
            is_asked = status.was_asked_for(self.process.signals_sent)
            reason = KillReason(message, wire.ErrorKind.LOST, expected=False, is_asked=is_asked)
        elif not reason.expected:
            reason = dataclasses.replace(reason, message=f"{reason.message}; {message}")
        self._finish(reason)

    def _finish(self, reason: KillReason) -> None:
        # First, while the executions are still known: the bytes must find their owner.
        self.channel.drain()
        for raw in self._raw:
            raw.finish()
        self.is_over = True
        final_output = stack_dump.read_final_output(self.process)
        self.channel.close()
        streams = list(self.router.streams.values())
        ran = () if reason.expected else tuple(stream.label for stream in streams)
        reason = dataclasses.replace(reason, stack=reason.stack or final_output, ran=ran)
        for stream in streams:
            terminal = self._terminal_of(stream, reason)
            self._observe(terminal)
            self._end_stream(stream, terminal)
        self.router.fail_replies(reason.message)
        if not self.ready.done():
            self.ready.set_exception(self._start_failure(reason))
            self.ready.exception()  # retrieved: the caller of `start` may have been cancelled
        self.process.close()
        self._on_end(reason)
        self.ended.set_result(None)

    def _start_failure(self, reason: KillReason) -> SessionStartFailed:
        """Why the child ended before it was ready, with its output: a failed import shows there."""
        failure = SessionStartFailed(reason.message)
        written = "".join(
            m.data for m in self.router.session_messages if isinstance(m, wire.Output)
        )
        if written:
            failure.add_note(f"it wrote:\n{written[-_MAX_FINAL_OUTPUT:]}")
        return failure

    def _terminal_of(self, stream: ExecutionStream, reason: KillReason) -> wire.Terminal:
        """The terminal message of an execution that is lost with its child."""
        stop, kind, message = stream.stop, reason.kind, reason.message
        type_ = ERROR_TYPES.get(kind, "SessionLost")
        stream.was_killed = reason.target is not None
        # An execution that was being stopped was stopped by the kill, whichever it was meant for.
        if reason.target is not None and (stop is not None or stream.execution_id == reason.target):
            kind, type_, message = wire.ErrorKind.KILLED, "ExecutionCancelled", "cancelled"
            if stop is not None and stop.kind in ERROR_TYPES:
                kind, type_, message = stop.kind, ERROR_TYPES[stop.kind], stop.message
            message += " (killed)"
        return wire.Error(
            execution_id=stream.execution_id,
            kind=kind,
            type=type_,
            message=message,
            stack=reason.stack,
        )

    def _on_broken(self, message: str) -> None:
        """Kill the child after a channel broke, unless its exit explains that."""
        if self._kill_reason is None and not self.process.exited.done():
            reason = KillReason(message, wire.ErrorKind.LOST, expected=False)
            self._loop.call_later(_LOST_GRACE_S, self.kill, reason)

    # --- messages of the child -----------------------------------------------------------------

    def _deliver(self, message: Any) -> None:
        self._observe(message)
        try:
            self.router.route(message)
        except BadFrame as fault:
            self.kill(KillReason(str(fault), wire.ErrorKind.LOST, expected=False))

    def _on_ready(self, message: wire.Ready | wire.Rejected) -> None:
        if self.ready.done():
            return
        if isinstance(message, wire.Rejected):
            refusal = (
                Unconfined if message.kind == wire.ErrorKind.UNCONFINED else IncompatibleProtocol
            )
            self.expect_exit(KillReason(message.message, wire.ErrorKind.LOST))
            self.ready.set_exception(refusal(f"{message.kind}: {message.message}"))
            return
        if message.version not in self._config.protocol_versions:
            raise BadFrame(f"the child chose version {message.version}, which was not offered")
        self.ready_at = time.monotonic()
        self.metadata = {
            "protocol_version": message.version,
            "capabilities": message.capabilities,
            "config": message.config,
            "python": message.python,
            "isolation": message.isolation,
        }
        self.ready.set_result(None)

    def _on_terminal(self, stream: ExecutionStream, terminal: wire.Terminal) -> None:
        if not isinstance(terminal, wire.TaskResult) or terminal.has_unread_raw:
            for raw in self._raw:
                raw.catch_up()
        self._end_stream(stream, terminal)

    def _end_stream(self, stream: ExecutionStream, terminal: wire.Terminal) -> None:
        self.router.remove(stream)
        self._on_stream_end(stream, terminal)
        self._resume_raw()

    def _grant(self, execution_id: str, amount: int) -> None:
        self.send_control(wire.Credit(execution_id=execution_id, bytes=amount))

    def _resume_raw(self) -> None:
        for raw in self._raw:
            raw.resume()
