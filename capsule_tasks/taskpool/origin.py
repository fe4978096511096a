"""Where a child gets the worker's Celery app from."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from capsule_tasks.settings import AppLaneSettings


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


def lane_settings(app: Any, hostname: str, **changes: Any) -> AppLaneSettings:
    """What a child of this worker is told."""
    return AppLaneSettings(
        hostname=hostname,
        app=path_of(app),
        conf=_made_in_code(app),
        tasks=tuple(sorted(app.tasks)),
        **changes,
    )


def _made_in_code(app: Any) -> dict[str, Any]:
    """Settings that were assigned at run time, as far as they can be told in words."""
    found: dict[str, Any] = {}
    for name, value in dict(app.conf.changes).items():
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError):
            continue  # objects: whoever made them in the module that is imported makes them again
        found[name] = value
    return found
