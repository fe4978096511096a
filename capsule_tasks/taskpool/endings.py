"""How the end of a job is told to who watches it: the end of an attempt, or of the execution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError

from capsule_tasks.protocol.events import AttemptEnded, Ended, How, Outcome
from capsule_tasks.protocol.messages import Terminal, Traced

_MOST_TEXT = 4096
_MOST_TRACEBACK = 16 * 1024
_REPLACED = "Replaced by new task"
"""So Celery's `Task.replace` tells its Ignore from others; what takes its place has its id."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The last event of an attempt."""

    event: AttemptEnded | Ended

    @property
    def state(self) -> str:
        return "ended" if isinstance(self.event, Ended) else "waiting"

    @property
    def outcome(self) -> str:
        return str(self.event.outcome) if isinstance(self.event, Ended) else ""

    @property
    def failure(self) -> str:
        event = self.event
        return f"{event.type}: {event.message}" if isinstance(event, Ended) else ""


def another(how: How, detail: str = "") -> Ending:
    """This attempt is over, and another follows."""
    return Ending(AttemptEnded(how=how, detail=detail[:_MOST_TEXT]))


def lost(why: str) -> Ending:
    """The message is acknowledged and its worker gone: no other attempt follows."""
    return Ending(Ended(outcome=Outcome.LOST, type="WorkerLostError", message=why))


def ending_of_traced(traced: Traced) -> Ending:
    """What the tracer says became of the task."""
    failure = traced.failure
    if failure is None:
        return Ending(
            Ended(
                outcome=Outcome.SUCCEEDED,
                text=(traced.text or "")[:_MOST_TEXT],
                runtime_s=traced.runtime_s,
                stdout_bytes=traced.stdout_bytes,
                stderr_bytes=traced.stderr_bytes,
            )
        )
    is_celerys = failure.module == "celery.exceptions"
    if is_celerys and failure.name == "Retry":
        return another("retry", failure.message)
    if is_celerys and failure.name == "Ignore" and failure.message == _REPLACED:
        return another("replaced", failure.message)
    if is_celerys and failure.name == "Reject" and failure.state.get("requeue"):
        return another("requeued", failure.message)
    outcomes = {"Reject": Outcome.REJECTED, "Ignore": Outcome.IGNORED}
    outcome = outcomes.get(failure.name, Outcome.FAILED) if is_celerys else Outcome.FAILED
    return Ending(
        Ended(
            outcome=outcome,
            type=failure.name,
            message=failure.message[:_MOST_TEXT],
            traceback=failure.traceback[-_MOST_TRACEBACK:],
            runtime_s=traced.runtime_s,
            stdout_bytes=traced.stdout_bytes,
            stderr_bytes=traced.stderr_bytes,
        )
    )


def ending_of_error(error: Exception, request: Any, end: Terminal | None = None) -> Ending:
    """What becomes of a job that the pool could not bring to its end, as Celery will see to it."""
    if _comes_again(error, request):
        return another("requeued", str(error))
    if isinstance(error, Terminated):
        outcome, why = Outcome.CANCELLED, "it was cancelled"
    else:
        outcome, why = Outcome.FAILED, str(error)
    return Ending(
        Ended(
            outcome=outcome,
            type=type(error).__name__,
            message=why[:_MOST_TEXT],
            stdout_bytes=end.stdout_bytes if end is not None else 0,
            stderr_bytes=end.stderr_bytes if end is not None else 0,
        )
    )


def _comes_again(error: Exception, request: Any) -> bool:
    """Whether Celery puts the message back, or sends another, after this error."""
    task = getattr(request, "task", None)
    if task is None:
        return False
    if isinstance(error, Terminated):  # else somebody wished it; this way its worker let go of it
        return bool(task.acks_late and getattr(request, "_already_cancelled", False))
    is_lost = isinstance(error, WorkerLostError)
    if is_lost and getattr(task, "retry_on_worker_lost", False):
        return task.max_retries is None or _retries(request) < task.max_retries
    if is_lost:
        return is_put_back_when_lost(request)
    if not task.acks_late:
        return False
    return isinstance(error, TimeLimitExceeded) and not task.acks_on_timeout


def is_put_back_when_lost(request: Any) -> bool:
    """Whether the same message comes again when the child that ran it is lost."""
    task = getattr(request, "task", None)
    return task is not None and bool(task.acks_late and task.reject_on_worker_lost)


def _retries(request: Any) -> int:
    return int(getattr(request, "request_dict", {}).get("retries") or 0)
