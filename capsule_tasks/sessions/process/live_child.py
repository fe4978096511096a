"""One child from spawn to death, and everything that lives exactly as long.

Whatever ends the child ends it here, in the same four steps: what it still said is routed, every
execution gets its terminal message, every open question its error, every descriptor is released.
Killing is only a reason and a signal; the exit does the rest.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from capsule_tasks.errors import (
    BadFrame,
    IncompatibleProtocol,
    SessionLost,
    SessionStartFailed,
    Unconfined,
)
from capsule_tasks.protocol.messages import (
    Credit,
    ErrorKind,
    Heartbeat,
    Hello,
    Message,
    Output,
    Ready,
    Rejected,
    Shutdown,
    TaskResult,
    Terminal,
)
from capsule_tasks.protocol.negotiation import CAPABILITIES
from capsule_tasks.sessions.process import stack_dump
from capsule_tasks.sessions.process.channel import Channel
from capsule_tasks.sessions.process.child_process import ChildProcess, ExitStatus
from capsule_tasks.sessions.process.raw_output import RawOutput
from capsule_tasks.sessions.router import Router
from capsule_tasks.sessions.stream import CANCEL_CREDIT, ExecutionStream, ending
from capsule_tasks.settings import SessionConfig

log = logging.getLogger("capsule_tasks.sessions")

NAMED_AFTER = {ErrorKind.TIMEOUT: "ExecutionTimeout", ErrorKind.LIMIT: "LimitReached"}
_MAX_FINAL_OUTPUT = 4000
_MAX_NAMED = 10
_LOST_GRACE_S = 0.05
"""After a broken channel: so long may the exit status take before the child is killed."""


@dataclasses.dataclass(frozen=True)
class KillReason:
    """Why a child is being killed, and what that means for its executions."""

    reason: str
    kind: ErrorKind
    target: str | None = None
    """The execution at fault; the others are lost with it."""
    stack: str = ""
    replace: bool = False
    """Whether the session should go on with a new child."""
    expected: bool = True
    """Whether the session did this to itself, or it happened to the session."""
    is_asked: bool = False
    """Whether the session's owner sent it a signal that ends it."""
    ran: tuple[str, ...] = ()
    """What was lost with it."""

    def __str__(self) -> str:
        """For the log: what became of the child, with what it ran."""
        ran = ", ".join(self.ran[:_MAX_NAMED]) or "nothing"
        if len(self.ran) > _MAX_NAMED:
            ran += f" and {len(self.ran) - _MAX_NAMED} more"
        lost = "ended its child as asked" if self.is_asked else "lost its child"
        return f"{lost}, which ran {ran}: {self.reason}"


