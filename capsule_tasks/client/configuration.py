"""Where an app's streams are, and how they are kept: read the same way by workers and producers."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.settings import ExecutionSettings, redis_url_of_environment

S = TypeVar("S", bound=msgspec.Struct)

_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
_CLUSTERS = ("redis+cluster", "rediss+cluster")


def redis_url(app: Any) -> str | None:
    """The Redis of an app's streams, or None if it names none.

    `capsule_redis_url`, else the environment's, else the broker or the result backend.
    """
    named = app.conf.get("capsule_redis_url") or redis_url_of_environment()
    if named:
        return str(named)
    for candidate in (app.conf.broker_url, app.conf.result_backend):
        url = _usable(candidate)
        if url is not None:
            return url
    return None


def _usable(url: Any) -> str | None:
    """A URL of kombu as this package spells it."""
    if isinstance(url, (list, tuple)):
        url = url[0] if url else None
    if not isinstance(url, str):
        return None
    first = url.split(";")[0]
    scheme, _, rest = first.partition("://")
    if scheme in ("redis+socket", "socket"):
        return f"unix://{rest}"
    return first if scheme in (*_SCHEMES, *_CLUSTERS) else None


def kept_settings(app: Any) -> ExecutionSettings:
    """How long, and how much of, what the app's executions say is kept."""
    kept = dict(app.conf.get("capsule_kept") or {})
    kept.setdefault("prefix", app.conf.get("capsule_prefix") or "capsule")
    return settings_of(ExecutionSettings, "capsule_kept", kept)


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
