"""The control thread: reads every frame, keeps the timers, never runs user code."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable

from capsule_tasks.child import stacks
from capsule_tasks.child.executors.code import Lane
from capsule_tasks.child.executors.end_reporter import EndReporter
from capsule_tasks.child.executors.namespace import summarize, user_names
from capsule_tasks.child.executors.outcomes import plain_error
from capsule_tasks.child.io.input import InputRequests
from capsule_tasks.child.io.output import Pump, Sink
from capsule_tasks.child.outbox import Outbox
from capsule_tasks.child.registry import Execution, Registry, Stage
from capsule_tasks.child.stopping.interrupts import Interrupter
from capsule_tasks.errors import ExecutionCancelled, FrameTooLarge
from capsule_tasks.protocol.codec import MessageDecoder, Unknown
from capsule_tasks.protocol.messages import (
    Ack,
    Cancel,
    Checkpoint,
    Credit,
    Error,
    ErrorKind,
    Execute,
    Heartbeat,
    InputResponse,
    Interrupt,
    InterruptReply,
    NamespaceRequest,
    NamespaceSummary,
    ReplyTooLarge,
    Restore,
    Shutdown,
    SoftLimit,
    StackReply,
    StackRequest,
    ToChild,
    Unsupported,
)
from capsule_tasks.settings import ChildSettings
from capsule_tasks.system.portable import PROC

_READ_BYTES = 64 * 1024
"""Small enough for malloc's heap: a larger buffer costs a mapping, made and unmade, each read."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LONGEST_POLL_MS = 3_600_000.0
"""`poll` refuses what does not fit into a C int, about 25 days."""

_STOP_AFTER_EOF_S = 1.0
"""At shutdown code that asks for input gets EOFError; so long later it is stopped all the same."""

log = logging.getLogger("capsule_tasks.child")


class CpuLimitReached(ExecutionCancelled):
    """An execution used more CPU time than it may."""


