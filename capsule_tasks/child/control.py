"""The control thread: reads every frame, keeps the timers, never runs user code."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from capsule_tasks.child import stacks
from capsule_tasks.child.executors.end_reporter import EndReporter
from capsule_tasks.child.executors.executor import Executor
from capsule_tasks.child.executors.namespace import summarize, user_names
from capsule_tasks.child.executors.outcomes import plain_error
from capsule_tasks.child.io.input import InputRequests
from capsule_tasks.child.io.pump import OutputPump
from capsule_tasks.child.io.sink import OutputSink
from capsule_tasks.child.outbox import Outbox
from capsule_tasks.child.registry import Execution, Registry, Stage
from capsule_tasks.child.stopping.interrupter import Interrupter
from capsule_tasks.child.timers import Timers
from capsule_tasks.errors import ExecutionCancelled, FrameTooLarge
from capsule_tasks.protocol import messages
from capsule_tasks.protocol.codec import MessageDecoder, Unknown
from capsule_tasks.protocol.messages import ErrorKind, Execute, ToChild
from capsule_tasks.settings import ChildSettings
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


class ControlThread:
    """Serves the parent until that sends `Shutdown` or exits."""

    def __init__(
        self,
        control: socket.socket,
        bulk: socket.socket,
        outbox: Outbox,
        registry: Registry,
        executor: Executor,
        interrupter: Interrupter,
        inputs: InputRequests,
        end_reporter: EndReporter,
        session_sink: OutputSink,
        pump: OutputPump,
        namespace: dict[str, object],
        config: ChildSettings,
        orphaned: Callable[[], None],
    ) -> None:
        self._control = control
        self._bulk = bulk
        self._outbox = outbox
        self._registry = registry
        self._executor = executor
        self._interrupter = interrupter
        self._inputs = inputs
        self._end_reporter = end_reporter
        self._session_sink = session_sink
        self._pump = pump
        self._namespace = namespace
        self._config = config
        self._orphaned = orphaned
        self._timers = Timers()
        self._ack_by: float | None = None
        """When the acknowledgement of the last execution must be sent, unless its end took it."""
        self._stopping = False
        self._handlers: dict[type, Callable[[Any], object]] = {
            Execute: self._on_execute,
            messages.Checkpoint: self._on_job,
            messages.Restore: self._on_job,
            messages.Cancel: self._on_cancel,
            messages.Interrupt: self._on_interrupt,
            messages.SoftLimit: self._on_soft_limit,
            messages.Credit: self._on_credit,
            messages.InputResponse: self._inputs.respond,
            messages.NamespaceRequest: self._on_namespace,
            messages.StackRequest: self._on_stack,
            messages.Shutdown: self._on_shutdown,
            messages.Unsupported: self._on_unsupported,
        }

    def start(self) -> None:
        threading.Thread(target=self._run, name="capsule-control", daemon=True).start()

    def _run(self) -> None:
        try:
            self._timers.after(self._config.diagnostics.heartbeat_interval_s, self._beat)
            self._serve()
        except BaseException:
            log.exception("control thread of the child failed; exiting")
            os._exit(70)

    def _serve(self) -> None:
        ceiling = self._config.max_frame_bytes
        channels: list[tuple[socket.socket, MessageDecoder[ToChild]]] = [
            (sock, MessageDecoder(ToChild, ceiling)) for sock in (self._control, self._bulk)
        ]
        poller = select.poll()
        for sock, _ in channels:
            poller.register(sock, select.POLLIN)
        while True:
            readable = {fd for fd, _ in poller.poll(self._timeout_ms())}
            if self._bulk.fileno() in readable:
                # The answer of `poll` may be old, if a C call kept the GIL meanwhile. A cancel on
                # the control channel must be read before the execute on bulk that it is for.
                readable.update(fd for fd, _ in poller.poll(0))
            for sock, decoder in channels:  # control first
                if sock.fileno() in readable:
                    self._read(sock, decoder)

    def _timeout_ms(self) -> float | None:
        due = self._timers.run_due()
        retry = self._interrupter.retry_due(time.monotonic())
        times = [moment for moment in (due, retry, self._flush_due_ack()) if moment is not None]
        if not times:
            return None
        return min(max(0.0, (min(times) - time.monotonic()) * 1000), _MAX_POLL_MS)

    def _flush_due_ack(self) -> float | None:
        """Have the pump send an acknowledgement that is due; when to check again."""
        if self._ack_by is not None and time.monotonic() >= self._ack_by:
            self._ack_by = None
            if self._outbox.has_deferred:
                self._pump.add(self._outbox)
        return self._ack_by

    def _read(self, sock: socket.socket, decoder: MessageDecoder[ToChild]) -> None:
        try:
            data = sock.recv(_READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            self._orphaned()
        for message in decoder.feed(data):
            if isinstance(message, Unknown):
                self._outbox.control(
                    messages.Unsupported(what=message.what, in_reply_to=message.id)
                )
            else:
                self._handlers[type(message)](message)

    # --- work ----------------------------------------------------------------------------------

    def _on_execute(self, message: Execute) -> None:
        registry = self._registry
        early = registry.take_early_cancels(message.seq)
        refusal = self._refusal(message)
        if refusal is not None:
            self._outbox.bulk(refusal)
            for cancel in early:
                self._end_reporter.reply(cancel, interrupted=False)
            return
        execution = self._accept(message)
        execution.queued = bool(registry.all())
        if early or not self._executor.acknowledges:
            self._outbox.control(
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
            self._end_reporter.refuse(execution, ErrorKind.CANCELLED, ErrorKind.CANCELLED.value)
            return
        if self._executor.ack_delay_s and not execution.queued:
            self._ack_by = execution.ack_by = time.monotonic() + self._executor.ack_delay_s
        registry.add(execution)
        # Checked again after `add`: a waiting execution may have started since `_refusal`, before
        # this one was in the queue, and then its start has not refused this one.
        blocking = registry.blocking
        if message.on_busy == "refuse" and blocking not in (None, execution):
            self._end_reporter.refuse(execution, ErrorKind.BUSY, f"{blocking.id} is running")
        limit = self._config.limits.cpu_time_s
        if limit is not None:
            self._watch_cpu(execution, limit)
        self._executor.wake()

    def _refusal(self, message: Execute) -> messages.Error | None:
        """The answer to an execution that is not accepted."""
        registry, blocking = self._registry, self._registry.blocking
        execution_id = message.execution_id
        if self._stopping:
            return plain_error(execution_id, ErrorKind.SHUTDOWN, "SessionLost", "shutdown")
        if registry.get(execution_id) is not None:
            reason = f"an execution {execution_id!r} exists already"
        elif message.on_busy == "refuse" and blocking is not None:
            reason = f"{blocking.id} is running"
        elif len(registry.waiting) >= self._config.executor.max_waiting:
            reason = f"{len(registry.waiting)} executions are waiting already"
        else:
            return None
        return plain_error(execution_id, ErrorKind.BUSY, "SessionBusy", reason)

    def _on_job(self, message: messages.Checkpoint | messages.Restore) -> None:
        execution = Execution(message.id, message, self._session_sink)
        self._registry.add(execution)
        if self._registry.blocking is not None:
            reason = f"{self._registry.blocking.id} is running"
            self._end_reporter.refuse(execution, ErrorKind.BUSY, reason)
        self._executor.wake()

    def _accept(self, message: Execute) -> Execution:
        sink = OutputSink(
            message.execution_id,
            self._outbox,
            self._config.output,
            self._pump,
            late=self._session_sink,
            limit_bytes=self._config.limits.output_bytes,
        )
        return Execution(message.execution_id, message, sink)

    def _watch_cpu(self, execution: Execution, limit_s: float) -> None:
        """Check the CPU clock again when the limit can have been reached."""
        if execution.stage is Stage.ENDED:
            return
        left = limit_s
        if execution.stage is Stage.RUNNING:
            left -= time.process_time() - execution.cpu_at_start_s
        if left > 0:
            self._timers.after(max(0.001, left), lambda: self._watch_cpu(execution, limit_s))
            return
        reason = f"CPU time limit of {limit_s} s: {limit_s - left:.3f} s were used"
        execution.stop_reason = reason
        self._stop(execution, ErrorKind.LIMIT, lambda: CpuLimitReached(reason))

    # --- stopping ------------------------------------------------------------------------------

    def _on_cancel(self, message: messages.Cancel) -> None:
        execution = self._registry.target_of(message)
        if execution is None and self._registry.remember_early_cancel(message):
            return
        if execution is None or not self._registry.add_cancel(execution, message):
            self._end_reporter.reply(message, interrupted=False)
            return
        self._stop(execution, ErrorKind.CANCELLED, ExecutionCancelled)
        execution.sink.add_credit(message.credit)

    def _stop(
        self, execution: Execution, kind: ErrorKind, make: Callable[[], BaseException]
    ) -> None:
        """End a waiting execution, interrupt a running one; a second stop changes nothing."""
        if self._end_reporter.refuse(execution, kind, kind.value):
            self._executor.wake()  # executions behind it may start now
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
            self._interrupter.forget(execution)
            return make()

        def raise_() -> BaseException | None:
            nonlocal raised
            raised = not cancelled
            return make() if raised else None

        def interrupt_blocked_loop() -> None:
            if not cancelled and execution.stage is Stage.RUNNING:
                self._interrupter.request_stop(execution, raise_)

        if self._executor.cancel_task(execution, cancel):
            self._timers.after(self._config.executor.unresponsive_loop_s, interrupt_blocked_loop)
        else:
            self._interrupter.request_stop(execution, raise_)

    def _on_interrupt(self, message: messages.Interrupt) -> None:
        targets = [
            execution
            for execution in self._registry.running()
            if message.execution_id in (None, execution.id)
        ]
        for execution in targets:
            if execution.stop_kind is not None:
                continue  # a cancel is under way, and code that handles Ctrl-C must not swallow it
            self._interrupt(execution, KeyboardInterrupt)
        self._reply(
            messages.InterruptReply(
                in_reply_to=message.id,
                done="interrupted" if targets else "not_running",
                execution_ids=tuple(execution.id for execution in targets),
            )
        )

    def _on_soft_limit(self, message: messages.SoftLimit) -> None:
        execution = self._registry.get(message.execution_id)
        if execution and execution.stop_kind is None and execution.seq == message.seq:
            self._interrupt(execution, self._executor.soft_limit)

    def _on_shutdown(self, message: messages.Shutdown) -> None:
        self._stopping = True
        asking = self._inputs.close()
        for execution in self._registry.all():
            if execution.id in asking and execution.stop_kind is None:
                self._stop_after_eof(execution)
            else:
                self._stop(execution, ErrorKind.SHUTDOWN, ExecutionCancelled)
            if execution.sink is not self._session_sink:
                execution.sink.add_credit(message.credit)
        self._executor.stop()

    def _stop_after_eof(self, execution: Execution) -> None:
        """Stop an execution that asks for input, unless the EOFError that it gets ends it soon."""
        execution.stop_kind, execution.interrupted = ErrorKind.SHUTDOWN, True
        self._timers.after(
            _STOP_AFTER_EOF_S, lambda: self._interrupt(execution, ExecutionCancelled)
        )

    # --- requests ------------------------------------------------------------------------------

    def _on_credit(self, message: messages.Credit) -> None:
        if message.execution_id is None:
            self._session_sink.add_credit(message.bytes)
        elif (execution := self._registry.get(message.execution_id)) is not None:
            execution.sink.add_credit(message.bytes)

    def _on_namespace(self, message: messages.NamespaceRequest) -> None:
        total, entries = summarize(self._namespace, self._config.diagnostics)
        self._reply(messages.NamespaceSummary(in_reply_to=message.id, total=total, entries=entries))

    def _on_stack(self, message: messages.StackRequest) -> None:
        occupant = self._registry.blocking or self._executor.current()
        found = stacks.collect(self._registry.running(), occupant, message.execution_id)
        self._reply(messages.StackReply(in_reply_to=message.id, stacks=found))

    def _reply(
        self, reply: messages.InterruptReply | messages.NamespaceSummary | messages.StackReply
    ) -> None:
        """Answer a request; a reply that does not fit into a frame fails that request alone."""
        try:
            self._outbox.control(reply)
        except FrameTooLarge as fault:
            self._outbox.control(
                messages.ReplyTooLarge(
                    in_reply_to=reply.in_reply_to, size=fault.size, ceiling=fault.ceiling
                )
            )

    def _on_unsupported(self, message: messages.Unsupported) -> None:
        log.warning("the parent did not understand a %r message", message.what)

    def _beat(self) -> None:
        self._timers.after(self._config.diagnostics.heartbeat_interval_s, self._beat)
        running = self._registry.running()
        heartbeat = messages.Heartbeat(
            rss_bytes=own_resident_bytes(),
            cpu_s=time.process_time(),
            namespace_size=user_names(self._namespace),
            running=tuple(execution.id for execution in running),
            waiting=len(self._registry.waiting),
            output_backlog_bytes=sum(execution.sink.backlog for execution in running),
            threads=threading.active_count(),
        )
        try:
            self._outbox.control(heartbeat)
        except FrameTooLarge:  # thousands of ids; without them it still proves that the child lives
            heartbeat.running = ()
            self._outbox.control(heartbeat)
