"""One child from spawn to exit, and everything that lives exactly as long.

Every end of a child takes the same four steps, in `_on_exit`: its remaining output is routed, every
execution gets its terminal message, every open request its error, every descriptor is released.
A kill only records a reason and sends a signal; the exit does the rest.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
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
from capsule_tasks.protocol.namespaces import piece_bytes
from capsule_tasks.sessions.info import Counters, Health, QueueStats
from capsule_tasks.sessions.listeners import Interceptors
from capsule_tasks.sessions.process.channel import Channel
from capsule_tasks.sessions.process.child_process import ChildProcess, ExitStatus
from capsule_tasks.sessions.process.confinement import Confinement
from capsule_tasks.sessions.router import Router
from capsule_tasks.sessions.stopping import KillReason, Stopper
from capsule_tasks.sessions.stream import ERROR_TYPES, ExecutionStream, Streams
from capsule_tasks.settings import SessionConfig, TimeoutSettings

log = logging.getLogger("capsule_tasks.sessions")

_MAX_FINAL_OUTPUT = 4000
_LOST_GRACE_S = 0.05
"""After a channel broke, the exit status may take so long before the child is killed."""


class HealthWatch:
    """Watches the heartbeats of a ready child; calls `changed` when they go missing and come back.

    A missing heartbeat is only reported: a long C call delays it, too.
    """

    def __init__(
        self,
        session_id: str,
        process: ChildProcess,
        timeouts: TimeoutSettings,
        changed: Callable[[Health], None],
    ) -> None:
        self.health = Health()
        self.heartbeat: wire.Heartbeat | None = None
        self.heartbeat_at: float | None = None
        self._session_id = session_id
        self._process = process
        self._timeouts = timeouts
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._pending: asyncio.TimerHandle | asyncio.Task[None] | None = None
        """The timer of the next heartbeat, then the report that it is missing."""

    def start(self) -> None:
        """Expect a heartbeat from now on."""
        self.stop()
        self._pending = self._loop.call_later(self._timeouts.unresponsive_s, self._on_missing)

    def stop(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None

    def on_heartbeat(self, heartbeat: wire.Heartbeat) -> None:
        self.heartbeat, self.heartbeat_at = heartbeat, time.monotonic()
        if self._pending is not None:
            self.start()
        if self.health.unresponsive:
            log.info("session %s responds again", self._session_id)
            self._become(Health())

    def _on_missing(self) -> None:
        self._pending = self._loop.create_task(self._report())

    async def _report(self) -> None:
        stack = await self._process.dump_stacks(self._timeouts.stack_s)
        process_state, cpu_s = self._process.process_stats()
        log.warning(
            "session %s is unresponsive: process state %s, %.1f s of CPU time, stack:\n%s",
            *(self._session_id, process_state, cpu_s, stack or "(none)"),
        )
        self._become(Health(True, process_state, cpu_s, stack))

    def _become(self, health: Health) -> None:
        self.health = health
        self._changed(health)


class LiveChild:
    """A child process with its channels. `on_end` is called once, when nothing of it is left."""

    def __init__(
        self,
        session_id: str,
        config: SessionConfig,
        process: ChildProcess,
        counters: Counters,
        interceptors: Interceptors,
        *,
        on_health: Callable[[Health], None],
        on_heartbeat: Callable[[wire.Heartbeat], None],
        on_session_output: Callable[[wire.Output], None],
        on_stream_end: Callable[[ExecutionStream, wire.Terminal], None],
        on_end: Callable[[KillReason], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._interceptors = interceptors
        self.on_session_output = on_session_output
        self.on_stream_end = on_stream_end
        self._on_heartbeat = on_heartbeat
        self._on_end = on_end
        self._kill_reason: KillReason | None = None
        self.is_over = False
        self.ready_at: float | None = None
        self.metadata: dict[str, Any] = {}
        """The negotiated protocol, once the child is ready."""
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.process = process
        self.channel = channel = Channel(process, config)
        self.send_control = channel.send_control
        self.post_bulk = channel.post_bulk
        self.send_bulk = channel.send_bulk
        self.streams = Streams(config.child.output, channel)
        self.piece_bytes = piece_bytes(config.child.max_frame_bytes)
        """The size of the pieces of a checkpoint, in both directions."""
        self.sending_pieces = asyncio.Lock()
        """The child keeps the pieces of one restore at a time."""
        self.router = Router(self, session_id, config.routing, counters, interceptors)
        self.stopper = Stopper(self, config.timeouts, counters)
        self.watch = HealthWatch(session_id, process, config.timeouts, on_health)
        sandbox, limits = config.child.sandbox, config.child.limits
        self.confinement = Confinement(self, sandbox, limits) if sandbox is not None else None
        channel.start(self.router.route, self.router.on_raw, self._on_broken)
        process.exited.add_done_callback(self._on_exit)
        self.send_control(
            wire.Hello(
                versions=config.protocol_versions,
                session_id=session_id,
                capabilities=wire.CAPABILITIES,
                config=config.child,
            )
        )

    # --- the start -----------------------------------------------------------------------------

    async def wait_ready(self) -> None:
        """Wait for the answer to Hello, then run the warmup; SessionStartFailed carries a stack.

        The warmup code runs as an execution; its output goes to the log.
        """
        timeouts, source = self._config.timeouts, self._config.warmup
        try:
            async with asyncio.timeout(timeouts.ready_s):
                await asyncio.shield(self._ready)
        except TimeoutError:
            raise await self._late(f"the child was not ready within {timeouts.ready_s} s") from None
        if source is None:
            return
        try:
            async with asyncio.timeout(timeouts.warmup_s):
                terminal = await self._warm_up(source)
        except TimeoutError:
            raise await self._late(f"the warmup ran longer than {timeouts.warmup_s} s") from None
        if isinstance(terminal, wire.Error):
            failure = SessionStartFailed(f"the warmup failed: {terminal.type}: {terminal.message}")
            failure.add_note(terminal.traceback)
            raise failure

    async def _warm_up(self, source: str) -> wire.Terminal:
        stream = self.streams.open("warmup")
        code = wire.Code(source=source, filename="<warmup>")
        execute = wire.Execute(execution_id=stream.execution_id, seq=stream.seq, payload=code)
        await self.send_bulk(execute)
        while not isinstance(message := await stream.next(), wire.Terminal):
            if isinstance(message, wire.Output):
                log.debug("warmup: %s", message.data.rstrip())
        return message

    async def _late(self, reason: str) -> SessionStartFailed:
        stack = await self.process.dump_stacks(self._config.timeouts.stack_s)
        failure = SessionStartFailed(reason)
        failure.add_note(f"its last stack:\n{stack or '(it gave none)'}")
        return failure

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
        self.on_stream_end(stream, terminal)

    @property
    def queues(self) -> QueueStats:
        streams = self.streams.values()
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
        # First, while the executions are still known: the bytes must find their owner.
        self.channel.drain()
        self.is_over = True
        final_output = self.process.read_final_output()
        self.channel.close()
        streams = list(self.streams.values())
        ran = () if reason.expected else tuple(stream.label for stream in streams)
        reason = dataclasses.replace(reason, stack=reason.stack or final_output, ran=ran)
        for stream in streams:
            terminal = self._terminal_of(stream, reason)
            self._interceptors.observe(terminal)
            self.router.end(stream, terminal)
        self.watch.stop()
        self.router.fail_replies(reason.message)
        self.router.fail_receivers(reason.message)
        if not self._ready.done():
            self._ready.set_exception(self._start_failure(reason))
            self._ready.exception()  # retrieved: the caller of `start` may have been cancelled
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

    def on_fault(self, fault: BadFrame) -> None:
        self.kill(KillReason(str(fault), wire.ErrorKind.LOST, expected=False))

    def on_heartbeat(self, heartbeat: wire.Heartbeat) -> None:
        self.watch.on_heartbeat(heartbeat)
        self._on_heartbeat(heartbeat)

    def on_ready(self, message: wire.Ready | wire.Rejected) -> None:
        if self._ready.done():
            return
        if isinstance(message, wire.Rejected):
            is_unconfined = message.kind == wire.ErrorKind.UNCONFINED
            refusal = Unconfined if is_unconfined else IncompatibleProtocol
            self.expect_exit(KillReason(message.message, wire.ErrorKind.LOST))
            self._ready.set_exception(refusal(f"{message.kind}: {message.message}"))
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
        self._ready.set_result(None)