class Timers:
    """Calls that are due at a time, for one thread."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time.monotonic() + delay_s, next(self._order), call))

    def run_due(self) -> float | None:
        """Make the calls that are due; when the next one is, or None."""
        while self._heap and self._heap[0][0] <= time.monotonic():
            heapq.heappop(self._heap)[2]()
        return self._heap[0][0] if self._heap else None


class ControlThread:
    """Serves the parent until it says Shutdown or is gone."""

    def __init__(
        self,
        control: socket.socket,
        bulk: socket.socket,
        outbox: Outbox,
        registry: Registry,
        lane: Lane,
        interrupter: Interrupter,
        inputs: InputRequests,
        endings: EndReporter,
        session_sink: Sink,
        pump: Pump,
        namespace: dict[str, object],
        config: ChildSettings,
        orphaned: Callable[[], None],
    ) -> None:
        self._control = control
        self._bulk = bulk
        self._outbox = outbox
        self._registry = registry
        self._lane = lane
        self._interrupter = interrupter
        self._inputs = inputs
        self._endings = endings
        self._session_sink = session_sink
        self._pump = pump
        self._namespace = namespace
        self._config = config
        self._orphaned = orphaned
        self._timers = Timers()
        self._ack_by: float | None = None
        """When the last execution that began must be acknowledged, if its end has not done so."""
        self._stopping = False
        self._handlers: dict[type, Callable[..., None]] = {
            Execute: self._on_execute,
            Checkpoint: self._on_job,
            Restore: self._on_job,
            Cancel: self._on_cancel,
            Interrupt: self._on_interrupt,
            SoftLimit: self._on_soft_limit,
            Credit: self._on_credit,
            InputResponse: self._on_input_response,
            NamespaceRequest: self._on_namespace,
            StackRequest: self._on_stack,
            Shutdown: self._on_shutdown,
            Unsupported: self._on_unsupported,
        }

    def start(self) -> None:
        threading.Thread(target=self._run, name="capsule-control", daemon=True).start()

    def _run(self) -> None:
        try:
            self._timers.after(self._config.diagnostics.heartbeat_interval_s, self._beat)
            self._serve()
        except BaseException:
            log.exception("the control thread failed; the child ends")
            os._exit(70)

    def _serve(self) -> None:
        ceiling = self._config.max_frame_bytes
        lanes: list[tuple[socket.socket, MessageDecoder[ToChild]]] = [
            (sock, MessageDecoder(ToChild, ceiling)) for sock in (self._control, self._bulk)
        ]
        poller = select.poll()
        for sock, _ in lanes:
            poller.register(sock, select.POLLIN)
        while True:
            readable = {fd for fd, _ in poller.poll(self._timeout_ms())}
            if self._bulk.fileno() in readable:
                # A call that kept the GIL may have kept this answer back for long: a cancel that
                # came meanwhile has to be heard before the execution that it is for.
                readable.update(fd for fd, _ in poller.poll(0))
            for sock, decoder in lanes:  # control first
                if sock.fileno() in readable:
                    self._read(sock, decoder)

    def _timeout_ms(self) -> float | None:
        due = self._timers.run_due()
        retry = self._interrupter.tick(time.monotonic())
        times = [moment for moment in (due, retry, self._look_at_ack()) if moment is not None]
        if not times:
            return None
        return min(max(0.0, (min(times) - time.monotonic()) * 1000), _LONGEST_POLL_MS)

    def _look_at_ack(self) -> float | None:
        """Have an acknowledgement sent that has waited long enough; when to look again."""
        if self._ack_by is not None and time.monotonic() >= self._ack_by:
            self._ack_by = None
            if self._outbox.is_holding:
                self._pump.gather(self._outbox)
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
                self._outbox.control(Unsupported(what=message.what, in_reply_to=message.id))
            else:
                self._handlers[type(message)](message)

    # --- work ----------------------------------------------------------------------------------

    def _on_execute(self, message: Execute) -> None:
        registry = self._registry
        registry.note_seq(message.seq)
        early = registry.take_early_cancels(message.seq)
        refusal = self._refusal(message)
        if refusal is not None:
            self._outbox.bulk(refusal)
            for cancel in early:
                self._endings.reply(cancel, interrupted=False)
            return
        execution = self._accept(message.execution_id, message)
        execution.queued = bool(registry.all())
        if early or not self._lane.acknowledges:
            self._outbox.control(
                Ack(
                    ack_of=message.id,
                    execution_id=message.execution_id,
                    accepted_at=time.monotonic(),
                    queued=execution.queued,
                    seq=message.seq,
                )
            )
        if early:  # it ends before the main thread can see it, or that might begin it
            execution.cancels += early
            self._endings.refuse(execution, ErrorKind.CANCELLED, ErrorKind.CANCELLED.value)
            return
        if self._lane.ack_delay_s and not execution.queued:
            self._ack_by = execution.ack_by = time.monotonic() + self._lane.ack_delay_s
        registry.add(execution)
        blocking = registry.blocking  # once more: it may have begun since the first look
        if message.on_busy == "refuse" and blocking not in (None, execution):
            self._endings.refuse(execution, ErrorKind.BUSY, f"{blocking.id} is running")
        limit = self._config.limits.cpu_time_s
        if limit is not None:
            self._watch_cpu(execution, limit)
        self._lane.ring()

    def _refusal(self, message: Execute) -> Error | None:
        registry, blocking = self._registry, self._registry.blocking
        why = None
        if registry.get(message.execution_id) is not None:
            why = f"an execution {message.execution_id!r} exists already"
        elif message.on_busy == "refuse" and blocking is not None:
            why = f"{blocking.id} is running"
        elif len(registry.waiting) >= self._config.executor.max_waiting:
            why = f"{len(registry.waiting)} executions are waiting already"
        if self._stopping:
            return plain_error(message.execution_id, ErrorKind.SHUTDOWN, "SessionLost", "shutdown")
        if why is None:
            return None
        return plain_error(message.execution_id, ErrorKind.BUSY, "SessionBusy", why)

    def _on_job(self, message: Checkpoint | Restore) -> None:
        execution = self._accept(message.id, message)
        self._registry.add(execution)
        if self._registry.blocking is not None:
            why = f"{self._registry.blocking.id} is running"
            self._endings.refuse(execution, ErrorKind.BUSY, why)
        self._lane.ring()

    def _accept(self, execution_id: str, work: Execute | Checkpoint | Restore) -> Execution:
        sink = Sink(
            execution_id if isinstance(work, Execute) else None,
            self._outbox,
            self._config.output,
            self._pump,
            late=self._session_sink,
            limit_bytes=self._config.limits.output_bytes,
        )
        if not isinstance(work, Execute):
            sink = self._session_sink
        return Execution(execution_id, work, sink)

    def _watch_cpu(self, execution: Execution, limit_s: float) -> None:
        """Look at the CPU clock no sooner than the limit can have been reached."""

        def look() -> None:
            if execution.stage is Stage.ENDED:
                return
            if execution.stage is Stage.WAITING:
                self._timers.after(limit_s, look)
                return
            used = time.process_time() - execution.cpu_begun_s
            if used < limit_s:
                self._timers.after(max(0.001, limit_s - used), look)
                return
            why = f"CPU time limit of {limit_s} s: {used:.3f} s were used"
            execution.stop_reason = why
            self._stop(execution, ErrorKind.LIMIT, lambda: CpuLimitReached(why))

        look()

    # --- stopping ------------------------------------------------------------------------------

    def _on_cancel(self, message: Cancel) -> None:
        execution = self._registry.target_of(message)
        if execution is None:
            if not self._registry.remember_early_cancel(message):
                self._endings.reply(message, interrupted=False)
            return
        if not self._registry.note_cancel(execution, message):
            self._endings.reply(message, interrupted=False)
            return
        self._stop(execution, ErrorKind.CANCELLED, ExecutionCancelled)
        execution.sink.add_credit(message.credit)

    def _stop(
        self, execution: Execution, kind: ErrorKind, make: Callable[[], BaseException]
    ) -> None:
        """End it now if it waits, else have it stopped; a second stop changes nothing."""
        if self._endings.refuse(execution, kind, kind.value):
            self._lane.ring()  # it may have held up those behind it
            return
        if execution.stop_kind is not None:
            return
        execution.stop_kind = kind

        def make_and_mark() -> BaseException:
            execution.interrupted = True
            execution.sink.release()
            return make()

        execution.sink.hold()
        self._hit(execution, make_and_mark)

    def _hit(self, execution: Execution, make: Callable[[], BaseException]) -> None:
        """Raise in it what `make` makes; in a coroutine as a cancel, while its loop turns.

        A coroutine is hit in one way only, also if it is late: the other would hit its `finally`.
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

        def insist() -> None:
            if not cancelled and execution.stage is Stage.RUNNING:
                self._interrupter.aim(execution, raise_)

        if self._lane.cancel_task(execution, cancel):
            self._timers.after(self._config.executor.unresponsive_loop_s, insist)
        else:
            self._interrupter.aim(execution, raise_)

    def _on_interrupt(self, message: Interrupt) -> None:
        targets = [
            execution
            for execution in self._registry.running()
            if message.execution_id in (None, execution.id)
        ]
        for execution in targets:
            if execution.stop_kind is not None:
                continue  # a cancel is on its way, which the code may not take for a Ctrl-C
            self._hit(execution, KeyboardInterrupt)
        self._reply(
            InterruptReply(
                in_reply_to=message.id,
                done="interrupted" if targets else "not_running",
                execution_ids=tuple(execution.id for execution in targets),
            )
        )

    def _on_soft_limit(self, message: SoftLimit) -> None:
        execution = self._registry.get(message.execution_id)
        if execution is None or execution.stop_kind is not None:
            return
        if isinstance(execution.work, Execute) and execution.work.seq == message.seq:
            self._hit(execution, self._lane.soft_limit)

    def _on_shutdown(self, message: Shutdown) -> None:
        self._stopping = True
        asking = self._inputs.close()
        for execution in self._registry.all():
            if execution.id in asking and execution.stop_kind is None:
                self._stop_after_eof(execution)
            else:
                self._stop(execution, ErrorKind.SHUTDOWN, ExecutionCancelled)
            if execution.sink is not self._session_sink:
                execution.sink.add_credit(message.credit)
        self._lane.stop()

    def _stop_after_eof(self, execution: Execution) -> None:
        """It was asking for input: the EOFError it is getting should end it, and soon."""
        execution.stop_kind, execution.interrupted = ErrorKind.SHUTDOWN, True
        self._timers.after(_STOP_AFTER_EOF_S, lambda: self._hit(execution, ExecutionCancelled))

    def _on_input_response(self, message: InputResponse) -> None:
        self._inputs.respond(message)

    # --- questions -----------------------------------------------------------------------------

    def _on_credit(self, message: Credit) -> None:
        if message.execution_id is None:
            self._session_sink.add_credit(message.bytes)
            return
        execution = self._registry.get(message.execution_id)
        if execution is not None:
            execution.sink.add_credit(message.bytes)

    def _on_namespace(self, message: NamespaceRequest) -> None:
        total, entries = summarize(self._namespace, self._config.diagnostics)
        self._reply(NamespaceSummary(in_reply_to=message.id, total=total, entries=entries))

    def _on_stack(self, message: StackRequest) -> None:
        occupant = self._registry.blocking or self._lane.current()
        found = stacks.collect(self._registry.running(), occupant, message.execution_id)
        self._reply(StackReply(in_reply_to=message.id, stacks=found))

    def _reply(self, reply: InterruptReply | NamespaceSummary | StackReply) -> None:
        """Answer a request; a reply that does not fit into a frame fails that request alone."""
        try:
            self._outbox.control(reply)
        except FrameTooLarge as fault:
            self._outbox.control(
                ReplyTooLarge(in_reply_to=reply.in_reply_to, size=fault.size, ceiling=fault.ceiling)
            )

    def _on_unsupported(self, message: Unsupported) -> None:
        log.warning("the parent did not understand a %r message", message.what)

    def _beat(self) -> None:
        self._timers.after(self._config.diagnostics.heartbeat_interval_s, self._beat)
        running = self._registry.running()
        heartbeat = Heartbeat(
            rss_bytes=_rss_bytes(),
            cpu_s=time.process_time(),
            namespace_size=user_names(self._namespace),
            running=tuple(execution.id for execution in running),
            waiting=len(self._registry.waiting),
            output_backlog_bytes=sum(execution.sink.backlog for execution in running),
            threads=threading.active_count(),
        )
        try:
            self._outbox.control(heartbeat)
        except FrameTooLarge:  # for thousands of ids; without them it still shows a live child
            heartbeat.running = ()
            self._outbox.control(heartbeat)


def _rss_bytes() -> int:
    try:
        with open(f"{PROC}/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
