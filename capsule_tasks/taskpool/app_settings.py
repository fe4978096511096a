"""Where a child gets the worker's Celery app from."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from capsule_tasks.settings import TaskChildSettings


def path_of(app: Any) -> str:
    """`module:attribute` under which a fresh interpreter finds the app; empty if nowhere."""
    candidates = [name for name in (app.main, getattr(app, "__module__", None)) if name]
    modules = [sys.modules.get(name) for name in candidates] + list(sys.modules.values())
    for module in modules:
        name = getattr(module, "__name__", None)
        if module is None or name is None or name == "__main__" or name.startswith("celery."):
            continue
        for attribute, value in list(vars(module).items()):
            if value is app:
                return f"{name}:{attribute}"
    return ""


def lane_settings(app: Any, hostname: str, **changes: Any) -> TaskChildSettings:
    """The settings that a child of this worker is sent."""
    made = _made_in_code(app)
    conf = {name: value for name, value in made.items() if _can_be_told(value)}
    return TaskChildSettings(
        hostname=hostname,
        app=path_of(app),
        conf=conf,
        unsendable=tuple(sorted(made.keys() - conf.keys())),
        tasks=tuple(sorted(app.tasks)),
        **changes,
    )


def _made_in_code(app: Any) -> dict[str, Any]:
    """Settings that were assigned or added as defaults: who imports the app may have others."""
    found: dict[str, Any] = {}
    for settings in reversed(app.conf.maps[:-2]):  # the last are the configuration, and Celery's
        found.update(settings)
    found.pop("deprecated_settings", None)  # of Celery itself
    return found


def _can_be_told(value: Any) -> bool:
    """Whether the child would have the same; lists for tuples, which Celery takes as well."""
    try:
        decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
        return bool(decoded == (list(value) if isinstance(value, tuple) else value))
    except Exception:  # noqa: BLE001 - comparing runs code of anybody's
        return False
