"""How executions end: why, and which last event watchers read."""

from __future__ import annotations

import signal
from enum import StrEnum

import msgspec

from capsule_tasks.errors import TaskNotCarried
from capsule_tasks.executions.origin import Origin
from capsule_tasks.protocol.events import (
    RUN_CANCELLED,
    RUN_ELSEWHERE,
    RUN_PARKED,
    AttemptEnded,
    AttemptOutcome,
    Ended,
    Outcome,
)
from capsule_tasks.protocol.messages import Error, ErrorKind, Failure, TaskResult, Terminal
from capsule_tasks.sessions.process.child_process import CRASHES

_MAX_TEXT = 4096
_MAX_TRACEBACK = 16 * 1024
_SUCCEEDED = Outcome.SUCCEEDED
_REPLACED = "Replaced by new task"
"""The message of the Ignore that `Task.replace` raises; what replaces the task has the same id."""
_CELERY = "celery.exceptions"
_NOT_CARRIED = (ErrorKind.TOO_LARGE, ErrorKind.RAISED)
"""A task that raises is reported as `TaskResult`: these kinds concern the frame that carries it."""

MAY_HAVE_RUN = "the call may have run in part"

LastEvent = AttemptEnded | Ended


class EndKind(StrEnum):
    """Why an execution is over; the value names the error that watchers and callers see."""

    TRACED = ""
    """The task ended by itself."""
    STOPPED = "Terminated"
    """The task was cancelled, terminated or killed before it ended by itself."""
    OVER_LIMIT = "TimeLimitExceeded"
    LOST = "WorkerLostError"
    """The child ended before the task did."""
    TOO_MANY_LOSSES = "TooManyLosses"
    NOT_CARRIED = "TaskNotCarried"
    """The task, or its result, does not fit between the worker and the child."""
    REQUEUED = "requeued"
    """The task had not started when the broker connection was lost; nothing is reported."""
    NOT_CLAIMED = "NotClaimed"
    """The execution needs a claim and did not get it, or lost it before its end was stored: another
    worker has it, or it has ended. Nothing is published."""
    DISCARDED = "TaskRevokedError"
    """Celery discarded the task before it reached the pool, and reported that itself."""


_TRACED = EndKind.TRACED


class End(msgspec.Struct, frozen=True, gc=False):
    """The end of an execution in this worker."""

    kind: EndKind
    message: str = ""
    traced: TaskResult | None = None
    signum: int = 0
    losses: int = 0
    """Processes that the message has cost, if those are too many."""
    stdout_bytes: int = 0
    stderr_bytes: int = 0

    def with_bytes_of(self, terminal: Terminal) -> End:
        return msgspec.structs.replace(
            self, stdout_bytes=terminal.stdout_bytes, stderr_bytes=terminal.stderr_bytes
        )


# --- how an execution ended --------------------------------------------------------------------


def end_of_unfinished(stop_signum: int | None, terminal: Terminal, status: int | None) -> End:
    """The end of an execution that its child did not finish; `status` if the child has ended."""
    has_crashed = status is not None and -status in CRASHES and -status != stop_signum
    if stop_signum is not None and not has_crashed:
        end = End(EndKind.STOPPED, signum=stop_signum)
    elif isinstance(terminal, Error) and terminal.kind in _NOT_CARRIED:
        # The child is not lost: every other delivery would end in the same way.
        end = End(EndKind.NOT_CARRIED, _text_of(terminal))
    else:
        if status is not None:
            why = f"Worker exited prematurely: {human_status(status)}."
        else:
            why = f"The task did not come to its end: {_text_of(terminal)}."
        if isinstance(terminal, Error) and terminal.kind is ErrorKind.LOST_WITH_NEIGHBOUR:
            why += f" {terminal.message[:1].upper()}{terminal.message[1:]}."
        end = End(EndKind.LOST, why)
    return end.with_bytes_of(terminal)


def call_in_part(end: End) -> End:
    """The end of a call that runs at most once; says of one that was lost that it may have run."""
    if end.kind is not EndKind.LOST:
        return end
    return msgspec.structs.replace(end, message=f"{end.message} {MAY_HAVE_RUN.capitalize()}.")


def end_of_traced(traced: TaskResult) -> End:
    """The end of an execution that Celery's tracer completed."""
    if _is_of_celery(traced.failure, "Ignore", RUN_CANCELLED):
        # Celery stores nothing for an Ignore: the worker reports the end, as of any cancelled task.
        return End(EndKind.STOPPED, signum=int(signal.SIGTERM)).with_bytes_of(traced)
    return End(_TRACED, "", traced, 0, 0, traced.stdout_bytes, traced.stderr_bytes)


def human_status(status: int) -> str:
    """An exit status in words, as Celery's prefork pool gives it."""
    if status >= 0:
        return f"exitcode {status}"
    try:
        return f"signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"signal {-status}"