class LiveChild:
    """`ended` is called exactly once, when nothing of the child is left."""

    def __init__(
        self,
        session_id: str,
        config: SessionConfig,
        process: ChildProcess,
        observe: Callable[[Any], None],
        on_heartbeat: Callable[[Heartbeat], None],
        on_stream_end: Callable[[ExecutionStream, Terminal], None],
        on_end: Callable[[KillReason], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._observe = observe
        self._on_end = on_end
        self._on_stream_end = on_stream_end
        self._doom: KillReason | None = None
        self._seq = 0
        self._over = False
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.process = process
        self.router = Router(
            session_id,
            config.routing.session_queue,
            config.routing.session_queue_bytes,
            config.routing.log_output,
            self.send_control,
            observe,
            self._on_ready,
            on_heartbeat,
            self._on_terminal,
        )
        self.channel = Channel(
            self._loop,
            process.wires.control,
            process.wires.bulk,
            config.routing,
            config.child.max_frame_bytes,
            self._deliver,
            self._on_broken,
            lambda: process.process_stats()[0] in ("T", "t"),
            bulk_alone=config.child.tasks is not None,
        )
        self._raw = (
            RawOutput(self._loop, process.wires.stdout, "stdout", self.router.on_raw),
            RawOutput(self._loop, process.wires.stderr, "stderr", self.router.on_raw),
        )
        self.process.exited.add_done_callback(self._on_exit)
        self.send_control(
            Hello(
                versions=config.protocol_versions,
                session_id=session_id,
                capabilities=CAPABILITIES,
                config=config.child,
            )
        )

    # --- talking -------------------------------------------------------------------------------

    def send_control(self, message: Message) -> None:
        self.channel.send_control(message)

    def post_bulk(self, message: Message) -> None:
        self.channel.post_bulk(message)

    async def send_bulk(self, message: Message) -> None:
        await self.channel.send_bulk(message)

    async def ask(self, message: Message, timeout_s: float | None, *, bulk: bool = False) -> Any:
        """Send a request and wait for its reply; TimeoutError, or SessionLost if the child goes."""
        if self._over:
            raise SessionLost("the session's child is gone")
        reply = self.router.expect(message)
        try:
            if bulk:
                self.post_bulk(message)
            else:
                self.send_control(message)
            async with asyncio.timeout(timeout_s):
                return await reply
        finally:
            reply.cancel()

    def open_stream(
        self, execution_id: str, consumer: Callable[[Message], object] | None = None
    ) -> ExecutionStream:
        """Register an execution before it is sent, so that nothing of it can be missed."""
        self._seq += 1
        stream = ExecutionStream(
            execution_id,
            self._seq,
            self._config.child.output,
            self._grant,
            self._resume_raw,
            consumer,
        )
        self.router.streams[execution_id] = stream
        return stream

    def close_stream(self, stream: ExecutionStream) -> None:
        """Forget an execution that was never sent."""
        self.router.streams.pop(stream.execution_id, None)

    def send_shutdown(self, reason: str) -> None:
        """Ask it to leave; consumers that are paused do not hold up its last words."""
        for stream in self.router.streams.values():
            self.allow_cancel_credit(stream)
        self.send_control(Shutdown(reason=reason, credit=CANCEL_CREDIT))

    def end_unstarted(self, stream: ExecutionStream) -> None:
        """End what waits behind an execution that keeps the child from answering.

        The child has been told, and will not begin it; until it says so the name stays taken.
        """
        why = "cancelled before it began"
        terminal = ending(stream.execution_id, ErrorKind.CANCELLED, "ExecutionCancelled", why)
        self._on_stream_end(stream, terminal)

    def allow_cancel_credit(self, stream: ExecutionStream) -> int:
        stream.allow_more(CANCEL_CREDIT)
        return CANCEL_CREDIT

    # --- ending --------------------------------------------------------------------------------

    def kill(self, doom: KillReason) -> None:
        """Kill the child and its descendants; the first reason stands. `ended` follows."""
        if self._doom is None or self._doom.reason == doom.reason:  # the same one, with the stack
            self._doom = doom
        self.process.kill_family()

    def expect_exit(self, doom: KillReason) -> None:
        """The child was asked to leave: what its exit will mean."""
        if self._doom is None:
            self._doom = doom

    @property
    def is_over(self) -> bool:
        return self._over

    def _on_exit(self, exited: asyncio.Future[ExitStatus]) -> None:
        doom = self._doom
        status = exited.result()
        if doom is None:
            is_asked = status.was_asked_for(self.process.signals_sent)
            why = f"the child {status}"
            doom = KillReason(why, ErrorKind.LOST, expected=False, is_asked=is_asked)
        elif doom.expected is False:
            doom = dataclasses.replace(doom, reason=f"{doom.reason}; the child {status}")
        self._finish(doom)

    def _finish(self, doom: KillReason) -> None:
        if self._over:
            return
        self.channel.drain()  # first, so that the bytes find the execution they belong to
        for raw in self._raw:
            raw.finish()
        self._over = True
        final_output = stack_dump.read_final_output(self.process)
        if final_output and not doom.stack:
            doom = dataclasses.replace(doom, stack=final_output)
        self.channel.close()
        streams = list(self.router.streams.values())
        if not doom.expected:
            doom = dataclasses.replace(doom, ran=tuple(stream.label for stream in streams))
        for stream in streams:
            terminal = self._terminal_of(stream, doom)
            self._observe(terminal)
            self._end_stream(stream, terminal)
        self.router.fail_replies(doom.reason)
        if not self.ready.done():
            self.ready.set_exception(self._start_failure(doom))
            self.ready.exception()  # retrieved: nobody may be waiting any more
        self.process.close()
        self._on_end(doom)
        self.ended.set_result(None)

    def _start_failure(self, doom: KillReason) -> SessionStartFailed:
        """Why there is no child, with what it wrote: an import that failed says which."""
        failure = SessionStartFailed(doom.reason)
        said = "".join(m.data for m in self.router.session_messages if isinstance(m, Output))
        if said:
            failure.add_note(f"it wrote:\n{said[-_MAX_FINAL_OUTPUT:]}")
        return failure

    def _terminal_of(self, stream: ExecutionStream, doom: KillReason) -> Terminal:
        execution_id, stop = stream.execution_id, stream.stop
        stream.was_killed = doom.target is not None
        if doom.target is not None and (execution_id == doom.target or stop is not None):
            # Whoever the kill was meant for: what was being stopped has been stopped by it.
            kind, type_, message = ErrorKind.KILLED, "ExecutionCancelled", "cancelled"
            if stop is not None and stop.kind in NAMED_AFTER:
                kind, type_, message = stop.kind, NAMED_AFTER[stop.kind], stop.message
            return ending(execution_id, kind, type_, f"{message} (killed)", doom.stack)
        if doom.target is not None:
            kind = ErrorKind.LOST_WITH_NEIGHBOUR
            return ending(execution_id, kind, "SessionLost", doom.reason, doom.stack)
        type_ = NAMED_AFTER.get(doom.kind, "SessionLost")
        return ending(execution_id, doom.kind, type_, doom.reason, doom.stack)

    def _on_broken(self, reason: str) -> None:
        """A channel is of no use any more; usually the exit is already on its way."""
        if self._over or self._doom is not None:
            return
        doom = KillReason(reason, ErrorKind.LOST, expected=False)
        if self.process.exited.done():
            return
        self._loop.call_later(_LOST_GRACE_S, self._kill_if_alive, doom)

    def _kill_if_alive(self, doom: KillReason) -> None:
        if not self._over:
            self.kill(doom)

    # --- routing -------------------------------------------------------------------------------

    def _deliver(self, message: Any) -> None:
        self._observe(message)
        try:
            self.router.route(message)
        except BadFrame as fault:
            self.kill(KillReason(str(fault), ErrorKind.LOST, expected=False))

    def _on_ready(self, message: Ready | Rejected) -> None:
        if self.ready.done():
            return
        if isinstance(message, Ready):
            if message.version not in self._config.protocol_versions:
                raise BadFrame(f"the child chose version {message.version}, which nobody offered")
            self.ready.set_result(message)
            return
        refusal = Unconfined if message.kind == ErrorKind.UNCONFINED else IncompatibleProtocol
        self.expect_exit(KillReason(message.message, ErrorKind.LOST))
        self.ready.set_exception(refusal(f"{message.kind}: {message.message}"))

    def _on_terminal(self, stream: ExecutionStream, terminal: Terminal) -> None:
        if not isinstance(terminal, TaskResult) or terminal.has_unread_raw:
            for raw in self._raw:
                raw.catch_up()
        self._end_stream(stream, terminal)

    def _end_stream(self, stream: ExecutionStream, terminal: Terminal) -> None:
        self.router.streams.pop(stream.execution_id, None)
        for request_id, owner in list(self.router.inputs.items()):
            if owner == stream.execution_id:
                self.router.close_input(request_id)
        self._on_stream_end(stream, terminal)
        self._resume_raw()

    def _grant(self, execution_id: str, amount: int) -> None:
        self.send_control(Credit(execution_id=execution_id, bytes=amount))

    def _resume_raw(self) -> None:
        if not self._over:
            for raw in self._raw:
                raw.resume()
