"""A summary of the namespace: names, types and sizes, never values."""

from __future__ import annotations

import fnmatch
import itertools
import sys
from types import ModuleType
from typing import Any

from capsule_tasks.child.executors.outcomes import type_name
from capsule_tasks.protocol.messages import NamespaceEntry
from capsule_tasks.protocol.values import sendable
from capsule_tasks.settings import DiagnosticSettings

_HEAP_TYPE = 1 << 9
_MAX_NAME = 500
_MODULE_NAMES = {*vars(ModuleType("")), "__annotations__", "__builtins__"}
_flags_of = type.__dict__["__flags__"].__get__
"""Read past a metaclass: `cls.__flags__` would run its `__getattribute__`."""


def user_names(namespace: dict[str, Any]) -> int:
    """The number of names, without those of every module."""
    return max(0, len(namespace) - sum(name in namespace for name in _MODULE_NAMES))


def summarize(
    namespace: dict[str, Any], settings: DiagnosticSettings
) -> tuple[int, list[NamespaceEntry]]:
    """The number of names, and the first of them. Runs no user code, so any thread may call it."""
    patterns = [pattern.lower() for pattern in settings.redact]
    items = namespace.copy().items()  # a copy, as the main thread may add names meanwhile
    visible = (item for item in items if is_users(item[0]))
    first = itertools.islice(visible, settings.summary_names)
    return user_names(namespace), [_entry(name, value, patterns) for name, value in first]


def _entry(name: str, value: object, patterns: list[str]) -> NamespaceEntry:
    lowered = name.lower()
    if any(fnmatch.fnmatchcase(lowered, pattern) for pattern in patterns):
        return NamespaceEntry(name=_shortened(name), redacted=True)
    return NamespaceEntry(
        name=_shortened(name), type_name=type_name(type(value)), size=_size(value)
    )


def _shortened(name: str) -> str:
    return sendable(name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…")


def _size(value: object) -> int:
    """Bytes of the object itself; a user's own `__sizeof__` is not called."""
    if _flags_of(type(value)) & _HEAP_TYPE:
        return object.__sizeof__(value)
    return sys.getsizeof(value)


def is_users(name: object) -> bool:
    """Whether user code may have made this name: `__name__` and the like are the module's own."""
    return type(name) is str and not (name.startswith("__") and name.endswith("__"))
