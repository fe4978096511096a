"""The settings of an app: read the same way by workers and producers."""

from __future__ import annotations

from typing import Any, TypeVar

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.settings import AppSettings, ExecutionSettings, Settings, checked_setting

S = TypeVar("S", bound=Settings)

_DEFAULTS = AppSettings()


def setting(app: Any, name: str) -> Any:
    """A `capsule_…` setting of an app, checked, or its default."""
    field = name.removeprefix("capsule_")
    return checked_setting(AppSettings, field, app.conf.get(name, _default(app, field)), name)


def _default(app: Any, field: str) -> Any:
    # An app whose prefork pool does not fork (`worker_pool_start_method`) has a reason for it.
    if field == "start" and app.conf.get("worker_pool_start_method", "fork") != "fork":
        return "exec"
    return getattr(_DEFAULTS, field)


def retention_settings(app: Any) -> ExecutionSettings:
    """How long, and how much of, the events of the app's executions are retained."""
    prefix = setting(app, "capsule_prefix") or _DEFAULTS.prefix
    return settings_of(ExecutionSettings, app, "capsule_retention", prefix=prefix)


def settings_of(kind: type[S], app: Any, name: str, **defaults: Any) -> S:
    """A group of settings from a dict in the app's configuration; refuses unknown names."""
    values = setting(app, name) or {}
    known = kind.__struct_fields__
    for key in values:
        if key not in known:
            raise InvalidSetting(f"{name}[{key!r}]", values[key], f"one of {', '.join(known)}")
    try:
        return kind(**{**defaults, **values})
    except InvalidSetting as error:  # names the field; in the app it has another name
        field = error.name.rpartition(".")[2]
        raise InvalidSetting(f"{name}[{field!r}]", error.value, error.must) from None
