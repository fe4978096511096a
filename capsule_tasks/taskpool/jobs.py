"""A job: one Celery message on its way through the pool.

Where it stands is changed on the runtime's loop alone, in one direction:

    waiting ──▶ sent ──▶ accepted ──▶ over
        └─────────┴──────────────────▶ over

What Celery hears of that is put on the bridge, in the same order, and runs on the hub thread.
"""

from __future__ import annotations

import itertools
import logging
import signal
import weakref
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Self

from billiard.common import human_status
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError

from capsule_tasks.errors import InvalidId, TaskNotCarried
from capsule_tasks.protocol.messages import Error, ErrorKind, Terminal, Traced
from capsule_tasks.sessions.process import CRASHES
from capsule_tasks.storage.keys import escaped
from capsule_tasks.taskpool.einfo import info_of, rebuild_info
from capsule_tasks.taskpool.requests import TruthfulRequest

log = logging.getLogger("capsule_tasks.taskpool")

_numbers = itertools.count(1)
_NOT_CARRIED = (ErrorKind.TOO_LARGE, ErrorKind.RAISED)
"""A task that raises is told as `Traced`: these are said of the frame that should carry it."""
_MOST_MEMBERS = 2**27
"""What a bitmap in Redis may count without being a danger to it: 16 MiB."""


class Stage(Enum):
    WAITING = auto()
    SENT = auto()
    ACCEPTED = auto()
    OVER = auto()


class _Silent:
    """The publication of a job that has no stream."""

    is_heard = False

    def say(self, _message: Any) -> None: ...

    def accepted(self, _pid: int, _then: Any) -> None: ...

    def end(self, _ending: Any, then: Callable[[], object]) -> None:
        then()


SILENT = _Silent()


class ExecutionPid(int):
    """The pid that Celery is told for a task; it knows which execution it is of.

    A process runs many tasks, one after another or at once, so that its number alone does not say
    which of them somebody wants terminated.
    """

    job: Callable[[], Job | None]

    def __new__(cls, pid: int, job: Job) -> Self:
        number = super().__new__(cls, pid)
        number.job = weakref.ref(job)
        return number


