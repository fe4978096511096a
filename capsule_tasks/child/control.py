"""The control thread: reads every frame, keeps the timers, never runs user code."""

from __future__ import annotations

import logging
import os
import sched
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from capsule_tasks.child import stacks
from capsule_tasks.child.executors.end_reporter import EndReporter
from capsule_tasks.child.executors.executor import Executor
from capsule_tasks.child.executors.namespace import summarize, user_names
from capsule_tasks.child.executors.outcomes import plain_error
from capsule_tasks.child.io.input import InputRequests
from capsule_tasks.child.io.sink import OutputSink
from capsule_tasks.child.outbox import Outbox, OwnThread
from capsule_tasks.child.registry import Execution, Registry, Stage
from capsule_tasks.child.stopping.interrupter import Interrupter
from capsule_tasks.errors import ExecutionCancelled, FrameTooLarge
from capsule_tasks.protocol import messages
from capsule_tasks.protocol.codec import MessageDecoder, Unknown
from capsule_tasks.protocol.messages import ErrorKind, Execute, ToChild
from capsule_tasks.settings import ChildSettings
from capsule_tasks.system.family import kill_descendants, kill_own_group
from capsule_tasks.system.usage import own_resident_bytes

_READ_BYTES = 64 * 1024
"""Small enough for malloc's heap: a larger buffer costs an mmap and a munmap with each read."""
_MAX_POLL_MS = 3_600_000.0
"""`poll` refuses a timeout that does not fit into a C int, about 25 days."""

_STOP_AFTER_EOF_S = 1.0
"""At shutdown code that asks for input gets EOFError. It is stopped if it still runs then."""

log = logging.getLogger("capsule_tasks.child")


class CpuLimitReached(ExecutionCancelled):
    """An execution used more CPU time than it may."""


