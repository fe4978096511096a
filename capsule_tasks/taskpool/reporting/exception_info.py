"""Rebuild failures for Celery: an `ExceptionInfo` from the data that a child has sent."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback, RemoteTraceback
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.serialization import UnpickleableExceptionWrapper, create_exception_cls

from capsule_tasks.protocol.messages import Failure, Raised

log = logging.getLogger("capsule_tasks.taskpool")

_ROOTS = {"SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt}


def rebuild_info(failure: Failure) -> Any:
    """The info that Celery's tracer had: the exception, its type, the text of its traceback."""
    error = rebuild(failure)
    if isinstance(error, MemoryError):
        # Celery raises this type again in the worker's own process, which is not short of memory,
        # and then neither acknowledges nor rejects the message.
        kind = create_exception_cls(failure.name, failure.module, Exception)
        error = _made(kind, [failure.message], failure)
    if failure.traceback:
        error.__cause__ = RemoteTraceback(f'\n"""\n{failure.traceback}"""')
    return _info(error, failure.traceback, internal=failure.internal)


def info_of(error: BaseException) -> Any:
    """The same for an exception of the pool: no traceback, which would not concern the task."""
    text = "".join(traceback.format_exception_only(error))
    text = f"Traceback (most recent call last):\n{text}"
    return _info(ExceptionWithTraceback(error, text), text, kind=type(error))


def _info(
    error: BaseException, text: str, *, kind: type | None = None, internal: bool = False
) -> Any:
    info = ExceptionInfo.__new__(ExceptionInfo)
    info.type = kind or type(error)
    info.exception = error
    info.tb = None
    info.traceback = text
    info.internal = internal
    return info


def rebuild(failure: Raised) -> BaseException:
    """An exception like the one that was raised: of its own type if this process has that type.

    Nothing is imported for it, and no constructor runs: the module of a task may do anything. An
    unknown type, or one that cannot be made so, is replaced by a new one of the same name, whose
    message says the same.
    """
    kind = _type_of(failure)
    if kind is not None and failure.args is not None:
        try:
            error = _made(kind, failure.args, failure)
            _ = repr(error), str(error)  # these may need attributes that only the constructor sets
            return error
        except Exception:
            log.debug("no %s.%s can be made", failure.module, failure.name, exc_info=True)
    base = _ROOTS.get(failure.name, Exception) if kind is None else _safe_base(kind)
    replacement = create_exception_cls(failure.name, failure.module, base)
    return _made(replacement, [failure.message], failure)


def _made(kind: Any, args: list[Any], failure: Raised) -> BaseException:
    error: BaseException = kind.__new__(kind, *args)
    _restore(error, failure)
    error.args = tuple(args)
    for note in failure.notes:
        error.add_note(note)
    return error


def _type_of(failure: Raised) -> Any:
    found: Any = sys.modules.get(failure.module)
    for name in failure.name.split("."):
        found = getattr(found, name, None)
    is_exception = isinstance(found, type) and issubclass(found, BaseException)
    return found if is_exception else None


def _safe_base(kind: type[BaseException]) -> type[BaseException]:
    """A base class by which Celery recognizes the error, although its arguments are lost."""
    known = (Retry, Reject, Ignore, MemoryError, SystemExit, KeyboardInterrupt)
    return next((root for root in known if issubclass(kind, root)), Exception)


def _restore(error: BaseException, failure: Raised) -> None:
    """Attributes that the constructors of Celery's own exceptions would have set."""
    args, state = failure.args or [None], failure.state
    if isinstance(error, Retry):
        inner = failure.inner if isinstance(failure, Failure) else None
        Retry.__init__(error, args[0], None, state.get("when"), bool(state.get("is_eager")))
        if inner is not None:
            error.exc, error.excs = rebuild(inner), inner.text
    elif isinstance(error, Reject):
        Reject.__init__(error, args[0], bool(state.get("requeue")))
    elif isinstance(error, UnpickleableExceptionWrapper):  # Celery reads what it wraps
        error.exc_module, error.exc_cls_name, error.exc_args, error.text = args
    elif isinstance(error, SystemExit):
        error.code = args[0]
