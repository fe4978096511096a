"""How an execution ended, as data that the parent can read.

User code may run in here (`__repr__`, `__str__`), so these functions are entry frames, too: they
can be stopped like the code itself.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from typing import Any

from capsule_tasks.protocol.messages import Error, ErrorKind, Result
from capsule_tasks.protocol.values import NotCarried, sendable, to_wire

_INTERNAL = os.path.dirname(os.path.dirname(__file__)) + os.sep
MAX_TEXT = 64 * 1024
MAX_TRACEBACK = 512 * 1024
_MAX_NOTES = 100
_MAX_NAME = 500


def enter_result(execution_id: str, value: object) -> Result:
    """The value, or its repr where MessagePack cannot carry it."""
    name = type_name(type(value))
    with contextlib.suppress(NotCarried):
        return Result(execution_id=execution_id, value=to_wire(value), type_name=name)
    return Result(execution_id=execution_id, value=repr_of(value), is_repr=True, type_name=name)


def enter_error(execution_id: str, kind: ErrorKind, error: BaseException) -> Error:
    """An exception with its message, notes and the traceback of its causes."""
    return Error(
        execution_id=execution_id,
        kind=kind,
        type=type_name(type(error)),
        message=shortened(message_of(error), MAX_TEXT),
        traceback=traceback_of(error),
        notes=notes_of(error),
    )


def plain_error(execution_id: str, kind: ErrorKind, type_: str, message: str) -> Error:
    """An error that no user object has a part in."""
    return Error(execution_id=execution_id, kind=kind, type=type_, message=message)


def type_name(cls: type) -> str:
    """The qualified name; a metaclass cannot make it another one."""
    name = sendable(type.__dict__["__qualname__"].__get__(cls))[:_MAX_NAME]
    try:
        module = type.__dict__["__module__"].__get__(cls)
    except AttributeError:
        return name
    if type(module) is str and module not in ("builtins", "__main__"):
        return f"{sendable(module)[:_MAX_NAME]}.{name}"
    return name


def repr_of(value: object) -> str:
    try:
        return sendable(repr(value))
    except Exception as fault:
        return f"<{type_name(type(value))} whose repr raised {type_name(type(fault))}>"


def message_of(error: BaseException) -> str:
    """The `str()` of an exception, or a substitute if that raises."""
    try:
        return str(error)
    except Exception as fault:
        return f"<str() of it raised {type_name(type(fault))}>"


def notes_of(error: BaseException) -> tuple[str, ...]:
    notes = getattr(error, "__notes__", ())
    if not isinstance(notes, (list, tuple)):
        return ()
    return tuple(shortened(note, MAX_TEXT) for note in notes[:_MAX_NOTES] if type(note) is str)


def traceback_of(error: BaseException) -> str:
    """The traceback without frames of this package."""
    try:
        described = traceback.TracebackException(
            type(error), error, error.__traceback__, compact=True
        )
        _remove_internal_frames(described, set())
        return shortened("".join(described.format()), MAX_TRACEBACK)
    except Exception as fault:
        return f"<no traceback: formatting it raised {type_name(type(fault))}>\n"


def _remove_internal_frames(described: Any, seen: set[int]) -> None:
    if described is None or id(described) in seen:
        return
    seen.add(id(described))
    stack = described.stack
    stack[:] = [frame for frame in stack if not frame.filename.startswith(_INTERNAL)]
    parts = getattr(described, "exceptions", None) or ()
    for linked in (described.__cause__, described.__context__, *parts):
        _remove_internal_frames(linked, seen)


def shortened(text: str, max_chars: int) -> str:
    """Text that can be sent, with its middle left out if it is too long."""
    text = sendable(text)
    if len(text) <= max_chars:
        return text
    left_out = f"\n… {len(text) - max_chars} characters left out …\n"
    return f"{text[: max_chars // 2]}{left_out}{text[-max_chars // 2 :]}"