class ControlThread(msgspec.Struct, kw_only=True, eq=False):
    """Serves the parent until that sends `Shutdown` or exits."""

    outbox: Outbox
    registry: Registry
    executor: Executor
    interrupter: Interrupter
    inputs: InputRequests
    end_reporter: EndReporter
    session_sink: OutputSink
    namespace: dict[str, object]
    config: ChildSettings
    timers: sched.scheduler
    ack_by: float | None = None
    """When the acknowledgement of the last execution must be sent, unless its end took it."""
    is_stopping: bool = False
    restoring: tuple[str, list[bytes]] = ("", [])
    """The id of the restore whose pieces are arriving, and these."""
    handlers: dict[type, Callable[[Any], object]] = {}

    def __post_init__(self) -> None:
        self.handlers = {
            Execute: self._on_execute,
            messages.Checkpoint: self._on_checkpoint_or_restore,
            messages.RestorePiece: self._on_restore_piece,
            messages.Restore: self._on_checkpoint_or_restore,
            messages.Cancel: self._on_cancel,
            messages.Interrupt: self._on_interrupt,
            messages.SoftLimit: self._on_soft_limit,
            messages.Credit: self._on_credit,
            messages.InputResponse: self.inputs.respond,
            messages.NamespaceRequest: self._on_namespace,
            messages.StackRequest: self._on_stack,
            messages.Shutdown: self._on_shutdown,
            messages.Unsupported: lambda message: log.warning(
                "the parent did not understand a %r message", message.what
            ),
        }

    def start(self) -> None:
        OwnThread(target=self._run, name="capsule-control", daemon=True).start()

    def _run(self) -> None:
        try:
            self.timers.enter(self.config.diagnostics.heartbeat_interval_s, 0, self._beat)
            self._serve()
        except BaseException:
            log.exception("control thread of the child failed; exiting")
            os._exit(70)

    def _serve(self) -> None:
        ceiling = self.config.max_frame_bytes
        channels = [(sock, MessageDecoder(ToChild, ceiling)) for sock in self.outbox.channels]
        poller = select.poll()
        for sock, _ in channels:
            poller.register(sock, select.POLLIN)
        while True:
            readable = {fd for fd, _ in poller.poll(self._timeout_ms())}
            if channels[1][0].fileno() in readable:  # bulk
                # The answer of `poll` may be old, if a C call kept the GIL meanwhile. A cancel on
                # the control channel must be read before the execute on bulk that it is for.
                readable.update(fd for fd, _ in poller.poll(0))
            for sock, decoder in channels:  # control first
                if sock.fileno() in readable:
                    self._read(sock, decoder)

    def _timeout_ms(self) -> float:
        """Make the calls that are due; how long until the next one is."""
        wait_s = self.timers.run(blocking=False) or 0.0  # the heartbeat is always among them
        if self.ack_by is not None:
            ack_in_s = self.ack_by - time.monotonic()
            if ack_in_s > 0:
                wait_s = min(wait_s, ack_in_s)
            else:
                self.ack_by = None
                self.outbox.flush_deferred_soon()
        return min(wait_s * 1000, _MAX_POLL_MS)

    def _read(self, sock: socket.socket, decoder: MessageDecoder[ToChild]) -> None:
        try:
            data = sock.recv(_READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            _end_with_parent()
        for message in decoder.feed(data):
            if isinstance(message, Unknown):
                self.outbox.control(messages.Unsupported(what=message.what, in_reply_to=message.id))
            else:
                self.handlers[type(message)](message)

    # --- work ----------------------------------------------------------------------------------

    def _on_execute(self, message: Execute) -> None:
        registry = self.registry
        early = registry.take_early_cancels(message.seq)
        refusal = self._refusal(message)
        if refusal is not None:
            self.outbox.bulk(refusal)
            for cancel in early:
                self.end_reporter.reply(cancel, interrupted=False)
            return
        sink = OutputSink(
            message.execution_id,
            self.outbox,
            self.config.output,
            late=self.session_sink,
            limit_bytes=self.config.limits.output_bytes,
        )
        execution = Execution(message.execution_id, message, sink)
        execution.queued = bool(registry.all())
        if early or not self.executor.acknowledges:
            self.outbox.control(
                messages.Ack(
                    ack_of=message.id,
                    execution_id=message.execution_id,
                    accepted_at=time.monotonic(),
                    queued=execution.queued,
                    seq=message.seq,
                )
            )
        if early:  # before `add`: once the main thread sees the execution, it may start it
            execution.cancels += early
            self.end_reporter.refuse(execution, ErrorKind.CANCELLED, ErrorKind.CANCELLED.value)
            return
        if self.executor.ack_delay_s and not execution.queued:
            self.ack_by = execution.ack_by = time.monotonic() + self.executor.ack_delay_s
        registry.add(execution)
        # Checked again after `add`: a waiting execution may have started since `_refusal`, before
        # this one was in the queue, and then its start has not refused this one.
        blocking = registry.blocking
        if message.on_busy == "refuse" and blocking not in (None, execution):
            self.end_reporter.refuse(execution, ErrorKind.BUSY, f"{blocking.id} is running")
        limit = self.config.limits.cpu_time_s
        if limit is not None:
            self._watch_cpu(execution, limit)
        self.executor.wake()

    def _refusal(self, message: Execute) -> messages.Error | None:
        """The answer to an execution that is not accepted."""
        registry, blocking = self.registry, self.registry.blocking
        execution_id = message.execution_id
        if self.is_stopping:
            return plain_error(execution_id, ErrorKind.SHUTDOWN, "SessionLost", "shutdown")
        if registry.get(execution_id) is not None:
            reason = f"an execution {execution_id!r} exists already"
        elif message.on_busy == "refuse" and blocking is not None:
            reason = f"{blocking.id} is running"
        elif len(registry.waiting) >= self.config.executor.max_waiting:
            reason = f"{len(registry.waiting)} executions are waiting already"
        else:
            return None
        return plain_error(execution_id, ErrorKind.BUSY, "SessionBusy", reason)

    def _on_checkpoint_or_restore(self, message: messages.Checkpoint | messages.Restore) -> None:
        execution = Execution(message.id, message, self.session_sink)
        if isinstance(message, messages.Restore):
            execution.pieces = self._take_pieces(message.id)
        self.registry.add(execution)
        if self.registry.blocking is not None:
            reason = f"{self.registry.blocking.id} is running"
            self.end_reporter.refuse(execution, ErrorKind.BUSY, reason)
        self.executor.wake()

    def _on_restore_piece(self, message: messages.RestorePiece) -> None:
        """Keep a piece. The parent sends one restore after the other: what is left of another one
        was given up.
        """
        if self.restoring[0] != message.restore_id:
            self.restoring = message.restore_id, []
        self.restoring[1].append(message.data)

    def _take_pieces(self, restore_id: str) -> list[bytes]:
        (of, pieces), self.restoring = self.restoring, ("", [])
        return pieces if of == restore_id else []

    def _watch_cpu(self, execution: Execution, limit_s: float) -> None:
        """Check the CPU clock again when the limit can have been reached."""
        if execution.stage is Stage.ENDED:
            return
        left = limit_s
        if execution.stage is Stage.RUNNING:
            left -= time.process_time() - execution.cpu_at_start_s
        if left > 0:
            self.timers.enter(max(0.001, left), 0, self._watch_cpu, (execution, limit_s))
            return
        reason = f"CPU time limit of {limit_s} s: {limit_s - left:.3f} s were used"
        execution.stop_reason = reason
        self._stop(execution, ErrorKind.LIMIT, lambda: CpuLimitReached(reason))

    # --- stopping ------------------------------------------------------------------------------

    def _on_cancel(self, message: messages.Cancel) -> None:
        if self.restoring[0] == message.execution_id:
            self._take_pieces(message.execution_id)
        execution = self.registry.target_of(message)
        if execution is None and self.registry.remember_early_cancel(message):
            return
        if execution is None or not self.registry.add_cancel(execution, message):
            self.end_reporter.reply(message, interrupted=False)
            return
        self._stop(execution, ErrorKind.CANCELLED, ExecutionCancelled)
        execution.sink.add_credit(message.credit)

    def _stop(
        self, execution: Execution, kind: ErrorKind, make: Callable[[], BaseException]
    ) -> None:
        """End a waiting execution, interrupt a running one; a second stop changes nothing."""
        if self.end_reporter.refuse(execution, kind, kind.value):
            self.executor.wake()  # executions behind it may start now
            return
        if execution.stop_kind is not None:
            return
        execution.stop_kind = kind

        def make_and_mark() -> BaseException:
            execution.interrupted = True
            execution.sink.resume()
            return make()

        execution.sink.pause()
        self._interrupt(execution, make_and_mark)

    def _interrupt(self, execution: Execution, make: Callable[[], BaseException]) -> None:
        """Raise in an execution the error that `make` makes.

        A coroutine is cancelled; if its loop does not run for a while, because the code blocks it,
        the error is raised by a signal. Only one of both happens, however late: after the first,
        the second would be raised in the coroutine's `finally` block.
        """
        cancelled = raised = False

        def cancel() -> BaseException | None:
            nonlocal cancelled
            cancelled = not raised
            if raised:
                return None
            self.interrupter.forget(execution)
            return make()

        def raise_() -> BaseException | None:
            nonlocal raised
            raised = not cancelled
            return make() if raised else None

        def interrupt_blocked_loop() -> None:
            if not cancelled and execution.stage is Stage.RUNNING:
                self.interrupter.request_stop(execution, raise_)

        if self.executor.cancel_task(execution, cancel):
            self.timers.enter(self.config.executor.unresponsive_loop_s, 0, interrupt_blocked_loop)
        else:
            self.interrupter.request_stop(execution, raise_)

    def _on_interrupt(self, message: messages.Interrupt) -> None:
        targets = [
            execution
            for execution in self.registry.running()
            if message.execution_id in (None, execution.id)
        ]
        for execution in targets:
            # Code that handles Ctrl-C must not swallow a cancel that is under way.
            if execution.stop_kind is None:
                self._interrupt(execution, KeyboardInterrupt)
        self._reply(
            messages.InterruptReply(
                in_reply_to=message.id,
                done="interrupted" if targets else "not_running",
                execution_ids=tuple(execution.id for execution in targets),
            )
        )

    def _on_soft_limit(self, message: messages.SoftLimit) -> None:
        execution = self.registry.get(message.execution_id)
        if execution and execution.stop_kind is None and execution.seq == message.seq:
            self._interrupt(execution, self.executor.soft_limit)

    def _on_shutdown(self, message: messages.Shutdown) -> None:
        self.is_stopping = True
        asking = self.inputs.close()
        for execution in self.registry.all():
            if execution.id in asking and execution.stop_kind is None:
                # The EOFError that it gets may end it soon; else it is stopped.
                execution.stop_kind, execution.interrupted = ErrorKind.SHUTDOWN, True
                stop = (execution, ExecutionCancelled)
                self.timers.enter(_STOP_AFTER_EOF_S, 0, self._interrupt, stop)
            else:
                self._stop(execution, ErrorKind.SHUTDOWN, ExecutionCancelled)
            if execution.sink is not self.session_sink:
                execution.sink.add_credit(message.credit)
        self.executor.stop()

    # --- requests ------------------------------------------------------------------------------

    def _on_credit(self, message: messages.Credit) -> None:
        if message.execution_id is None:
            self.session_sink.add_credit(message.bytes)
        elif (execution := self.registry.get(message.execution_id)) is not None:
            execution.sink.add_credit(message.bytes)

    def _on_namespace(self, message: messages.NamespaceRequest) -> None:
        total, entries = summarize(self.namespace, self.config.diagnostics)
        self._reply(messages.NamespaceSummary(in_reply_to=message.id, total=total, entries=entries))

    def _on_stack(self, message: messages.StackRequest) -> None:
        occupant = self.registry.blocking or self.executor.current()
        found = stacks.collect(self.registry.running(), occupant, message.execution_id)
        self._reply(messages.StackReply(in_reply_to=message.id, stacks=found))

    def _reply(self, reply: messages.Reply) -> None:
        """Answer a request; a reply that does not fit into a frame fails that request alone."""
        try:
            self.outbox.control(reply)
        except FrameTooLarge as fault:
            self.outbox.control(
                messages.ReplyTooLarge(
                    in_reply_to=reply.in_reply_to, size=fault.size, ceiling=fault.ceiling
                )
            )

    def _beat(self) -> None:
        self.timers.enter(self.config.diagnostics.heartbeat_interval_s, 0, self._beat)
        running = self.registry.running()
        heartbeat = messages.Heartbeat(
            rss_bytes=own_resident_bytes(),
            cpu_s=time.process_time(),
            namespace_size=user_names(self.namespace),
            running=tuple(execution.id for execution in running),
            waiting=len(self.registry.waiting),
            output_backlog_bytes=sum(execution.sink.backlog for execution in running),
            threads=threading.active_count(),
        )
        try:
            self.outbox.control(heartbeat)
        except FrameTooLarge:  # thousands of ids; without them it still proves that the child lives
            heartbeat.running = ()
            self.outbox.control(heartbeat)


def _end_with_parent() -> NoReturn:
    """End with the parent, and every descendant, too."""
    kill_descendants(os.getpid())
    kill_own_group()
    raise SystemExit
