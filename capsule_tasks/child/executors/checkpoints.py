"""Saving a namespace, and restoring it.

Names are pickled together, so that objects they share stay shared. If that fails, the names at
fault are found one by one and reported, and the others are saved. Functions and classes defined in
the session travel by value; a function comes back with the live namespace as its globals, so it
sees later assignments like any function of a REPL.
"""

from __future__ import annotations

import io
import pickle
from types import ModuleType
from typing import Any

import cloudpickle

from capsule_tasks.child.executors.namespace import is_users
from capsule_tasks.child.executors.outcomes import message_of, type_name
from capsule_tasks.protocol.values import sendable

_FORMAT = 1
_GLOBALS = "namespace"


class NotSaved(Exception):
    """The bytes are no checkpoint that this version can read."""


def enter_save(namespace: dict[str, Any]) -> tuple[bytes, list[str], dict[str, str]]:
    """The saved bytes, the names in them, and the names left out, each with the reason."""
    values = {name: value for name, value in namespace.items() if is_users(name)}
    skipped: dict[str, str] = {}
    try:
        data = _dump(values, namespace)
    except Exception:
        values, skipped = _without_unpicklable(values, namespace)
        data = _dump(values, namespace)
    return data, _sendable_names(values), skipped


def enter_restore(data: bytes, mode: str, module: ModuleType) -> list[str]:
    """Restore saved names in the module; after a failure the module is exactly as it was."""
    namespace = module.__dict__
    before = dict(namespace)
    try:
        if mode == "replace":
            for name in [name for name in namespace if is_users(name)]:
                del namespace[name]
        values = _load(data, namespace)
        namespace.update(values)
    except BaseException:
        namespace.clear()
        namespace.update(before)
        raise
    return _sendable_names(values)


def _sendable_names(values: dict[str, Any]) -> list[str]:
    return sorted(map(sendable, values))


def _without_unpicklable(
    values: dict[str, Any], namespace: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    kept: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for name, value in values.items():
        try:
            _dump({name: value}, namespace)
        except Exception as fault:
            reason = f"{type_name(type(value))}: {type_name(type(fault))}: {message_of(fault)}"
            skipped[sendable(name)] = sendable(reason)[:500]
        else:
            kept[name] = value
    return kept, skipped


def _dump(values: dict[str, Any], namespace: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    _Saver(buffer, namespace).dump((_FORMAT, values))
    return buffer.getvalue()


def _load(data: bytes, namespace: dict[str, Any]) -> dict[str, Any]:
    loaded = _Loader(io.BytesIO(data), namespace).load()
    if type(loaded) is not tuple or len(loaded) != 2 or loaded[0] != _FORMAT:
        raise NotSaved("the data is not a checkpoint of this version")
    values: dict[str, Any] = loaded[1]
    return values


class _Saver(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles definitions of the session by value, and a reference instead of its namespace."""

    def __init__(self, file: io.BytesIO, namespace: dict[str, Any]) -> None:
        super().__init__(file)
        # cloudpickle gives functions that share globals one new dict of them. This dict stands for
        # the live namespace, which replaces it on loading.
        self._placeholder = {"__name__": "__main__"}
        self.globals_ref[id(namespace)] = self._placeholder
        self._namespace = namespace

    def persistent_id(self, obj: object) -> str | None:
        if obj is self._placeholder or obj is self._namespace:
            return _GLOBALS
        return None


class _Loader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, namespace: dict[str, Any]) -> None:
        super().__init__(file)
        self._namespace = namespace

    def persistent_load(self, pid: object) -> dict[str, Any]:
        if pid != _GLOBALS:
            raise NotSaved(f"the data refers to an unknown object: {pid!r}")
        return self._namespace
