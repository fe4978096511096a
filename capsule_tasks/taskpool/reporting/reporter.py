"""One task of Celery's in the pool: its execution is made, and what becomes of it is reported.

Reports are called for on the loop, and made in order on the hub thread.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError

from capsule_tasks.errors import InvalidId, RunFailed, TaskNotCarried, TooManyLosses
from capsule_tasks.executions.calls import CodeCall
from capsule_tasks.executions.ends import End, EndKind, last_event
from capsule_tasks.executions.execution import UNREPORTED, Execution, Reporter
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.origin import Origin
from capsule_tasks.protocol.events import Ended
from capsule_tasks.protocol.messages import TaskCall, TaskResult
from capsule_tasks.storage.keys import escaped
from capsule_tasks.taskpool.hub import Bridge
from capsule_tasks.taskpool.reporting.exception_info import info_of, rebuild_info
from capsule_tasks.taskpool.reporting.requests import PoolRequest
from capsule_tasks.taskpool.reporting.task_frames import only_task_frames

if TYPE_CHECKING:
    from capsule_tasks.taskpool.consumer_step import Prefetch
    from capsule_tasks.taskpool.pool import TaskPool


_MAX_MEMBERS = 2**27
"""Members that a bitmap in Redis may count without being a danger to it: 16 MiB."""
_DECODED = ("args", "kwargs")
"""The request dict repeats them; the child decodes them from the body."""
_coroutine_tasks: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""Whether a task is a coroutine. Tasks of modules that a reload has replaced are dropped."""
_EMBEDDED = ("callbacks", "errbacks", "chord", "taskset")


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

    def __init__(self, pool: TaskPool, bridge: Bridge, request: Any, arguments: Any) -> None:
        """`arguments` are those of Celery's tracer."""
        call = task_call(arguments, request.message)
        origin = origin_of(call, arguments[2], request, pool.options)
        self.execution = Execution(call, Lifecycle(origin), self)
        self.has_slot = True
        self.qos: Prefetch | None = None
        """The consumer's prefetch counter, while it has room for this task's message."""
        self._pool = pool
        self._bridge = bridge
        self._request = request

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
        self._bridge.put(self._request.on_timeout, True, self._origin.soft_limit_s)

    def free_slot(self) -> None:
        self._bridge.put(self._pool.on_over, self)

    def ended(self, end: End, *, frees_slot: bool) -> None:
        if self._origin.claims_with_output and self._leaves_run(end):
            self._pool.cancel_run(self._origin.execution_id)
        self._bridge.put(self._report_end, end, frees_slot)

    def _leaves_run(self, end: End) -> bool:
        """Whether the task ends for good, and not because its durable run has ended."""
        failure = end.traced.failure if end.traced is not None else None
        if end.kind is EndKind.TRACED and (failure is None or failure.name == RunFailed.__name__):
            return False
        is_worker_stopping = self.execution.life.is_worker_stopping
        event = last_event(end, self._origin, is_worker_stopping=is_worker_stopping)
        return isinstance(event, Ended)

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
        self._request.on_failure(info_of(error))
        if isinstance(error, TaskNotCarried) and not self._origin.acks_late:
            # The task has not started, and its message would be redelivered for ever.
            self._request.acknowledge()

    @property
    def _origin(self) -> Origin:
        return self.execution.life.origin

    def _report_accepted(self, pid: int, at: float, defers_ack: bool) -> None:
        if defers_ack:
            self._request.defers_ack = True
        self._request.on_accepted(ExecutionPid(pid, self), at)
        if not (self._origin.acks_late or defers_ack):
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
            case EndKind.STOPPED:
                self.report_failure(Terminated(-end.signum))
            case EndKind.OVER_LIMIT:
                self.report_failure(TimeLimitExceeded(hard_limit_s))
                self._request.on_timeout(False, hard_limit_s)
            case EndKind.LOST:
                self.report_failure(WorkerLostError(end.message))
            case EndKind.TOO_MANY_LOSSES:
                self.report_failure(TooManyLosses(end.message, call.task_id, end.losses))
            case EndKind.NOT_CARRIED:
                self.report_failure(TaskNotCarried(call.name, call.task_id, end.message))

    def _report_result(self, traced: TaskResult) -> None:
        """Report what the tracer ended with, or what escaped the tracer."""
        failure = traced.failure
        if failure is None:
            self._request.on_success((0, traced.text, traced.runtime_s))
        elif not traced.escaped_tracer:
            self._request.on_success((1, rebuild_info(failure), traced.runtime_s))
        elif failure.name == "MemoryError":
            # Celery would raise it again in the worker's own process, which is not short of memory.
            reason = failure.message or failure.name
            self.report_failure(WorkerLostError(f"The task ran out of memory: {reason}"))
        else:
            self._request.on_failure(rebuild_info(failure))

    def _forget(self) -> None:
        """Keep nothing of the message, which may be large, and no cycle of references."""
        call = self.execution.call
        if isinstance(call, CodeCall):
            call.source, call.message = "", None
        else:
            call.body = b""
        self.execution.reporter = UNREPORTED
        self._request = None


