"""Tells Celery what becomes of a task: decided on the loop, said on the hub thread, in order."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, Self

from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError

from capsule_tasks.errors import TaskNotCarried, TooManyLosses
from capsule_tasks.executions.ends import End, EndKind
from capsule_tasks.executions.execution import UNREPORTED, Execution, Reporter
from capsule_tasks.executions.origin import Origin
from capsule_tasks.protocol.messages import TaskCall, TaskResult
from capsule_tasks.taskpool.hub.bridge import Bridge
from capsule_tasks.taskpool.prefetch import Prefetch
from capsule_tasks.taskpool.reporting.exception_info import info_of, rebuild_info
from capsule_tasks.taskpool.reporting.task_frames import only_task_frames

Callback = Callable[..., object]


class ReportedPool(Protocol):
    """The pool that a task came to; each method is called on the hub thread."""

    def on_over(self, reporter: TaskReporter) -> None:
        """The task needs its slot no longer."""

    def on_reported(self, reporter: TaskReporter) -> None:
        """Celery has heard of the end."""

    def stop_task(
        self, reporter: TaskReporter, signum: int, requested_by: str, *, is_worker_stopping: bool
    ) -> None:
        """Somebody wants the task ended; from any thread."""


class ExecutionPid(int):
    """The pid that Celery is told for a task; it knows which task it is of.

    A process runs many tasks, one after another or at once, so that its number alone does not say
    which of them somebody wants terminated.
    """

    reporter: Callable[[], TaskReporter | None]

    def __new__(cls, pid: int, reporter: TaskReporter) -> Self:
        number = super().__new__(cls, pid)
        number.reporter = weakref.ref(reporter)
        return number


class TaskReporter(Reporter):
    """Celery keeps a weak reference to it, the pool a strong one until Celery heard of the end."""

    def __init__(
        self,
        pool: ReportedPool,
        bridge: Bridge,
        call: TaskCall,
        origin: Origin,
        *,
        request: Any,
        accept_callback: Callback | None,
        callback: Callback | None,
        error_callback: Callback | None,
        timeout_callback: Callback | None,
    ) -> None:
        self.execution = Execution(call, origin, self)
        self.has_slot = True
        self.qos: Prefetch | None = None
        """The consumer's prefetch counter, while it has room for this task's message."""
        self._pool = pool
        self._bridge = bridge
        self._request = request
        self._acks_early = getattr(request, "task", None) is not None and not origin.acks_late
        self._accept_callback = accept_callback
        self._callback = callback
        self._error_callback = error_callback
        self._timeout_callback = timeout_callback

    # --- called by Celery ----------------------------------------------------------------------

    def terminate(
        self,
        signum: int,
        requested_by: str = "code in the worker",
        *,
        is_worker_stopping: bool = False,
    ) -> None:
        """Part of the pool's contract: a result can be terminated."""
        self._pool.stop_task(self, signum, requested_by, is_worker_stopping=is_worker_stopping)

    def ready(self) -> bool:
        return self.execution.life.is_over

    # --- on the loop ---------------------------------------------------------------------------

    def accepted(self, pid: int, at: float, *, defers_ack: bool) -> None:
        self._bridge.put(partial(self._report_accepted, pid, at, defers_ack))

    def acknowledge(self) -> None:
        self._bridge.put(self._acknowledge)

    def soft_limit(self) -> None:
        self._bridge.put(self._report_soft_limit)

    def free_slot(self) -> None:
        self._bridge.put(partial(self._pool.on_over, self))

    def ended(self, end: End, *, frees_slot: bool) -> None:
        self._bridge.put(partial(self._report_end, end, frees_slot))

    def task_frames(self, stack: str) -> str:
        return only_task_frames(stack)

    # --- on the hub thread ---------------------------------------------------------------------

    def release_prefetch(self) -> None:
        """The message is held no more, or nobody counts it any more."""
        counter, self.qos = self.qos, None
        if counter is not None:
            counter.remove_one()

    def report_failure(self, error: Exception) -> None:
        """The pool could not bring the task to its end."""
        if self._error_callback is not None:
            self._error_callback(info_of(error))
        if isinstance(error, TaskNotCarried) and self._acks_early:
            self._request.acknowledge()  # the task has not begun, and would come again for ever

    def _report_accepted(self, pid: int, at: float, defers_ack: bool) -> None:
        if self._accept_callback is not None:
            if defers_ack:
                self._request.defers_ack = True
            self._accept_callback(ExecutionPid(pid, self), at)
        if self._acks_early and not defers_ack:
            self.release_prefetch()

    def _acknowledge(self) -> None:
        self._request.on_claimed()
        self.release_prefetch()

    def _report_soft_limit(self) -> None:
        if self._timeout_callback is not None:
            soft_limit_s = self.execution.life.origin.soft_limit_s
            self._timeout_callback(soft=True, timeout=soft_limit_s)

    def _report_end(self, end: End, frees_slot: bool) -> None:
        """The slot is free first, so that the next task is on its way."""
        if frees_slot:
            self._pool.on_over(self)
        try:
            self._report(end)
        finally:
            self._pool.on_reported(self)
            self._forget()

    def _report(self, end: End) -> None:
        call, hard_limit_s = self.execution.call, self.execution.life.origin.hard_limit_s
        match end.kind:
            case EndKind.TRACED:
                assert end.traced is not None
                self._report_result(end.traced)
            case EndKind.TERMINATED:
                self.report_failure(Terminated(-end.signum))
            case EndKind.OVER_LIMIT:
                self.report_failure(TimeLimitExceeded(hard_limit_s))
                if self._timeout_callback is not None:
                    self._timeout_callback(soft=False, timeout=hard_limit_s)
            case EndKind.LOST:
                self.report_failure(WorkerLostError(end.message))
            case EndKind.TOO_MANY_LOSSES:
                error = TooManyLosses(end.message)
                error.task_id, error.losses = call.task_id, end.losses
                self.report_failure(error)
            case EndKind.NOT_CARRIED:
                self.report_failure(TaskNotCarried(call.name, call.task_id, end.message))

    def _report_result(self, traced: TaskResult) -> None:
        """The tracer came to its end; or something escaped it, which is for the pool to report."""
        failure = traced.failure
        if failure is None:
            self._report_value((0, traced.text, traced.runtime_s))
        elif not traced.escaped_tracer:
            self._report_value((1, rebuild_info(failure), traced.runtime_s))
        elif failure.name == "MemoryError":
            # Celery would raise it again in the worker's own process, which is not short of memory.
            why = failure.message or failure.name
            self.report_failure(WorkerLostError(f"The task ran out of memory: {why}"))
        elif self._error_callback is not None:
            self._error_callback(rebuild_info(failure))

    def _report_value(self, outcome: tuple[int, Any, float | None]) -> None:
        if self._callback is not None:
            self._callback(outcome)

    def _forget(self) -> None:
        """Keep nothing of the message, which may be large, and no cycle of references."""
        self.execution.call.body = b""
        self.execution.reporter = UNREPORTED
        self._accept_callback = self._callback = None
        self._error_callback = self._timeout_callback = None
        self._request = None
