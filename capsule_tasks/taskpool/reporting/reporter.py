"""Reports to Celery what becomes of a task: called on the loop, done in order on the hub thread."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError

from capsule_tasks.errors import TaskNotCarried, TooManyLosses
from capsule_tasks.executions.ends import End, EndKind
from capsule_tasks.executions.execution import UNREPORTED, Execution, Reporter
from capsule_tasks.executions.origin import Origin
from capsule_tasks.protocol.messages import TaskCall, TaskResult
from capsule_tasks.taskpool.hub import Bridge
from capsule_tasks.taskpool.prefetch import Prefetch
from capsule_tasks.taskpool.reporting.exception_info import info_of, rebuild_info
from capsule_tasks.taskpool.reporting.task_frames import only_task_frames

if TYPE_CHECKING:
    from capsule_tasks.taskpool.pool import TaskPool


class ExecutionPid(int):
    """The pid that Celery is given for a task; it leads back to the task.

    A process runs many tasks, one after another or concurrently, so its number alone does not say
    which of them is to be terminated.
    """

    reporter: Callable[[], TaskReporter | None]

    def __new__(cls, pid: int, reporter: TaskReporter) -> Self:
        number = super().__new__(cls, pid)
        number.reporter = weakref.ref(reporter)
        return number


class TaskReporter(Reporter):
    """Celery keeps a weak reference to it, the pool a strong one until the end is reported."""

    def __init__(
        self,
        pool: TaskPool,
        bridge: Bridge,
        call: TaskCall,
        origin: Origin,
        callbacks: Mapping[str, Callable[..., object]],
    ) -> None:
        """`callbacks` are those that Celery gives a pool, by name."""
        self.execution = Execution(call, origin, self)
        self.has_slot = True
        self.qos: Prefetch | None = None
        """The consumer's prefetch counter, while it has room for this task's message."""
        self._pool = pool
        self._bridge = bridge
        self._callbacks = callbacks
        self._request: Any = getattr(callbacks.get("accept_callback"), "__self__", None)
        has_task = getattr(self._request, "task", None) is not None
        self._acks_early = has_task and not origin.acks_late

    # --- called by Celery ----------------------------------------------------------------------

    def terminate(
        self,
        signum: int,
        requested_by: str = "code in the worker",
        *,
        is_worker_stopping: bool = False,
    ) -> None:
        """Part of the pool's contract: a result can be terminated."""
        self._pool.request_stop(self.execution, signum, requested_by, is_worker_stopping)

    def ready(self) -> bool:
        return self.execution.life.is_over

    # --- on the loop ---------------------------------------------------------------------------

    def accepted(self, pid: int, at: float, *, defers_ack: bool) -> None:
        self._bridge.put(self._report_accepted, pid, at, defers_ack)

    def acknowledge(self) -> None:
        self._bridge.put(self._acknowledge)

    def soft_limit(self) -> None:
        self._bridge.put(self._call, "timeout_callback", True, self._origin.soft_limit_s)

    def free_slot(self) -> None:
        self._bridge.put(self._pool.on_over, self)

    def ended(self, end: End, *, frees_slot: bool) -> None:
        self._bridge.put(self._report_end, end, frees_slot)

    def task_frames(self, stack: str) -> str:
        return only_task_frames(stack)

    # --- on the hub thread ---------------------------------------------------------------------

    def release_prefetch(self) -> None:
        """The message is acknowledged, or its connection is lost."""
        counter, self.qos = self.qos, None
        if counter is not None:
            counter.remove_one()

    def report_failure(self, error: Exception) -> None:
        """The pool could not bring the task to its end."""
        self._call("error_callback", info_of(error))
        if isinstance(error, TaskNotCarried) and self._acks_early:
            # The task has not started, and its message would be redelivered for ever.
            self._request.acknowledge()

    @property
    def _origin(self) -> Origin:
        return self.execution.life.origin

    def _call(self, name: str, *arguments: Any) -> None:
        callback = self._callbacks.get(name)
        if callback is not None:
            callback(*arguments)

    def _report_accepted(self, pid: int, at: float, defers_ack: bool) -> None:
        if defers_ack and self._request is not None:
            self._request.defers_ack = True
        self._call("accept_callback", ExecutionPid(pid, self), at)
        if self._acks_early and not defers_ack:
            self.release_prefetch()

    def _acknowledge(self) -> None:
        self._request.on_claimed()
        self.release_prefetch()

    def _report_end(self, end: End, frees_slot: bool) -> None:
        """The slot is freed first, so that the next task is on its way."""
        if frees_slot:
            self._pool.on_over(self)
        try:
            self._report(end)
        finally:
            self._pool.on_reported(self)
            self._forget()

    def _report(self, end: End) -> None:
        call, hard_limit_s = self.execution.call, self._origin.hard_limit_s
        match end.kind:
            case EndKind.TRACED:
                assert end.traced is not None
                self._report_result(end.traced)
            case EndKind.TERMINATED:
                self.report_failure(Terminated(-end.signum))
            case EndKind.OVER_LIMIT:
                self.report_failure(TimeLimitExceeded(hard_limit_s))
                self._call("timeout_callback", False, hard_limit_s)
            case EndKind.LOST:
                self.report_failure(WorkerLostError(end.message))
            case EndKind.TOO_MANY_LOSSES:
                error = TooManyLosses(end.message)
                error.task_id, error.losses = call.task_id, end.losses
                self.report_failure(error)
            case EndKind.NOT_CARRIED:
                self.report_failure(TaskNotCarried(call.name, call.task_id, end.message))

    def _report_result(self, traced: TaskResult) -> None:
        """Report what the tracer ended with, or what escaped the tracer."""
        failure = traced.failure
        if failure is None:
            self._call("callback", (0, traced.text, traced.runtime_s))
        elif not traced.escaped_tracer:
            self._call("callback", (1, rebuild_info(failure), traced.runtime_s))
        elif failure.name == "MemoryError":
            # Celery would raise it again in the worker's own process, which is not short of memory.
            reason = failure.message or failure.name
            self.report_failure(WorkerLostError(f"The task ran out of memory: {reason}"))
        else:
            self._call("error_callback", rebuild_info(failure))

    def _forget(self) -> None:
        """Keep nothing of the message, which may be large, and no cycle of references."""
        self.execution.call.body = b""
        self.execution.reporter = UNREPORTED
        self._callbacks, self._request = {}, None