def task_call(arguments: Any, message: Any) -> TaskCall:
    """The call of `(task name, id, request dict, body, content type, encoding)`."""
    name, task_id, headers, body, content_type, encoding = arguments
    carried = {key: value for key, value in headers.items() if key not in _DECODED}
    protocol: Any = 2
    if content_type is None:  # a message of the first protocol comes decoded: send its own bytes
        content_type, encoding, body = message.content_type, message.content_encoding, message.body
        protocol = 1
        for key in _EMBEDDED:
            carried.pop(key, None)
    is_text = isinstance(body, str)
    return TaskCall(
        name=name,
        task_id=task_id,
        request=carried,
        body=body.encode("utf-8", "surrogatepass") if is_text else bytes(body),
        is_text=is_text,
        content_type=content_type,
        content_encoding=encoding,
        protocol=protocol,
    )


def origin_of(call: TaskCall, headers: Any, request: Any, options: Any) -> Origin:
    """The facts that decide about a task: its message, and its settings and limits as of now.

    Celery keeps the limits from when its consumer started.
    """
    task: Any = request.task
    acks_late = bool(task.acks_late)
    redelivers_when_lost = acks_late and bool(task.reject_on_worker_lost)
    continues_after_loss = redelivers_when_lost
    if getattr(task, "retry_on_worker_lost", False):
        max_retries = task.max_retries
        continues_after_loss = max_retries is None or int(headers.get("retries") or 0) < max_retries
    delivery_info = headers.get("delivery_info")
    group, index = group_of(headers)
    hard_of_call, soft_of_call = request.time_limits
    return Origin(
        execution_id=call.task_id,
        task=call.name,
        is_async=is_coroutine_task(task),
        group=group,
        index=index,
        is_retry=bool(headers.get("retries")),
        is_redelivered=bool(delivery_info and delivery_info.get("redelivered")),
        acks_late=acks_late,
        ack_waits_for_claim=isinstance(request, PoolRequest) and not acks_late,
        claims_with_output=getattr(task, "capsule_claims_with_output", False),
        redelivers_when_lost=redelivers_when_lost,
        continues_after_loss=continues_after_loss,
        redelivers_over_limit=acks_late and not task.acks_on_timeout,
        soft_limit_s=soft_of_call or task.soft_time_limit or options.get("soft_timeout"),
        hard_limit_s=hard_of_call or task.time_limit or options.get("timeout"),
    )


def group_of(headers: Any) -> tuple[str, int]:
    """The group of a task and its index there; none if no key can be made of the group id."""
    group, index = headers.get("group"), headers.get("group_index")
    if group is None or not isinstance(index, int) or not 0 <= index < _MAX_MEMBERS:
        return ("", -1)
    try:
        escaped("group id", group)
    except InvalidId:
        return ("", -1)
    return (group, index)


def is_coroutine_task(task: Any) -> bool:
    """Whether a task is a coroutine: by `async def`, also of a class-based or wrapped task."""
    known = _coroutine_tasks.get(task)
    if known is None:
        known = _coroutine_tasks[task] = _is_coroutine_task(task)
    return known


def _is_coroutine_task(task: Any) -> bool:
    functions = (
        getattr(task, "_orig_run", None),
        getattr(task, "run", None),
        type(task).__call__,
    )
    return any(
        inspect.iscoroutinefunction(function) or hasattr(function, "capsule_coroutine")
        for function in functions
    )