def _text_of(terminal: Terminal) -> str:
    if not isinstance(terminal, Error):
        return type(terminal).__name__
    return f"{terminal.type}: {terminal.message}" if terminal.message else terminal.type


# --- the last event ---------------------------------------------------------------------------


def last_event(end: End, origin: Origin, *, is_worker_stopping: bool = False) -> LastEvent:
    """The last event of an execution. `is_worker_stopping`: the worker itself asked for the end."""
    if end.traced is not None:
        return _of_traced(end.traced)
    match end.kind:
        case EndKind.REQUEUED:
            return another_follows("requeued", end.message)
        case EndKind.DISCARDED:
            return Ended(outcome=Outcome.CANCELLED, type=end.kind.value, message=end.message)
    if _is_requeued(end.kind, origin, is_worker_stopping=is_worker_stopping):
        return another_follows("requeued", _message(end, origin))
    is_cancelled = end.kind is EndKind.STOPPED
    return Ended(
        outcome=Outcome.CANCELLED if is_cancelled else Outcome.FAILED,
        type=end.kind.value,
        message="it was cancelled" if is_cancelled else _message(end, origin)[:_MAX_TEXT],
        stdout_bytes=end.stdout_bytes,
        stderr_bytes=end.stderr_bytes,
    )


def another_follows(outcome: AttemptOutcome, detail: str = "") -> AttemptEnded:
    """This attempt is over, and another one follows."""
    return AttemptEnded(outcome=outcome, detail=detail[:_MAX_TEXT])


def lost(reason: str) -> Ended:
    """The message is acknowledged and its worker died: no other attempt follows."""
    return Ended(outcome=Outcome.LOST, type=EndKind.LOST.value, message=reason)


def _message(end: End, origin: Origin) -> str:
    match end.kind:
        case EndKind.STOPPED:
            return "its worker was stopped"
        case EndKind.NOT_CARRIED:
            return str(TaskNotCarried(origin.task, origin.execution_id, end.message))
    return end.message


def _is_requeued(kind: EndKind, origin: Origin, *, is_worker_stopping: bool) -> bool:
    """Whether Celery requeues the message, or sends another, after this end."""
    match kind:
        case EndKind.STOPPED:
            return origin.acks_late and is_worker_stopping
        case EndKind.LOST:
            return origin.continues_after_loss
        case EndKind.OVER_LIMIT:
            return origin.redelivers_over_limit
    return False


def _of_traced(traced: TaskResult) -> LastEvent:
    failure = traced.failure
    if failure is None:
        return Ended(
            outcome=_SUCCEEDED,
            result_text=(traced.text or "")[:_MAX_TEXT],
            runtime_s=traced.runtime_s,
            stdout_bytes=traced.stdout_bytes,
            stderr_bytes=traced.stderr_bytes,
        )
    if _is_of_celery(failure, "Retry"):
        is_parked = failure.message == RUN_PARKED
        return another_follows("parked" if is_parked else "retry", failure.message)
    if _is_of_celery(failure, "Ignore", _REPLACED):
        return another_follows("replaced", failure.message)
    if _is_of_celery(failure, "Ignore", RUN_ELSEWHERE):
        return another_follows("requeued", failure.message)
    if _is_of_celery(failure, "Reject") and failure.state.get("requeue"):
        return another_follows("requeued", failure.message)
    is_of_celery = failure.module == _CELERY
    outcomes = {"Reject": Outcome.REJECTED, "Ignore": Outcome.IGNORED}
    outcome = outcomes.get(failure.name, Outcome.FAILED) if is_of_celery else Outcome.FAILED
    return Ended(
        outcome=outcome,
        type=failure.name,
        message=failure.message[:_MAX_TEXT],
        traceback=failure.traceback[-_MAX_TRACEBACK:],
        runtime_s=traced.runtime_s,
        stdout_bytes=traced.stdout_bytes,
        stderr_bytes=traced.stderr_bytes,
    )


def _is_of_celery(failure: Failure | None, name: str, message: str | None = None) -> bool:
    """Whether a failure is the exception of Celery of this name, and with this message."""
    if failure is None or (failure.module, failure.name) != (_CELERY, name):
        return False
    return message is None or failure.message == message


# --- the end in Redis -------------------------------------------------------------------------


def state_of(event: LastEvent | None) -> str:
    """The state of an execution's record after its last event."""
    if event is None:
        return ""
    return "ended" if isinstance(event, Ended) else "waiting"


def outcome_of(event: LastEvent | None) -> str:
    """The outcome; empty before the last event, and if another attempt follows."""
    return str(event.outcome) if isinstance(event, Ended) else ""


def failure_of(event: LastEvent) -> str:
    """The failure as text; empty if another attempt follows."""
    return f"{event.type}: {event.message}" if isinstance(event, Ended) else ""
