"""How calls of named sessions end: for their event stream, and for the result backend."""

from __future__ import annotations

import reprlib
from typing import Any

import msgspec

from capsule_tasks.child.executors.outcomes import repr_of
from capsule_tasks.executions.ends import End, EndKind
from capsule_tasks.protocol.events import Ended, Outcome
from capsule_tasks.protocol.messages import (
    Error,
    ErrorKind,
    Failure,
    Result,
    TaskResult,
    Terminal,
)

_ENDED_BY_THE_CODE = frozenset(
    {ErrorKind.RAISED, ErrorKind.TIMEOUT, ErrorKind.LIMIT, ErrorKind.TOO_LARGE}
)
"""Errors that belong to the call alone. After any other the child is gone, or was asked to stop."""
LOST_WITH_WORKER = "its worker died, so the call may have run"
VALUE_LOST = "its worker died before the value was stored; the code has run to its end"

_KIND = "kind"

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 1000
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = 50


class CallOutcome(msgspec.Struct, frozen=True):
    """The end of a call, as the result backend keeps it."""

    outcome: Outcome
    value: Any = None
    type: str = ""
    message: str = ""
    traceback: str = ""
    kind: str = ErrorKind.RAISED.value
    """The kind of the failure: an ErrorKind."""


def traced(terminal: Terminal, runtime_s: float | None) -> Terminal:
    """The terminal message as a tracer of Celery would send it, if the code came to its end."""
    if isinstance(terminal, Result):
        text = terminal.value if terminal.is_repr else _shown(terminal.value)
        return _task_result(terminal, runtime_s, text=text)
    if isinstance(terminal, Error) and terminal.kind in _ENDED_BY_THE_CODE:
        failure = Failure(
            module="",
            name=terminal.type,
            message=terminal.message,
            text=f"{terminal.type}({terminal.message!r})",
            notes=terminal.notes,
            traceback=terminal.traceback or terminal.stack,
            state={_KIND: terminal.kind},
        )
        return _task_result(terminal, runtime_s, failure=failure)
    return terminal


def _shown(value: Any) -> str:
    """A shortened repr. Python refuses to write numbers of thousands of digits."""
    try:
        return _short.repr(value)
    except Exception:  # noqa: BLE001 - the call must end, whatever its value is
        return repr_of(value)


def refusal(execution_id: str, type_name: str, message: str) -> TaskResult:
    """The end of a call that the host does not run."""
    failure = Failure(module="", name=type_name, message=message, text=f"{type_name}({message!r})")
    return TaskResult(execution_id=execution_id, failure=failure)


def _task_result(terminal: Terminal, runtime_s: float | None, **fields: Any) -> TaskResult:
    return TaskResult(
        execution_id=terminal.execution_id,
        stdout_bytes=terminal.stdout_bytes,
        stderr_bytes=terminal.stderr_bytes,
        runtime_s=runtime_s,
        has_unread_raw=False,
        **fields,
    )


def outcome_of_end(end: End, result: Result | None) -> CallOutcome:
    """The outcome of a call that ended in this worker; `result` if it has a value."""
    if end.traced is not None and (failure := end.traced.failure) is not None:
        is_lost = failure.name == EndKind.LOST.value
        outcome = Outcome.LOST if is_lost else Outcome.FAILED
        kind = failure.state.get(_KIND, ErrorKind.RAISED.value)
        return CallOutcome(outcome, None, failure.name, failure.message, failure.traceback, kind)
    if end.traced is not None:
        return CallOutcome(Outcome.SUCCEEDED, result.value if result is not None else None)
    if end.kind is EndKind.STOPPED:
        return CallOutcome(Outcome.CANCELLED, None, end.kind.value, "it was cancelled")
    outcome = Outcome.LOST if end.kind is EndKind.LOST else Outcome.FAILED
    return CallOutcome(outcome, None, end.kind.value, end.message)


def outcome_of_event(ended: Ended) -> CallOutcome:
    """The outcome of a call that ended elsewhere: its value is not in the stream."""
    if ended.outcome is Outcome.SUCCEEDED:
        return CallOutcome(Outcome.LOST, None, EndKind.LOST.value, VALUE_LOST)
    return CallOutcome(ended.outcome, None, ended.type, ended.message, ended.traceback)
