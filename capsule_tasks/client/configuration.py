"""How an app's streams are kept: read the same way by workers and producers."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.settings import ExecutionSettings

S = TypeVar("S", bound=msgspec.Struct)


def retention_settings(app: Any) -> ExecutionSettings:
    """How long, and how much of, what the app's executions say is kept."""
    kept = dict(app.conf.get("capsule_retention") or {})
    kept.setdefault("prefix", app.conf.get("capsule_prefix") or "capsule")
    return settings_of(ExecutionSettings, "capsule_retention", kept)


def settings_of(kind: type[S], name: str, values: Any) -> S:
    """A group of settings from a dict in the app's configuration; refuses unknown names."""
    values = values or {}
    if not isinstance(values, dict):
        raise InvalidSetting(name, values, "a dict")
    known = kind.__struct_fields__
    for key in values:
        if key not in known:
            raise InvalidSetting(f"{name}[{key!r}]", values[key], f"one of {', '.join(known)}")
    return kind(**values)
