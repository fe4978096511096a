"""How an execution ended, put into words that can travel. User code may run in here (`__repr__`,
`__str__`), so these functions are entry frames too: they can be stopped like the code itself.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from typing import Any

from capsule_tasks.protocol.messages import Error, ErrorKind, Result
from capsule_tasks.protocol.values import NotCarried, sendable, to_wire

_INTERNAL = os.path.dirname(os.path.dirname(__file__)) + os.sep
_MAX_MESSAGE = 64 * 1024
_MAX_TRACEBACK = 512 * 1024
_MAX_NOTES = 100
_MAX_NAME = 500


def enter_result(execution_id: str, value: object) -> Result:
    """The value, or its repr where MessagePack cannot carry it."""
    name = type_name(type(value))
    with contextlib.suppress(NotCarried):
        return Result(execution_id=execution_id, value=to_wire(value), type_name=name)
    return Result(execution_id=execution_id, value=_safe_repr(value), is_repr=True, type_name=name)


def enter_error(execution_id: str, kind: ErrorKind, error: BaseException) -> Error:
    """An exception with its message, notes and the traceback of its causes."""
    return Error(
        execution_id=execution_id,
        kind=kind,
        type=type_name(type(error)),
        message=_shortened(message_of(error), _MAX_MESSAGE),
        traceback=_shortened(_traceback(error), _MAX_TRACEBACK),
        notes=_notes(error),
    )


def plain_error(execution_id: str, kind: ErrorKind, type_: str, message: str) -> Error:
    """An error that no user object has a part in."""
    return Error(execution_id=execution_id, kind=kind, type=type_, message=message)


def type_name(cls: type) -> str:
    """The qualified name, read past whatever a metaclass pretends."""
    name = sendable(type.__dict__["__qualname__"].__get__(cls))[:_MAX_NAME]
    try:
        module = type.__dict__["__module__"].__get__(cls)
    except AttributeError:
        return name
    if type(module) is str and module not in ("builtins", "__main__"):
        return f"{sendable(module)[:_MAX_NAME]}.{name}"
    return name


def _safe_repr(value: object) -> str:
    try:
        return sendable(repr(value))
    except Exception as fault:
        return f"<{type_name(type(value))} whose repr raised {type_name(type(fault))}>"


def message_of(error: BaseException) -> str:
    """What an exception says, also if it cannot say it."""
    try:
        return str(error)
    except Exception as fault:
        return f"<str() of it raised {type_name(type(fault))}>"


def _notes(error: BaseException) -> tuple[str, ...]:
    notes = getattr(error, "__notes__", ())
    if not isinstance(notes, (list, tuple)):
        return ()
    texts = [note for note in notes[:_MAX_NOTES] if type(note) is str]
    return tuple(_shortened(note, _MAX_MESSAGE) for note in texts)


def _traceback(error: BaseException) -> str:
    try:
        told = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
        _without_machinery(told, set())
        return "".join(told.format())
    except Exception as fault:
        return f"<no traceback: formatting it raised {type_name(type(fault))}>\n"


def _without_machinery(told: Any, seen: set[int]) -> None:
    if told is None or id(told) in seen:
        return
    seen.add(id(told))
    ours = [frame for frame in told.stack if not frame.filename.startswith(_INTERNAL)]
    told.stack[:] = ours
    for linked in (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ())):
        _without_machinery(linked, seen)


def _shortened(text: str, most: int) -> str:
    text = sendable(text)
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}\n… {len(text) - most} characters left out …\n{text[-most // 2 :]}"
