"""Saving a namespace.

Each name is a pickle of its own; one pickler makes all of them, so that objects they share stay
shared. Modules are saved by name. Functions and classes of the session travel by value; a function
comes back with the live namespace as its globals, so it sees later assignments like any function of
a REPL, and it does not bring values of its globals along.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import cloudpickle

from capsule_tasks.child.checkpoints.index import (
    CODE_TYPE,
    LIVE_NAMESPACE,
    Entry,
    Index,
    NotSaved,
    packed,
    reason_of,
)
from capsule_tasks.child.checkpoints.packages import python_version, versions_of
from capsule_tasks.child.checkpoints.pieces import PieceWriter, TooLarge
from capsule_tasks.child.checkpoints.reducers import REDUCERS, function_of_session
from capsule_tasks.child.executors.namespace import is_users
from capsule_tasks.child.executors.outcomes import type_name
from capsule_tasks.protocol.values import sendable

_LARGEST = 3
"""Names in the error about a namespace that is too large."""
_PLAIN = frozenset({str, int, float, bool, bytes, list, tuple, set, type(None)})

Send = Callable[[int, memoryview], None]


class Saved(NamedTuple):
    """A description of a saved namespace, without its data."""

    size: int
    names: tuple[str, ...]
    skipped: dict[str, str]
    python: str
    packages: dict[str, str]


def enter_save(namespace: dict[str, Any], send: Send, piece_bytes: int, max_bytes: int) -> Saved:
    """Save the namespace and send its data on, in pieces, each with the bytes before it.

    If a name cannot be saved, all names at fault are found one by one, and the data is sent again
    from its beginning without them.
    """
    values = {name: value for name, value in namespace.items() if is_users(name)}
    skipped: dict[str, str] = {}
    try:
        size, index = _save(values, namespace, PieceWriter(send, piece_bytes, max_bytes))
    except NotSaved:
        raise
    except Exception:
        values, skipped = _without_unpicklable(values, namespace)
        size, index = _save(values, namespace, PieceWriter(send, piece_bytes, max_bytes))
    names = tuple(sorted(entry.name for entry in index.entries))
    return Saved(size, names, skipped, index.python, index.packages)


def _save(
    values: dict[str, Any], namespace: dict[str, Any], writer: PieceWriter
) -> tuple[int, Index]:
    saver = _Saver(writer, namespace)
    entries: list[Entry] = []
    mark, name = f"{os.urandom(8).hex()}:", ""
    try:
        for number, (name, value) in enumerate(values.items()):
            saver.dump((f"{mark}{number}", name, value))
            entries.append(Entry(sendable(name), writer.size))
    except TooLarge:
        raise NotSaved(_too_large(entries, name, writer)) from None
    index = Index(mark, entries, python_version(), versions_of(saver.modules))
    writer.write(packed(index))
    writer.flush()
    return writer.size, index


def _too_large(entries: list[Entry], name: str, writer: PieceWriter) -> str:
    begins = [0, *(entry.end for entry in entries)]
    sizes = {entry.name: entry.end - begin for entry, begin in zip(entries, begins, strict=False)}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_LARGEST]
    known = "".join(f", {name!r:.100} {sizes[name]} bytes" for name in largest if sizes[name])
    return (
        f"its checkpoint has more than the {writer.max_bytes} bytes that are allowed; the limit "
        f"was passed with {sendable(name)!r:.100}{known}"
    )


def _without_unpicklable(
    values: dict[str, Any], namespace: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    kept: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for name, value in values.items():
        try:
            _Saver(_Nowhere(), namespace).dump(value)
        except Exception as fault:
            skipped[sendable(name)] = reason_of(f"{type_name(type(value))}: ", fault)
        else:
            kept[name] = value
    return kept, skipped


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, _data: object) -> int:
        return 0


class _Saver(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles definitions of the session by value, and modules and its namespace by reference."""

    def __init__(self, file: Any, namespace: dict[str, Any]) -> None:
        super().__init__(file)
        # cloudpickle gives functions that share globals one new dict of them. This dict stands for
        # the live namespace, which replaces it on loading.
        self._placeholder = {"__name__": "__main__"}
        self.globals_ref[id(namespace)] = self._placeholder
        self._namespace = namespace
        self.modules: set[str] = set()
        """Modules that the namespace uses."""

    def persistent_id(self, obj: object) -> object:
        if type(obj) in _PLAIN:  # called for every object
            return None
        if obj is self._placeholder or obj is self._namespace:
            return LIVE_NAMESPACE
        if obj is CodeType:
            return CODE_TYPE
        if issubclass(type(obj), ModuleType):
            name = vars(obj).get("__name__")
            if type(name) is str and sys.modules.get(name) is obj:
                self.modules.add(name)
                return name, _imported_below(name)
        return None

    def reducer_override(self, obj: Any) -> Any:
        defined = obj if isinstance(obj, (type, FunctionType)) else type(obj)
        module = getattr(defined, "__module__", None)
        if type(module) is str:
            self.modules.add(module)
        reduced = super().reducer_override(obj)
        if isinstance(obj, FunctionType) and obj.__globals__ is self._namespace:
            return function_of_session(obj, reduced)
        return reduced

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(REDUCERS)


def _imported_below(name: str) -> tuple[str, ...]:
    """Modules of a package that are imported: `import a.b` binds `a` only."""
    return tuple(module for module in list(sys.modules) if module.startswith(f"{name}."))