class Job:
    """Celery keeps a weak reference to it, the pool a strong one until it is over."""

    def __init__(
        self,
        *,
        call: Any,
        is_async: bool,
        accept_callback: Callable[..., object] | None,
        callback: Callable[..., object] | None,
        error_callback: Callable[..., object] | None,
        timeout_callback: Callable[..., object] | None,
        soft_limit_s: float | None,
        hard_limit_s: float | None,
        terminate: Callable[[Job, int, str], object],
        request: Any = None,
        group: tuple[str, int] = ("", -1),
        is_retry: bool = False,
        is_redelivered: bool = False,
    ) -> None:
        self.number = next(_numbers)
        self.call = call
        self.is_async = is_async
        self.soft_limit_s = soft_limit_s
        self.hard_limit_s = hard_limit_s
        self.stage = Stage.WAITING
        self.signum: int | None = None
        """The signal that it is to be terminated with."""
        self.is_over_limit = False
        self.execution_id: str = call.task_id
        self.pid = 0
        """The child that it was sent to."""
        self.timers: list[Any] = []
        self.holds_slot = True
        self.qos: Any = None
        """The consumer's prefetch counter, while it has room for this job's message."""
        self.request = request
        self.group = group
        self.is_retry = is_retry
        self.is_redelivered = is_redelivered
        self.publication: Any = SILENT
        """Where what it says goes."""
        task = getattr(request, "task", None)
        self.acks_late = bool(getattr(task, "acks_late", False))
        self._acks_early = task is not None and not self.acks_late
        self.acks_when_claimed = not self.acks_late and isinstance(request, TruthfulRequest)
        """Once its message is acknowledged only the reaper finds it, and that if it is claimed."""
        self._accept_callback = accept_callback
        self._callback = callback
        self._error_callback = error_callback
        self._timeout_callback = timeout_callback
        self._terminate = terminate

    @classmethod
    def never_called(
        cls,
        name: str,
        task_id: str,
        *,
        error_callback: Callable[..., object] | None = None,
        request: Any = None,
        group: tuple[str, int] = ("", -1),
    ) -> Self:
        """A job that never comes to a child, for whoever is to hear of its end."""
        return cls(
            call=_NotCalled(name, task_id),
            is_async=False,
            accept_callback=None,
            callback=None,
            error_callback=error_callback,
            timeout_callback=None,
            soft_limit_s=None,
            hard_limit_s=None,
            terminate=lambda *_: None,
            request=request,
            group=group,
        )

    def __repr__(self) -> str:
        return f"<Job {self.number} {self.call.name}[{self.call.task_id}] {self.stage.name}>"

    # --- called by Celery ----------------------------------------------------------------------

    def terminate(self, signum: int, asker: str = "code in the worker") -> None:
        """Part of the pool's contract: a result can be terminated."""
        self._terminate(self, signum, asker)

    def ready(self) -> bool:
        return self.stage is Stage.OVER

    # --- on the runtime's loop -----------------------------------------------------------------

    def note_stop(self, signum: int, asker: str) -> None:
        """Somebody asked for its end; the log says who, if it runs."""
        self.signum = signum
        if self.stage in (Stage.SENT, Stage.ACCEPTED):
            name, task_id = self.call.name, self.call.task_id
            log.info("Cancelling %s[%s] in process %d: asked by %s", name, task_id, self.pid, asker)

    # --- said to Celery, on the hub thread -----------------------------------------------------

    def say_accepted(self, pid: int, accepted_at: float, *, puts_ack_off: bool) -> None:
        """With `puts_ack_off`, `say_claimed` follows."""
        if self._accept_callback is not None:
            if puts_ack_off:
                self.request.puts_ack_off = True
            self._accept_callback(ExecutionPid(pid, self), accepted_at)
        if self._acks_early and not puts_ack_off:
            self.give_room_back()

    def give_room_back(self) -> None:
        """Its message is held no more, or nobody counts it any more."""
        counter, self.qos = self.qos, None
        if counter is not None:
            counter.narrow()

    def say_claimed(self) -> None:
        self.request.on_claimed()
        self.give_room_back()

    def say_soft_limit(self) -> None:
        if self._timeout_callback is not None:
            self._timeout_callback(soft=True, timeout=self.soft_limit_s)

    def say_traced(self, traced: Traced) -> None:
        """The tracer came to its end; or something escaped it, which is for the pool to report."""
        failure = traced.failure
        if failure is None:
            self._say_value((0, traced.text, traced.runtime_s))
        elif not traced.escaped:
            self._say_value((1, rebuild_info(failure), traced.runtime_s))
        elif failure.name == "MemoryError":
            # Celery would raise it again in the worker's own process, which is not short of memory.
            why = failure.message or failure.name
            self.say_failed(WorkerLostError(f"The task ran out of memory: {why}"))
        elif self._error_callback is not None:
            self._error_callback(rebuild_info(failure))

    def say_failed(self, error: Exception) -> None:
        """The pool could not bring it to its end."""
        if self._error_callback is not None:
            self._error_callback(info_of(error))
        if isinstance(error, TaskNotCarried) and self._acks_early:
            self.request.acknowledge()  # it has not begun, and would come again for ever

    def say_hard_limit(self) -> None:
        self.say_failed(TimeLimitExceeded(self.hard_limit_s))
        if self._timeout_callback is not None:
            self._timeout_callback(soft=False, timeout=self.hard_limit_s)

    def let_go(self) -> None:
        """Celery has been told: keep nothing of the message, which may be large.

        The job and its stream refer to each other, so that both stay until the garbage collector
        comes by, and that takes as long as few objects are made.
        """
        self.call.body = b""
        self._accept_callback = self._callback = None
        self._error_callback = self._timeout_callback = None
        if not getattr(self.request, "puts_ack_off", False):  # else `say_claimed` needs it
            self.request = None

    def _say_value(self, outcome: tuple[int, Any, float | None]) -> None:
        if self._callback is not None:
            self._callback(outcome)


def is_killed_at_limit(job: Job, status: int | None) -> bool:
    """Whether its hard limit was its end; a signal that it had survived until then was not."""
    has_survived = job.signum != signal.SIGKILL and not job.is_async and status == -signal.SIGKILL
    return job.is_over_limit and (job.signum is None or has_survived)


def why_lost(job: Job, end: Terminal, status: int | None) -> Exception:
    """The error of a job whose child did not bring it to its end."""
    crashed = status is not None and -status in CRASHES and -status != job.signum
    if job.signum is not None and not crashed:
        terminated: Exception = Terminated(-job.signum)
        return terminated
    if isinstance(end, Error) and end.kind in _NOT_CARRIED:
        # No lost worker: another delivery would end in the same way, and so on for ever.
        return TaskNotCarried(job.call.name, job.call.task_id, _said(end))
    if status is not None:
        why = f"Worker exited prematurely: {human_status(status)} Job: {job.number}."
    else:
        why = f"The task did not come to its end: {_said(end)} Job: {job.number}."
    if isinstance(end, Error) and end.kind is ErrorKind.LOST_WITH_NEIGHBOUR:
        why += f" {end.message[:1].upper()}{end.message[1:]}."
    lost: Exception = WorkerLostError(why)
    return lost


def _said(end: Terminal) -> str:
    if not isinstance(end, Error):
        return type(end).__name__
    return f"{end.type}: {end.message}" if end.message else end.type


def group_of(headers: Any) -> tuple[str, int]:
    """The group of a task, and its place there; none if no key can be made of it."""
    group, index = headers.get("group"), headers.get("group_index")
    if group is None or not isinstance(index, int) or not 0 <= index < _MOST_MEMBERS:
        return ("", -1)
    try:
        escaped("group id", group)
    except InvalidId:
        return ("", -1)
    return (group, index)


class _NotCalled:
    def __init__(self, name: str, task_id: str) -> None:
        self.name = name
        self.task_id = task_id
        self.body = b""
