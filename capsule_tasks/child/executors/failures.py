"""How a Celery task failed, as data that the worker can read and rebuild."""

from __future__ import annotations

from typing import Any

from capsule_tasks.child.executors import outcomes
from capsule_tasks.protocol.messages import Failure, Raised
from capsule_tasks.protocol.values import NotCarried, sendable, to_wire

_STATE = ("when", "requeue", "is_eager")
"""Attributes of Celery's own exceptions that Celery reads in the worker's main process."""


def describe_info(info: Any) -> Failure:
    """Celery's description of an exception, as data."""
    error = getattr(info.exception, "exc", None)
    is_wrapped = type(info.exception).__name__ == "ExceptionWithTraceback"
    failure = describe(error if is_wrapped and error is not None else info.exception)
    failure.traceback = sendable(str(info.traceback or ""))[-outcomes.MAX_TRACEBACK :]
    failure.internal = bool(info.internal)
    return failure


def describe(error: BaseException) -> Failure:
    """An exception as data; never fails, even if the exception cannot be formatted."""
    inner = getattr(error, "exc", None)
    return Failure(
        **_fields(error),
        traceback=outcomes.traceback_of(error),
        inner=Raised(**_fields(inner)) if isinstance(inner, BaseException) else None,
    )


def _fields(error: BaseException) -> dict[str, Any]:
    kind = type(error)
    return {
        "module": sendable(str(getattr(kind, "__module__", ""))),
        "name": sendable(kind.__qualname__),
        "args": _args(error),
        "message": outcomes.shortened(outcomes.message_of(error), outcomes.MAX_TEXT),
        "text": outcomes.shortened(outcomes.repr_of(error), outcomes.MAX_TEXT),
        "notes": outcomes.notes_of(error),
        "state": _state(error),
    }


def _args(error: BaseException) -> list[Any] | None:
    try:
        return [to_wire(value) for value in error.args]
    except NotCarried:
        return None


def _state(error: BaseException) -> dict[str, Any]:
    found = {}
    for name in _STATE:
        if (value := getattr(error, name, None)) is not None:
            try:
                found[name] = to_wire(value)
            except NotCarried:
                found[name] = sendable(str(value))
    return found
