"""The settings of an app: read the same way by workers and producers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.settings import (
    DEFAULT_CODE_PROFILE,
    AppSettings,
    CodeProfileSettings,
    ExecutionSettings,
    LeaseSettings,
    NamedSessionSettings,
    RunSettings,
    Settings,
    TenantSettings,
    checked_setting,
    checked_settings,
    code_profile_settings,
)

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


def prefix_of(app: Any) -> str:
    """The beginning of every key of the app."""
    return str(setting(app, "capsule_prefix") or _DEFAULTS.prefix)


def retention_settings(app: Any) -> ExecutionSettings:
    """How long, and how much of, the events of the app's executions are retained."""
    return settings_of(ExecutionSettings, app, "capsule_retention", prefix=prefix_of(app))


def run_settings(app: Any) -> RunSettings:
    """How long, and how much of, the app's durable runs are kept."""
    return settings_of(RunSettings, app, "capsule_runs", prefix=prefix_of(app))


def run_lease_settings(app: Any) -> LeaseSettings:
    """How long a process that drives runs counts as alive without a renewal."""
    return LeaseSettings(lease_s=setting(app, "capsule_lease_s"))


def named_session_settings(app: Any) -> NamedSessionSettings:
    """How long Redis keeps what it has of named sessions.

    The id of a call is known for as long as its message may be redelivered or its result read, so
    that no redelivered message runs code twice.
    """
    prefix = prefix_of(app)
    defaults = NamedSessionSettings(prefix=prefix)
    options = app.conf.broker_transport_options or {}
    # Results that never expire: for as long as the session itself.
    results_s = _seconds(app.conf.result_expires) or defaults.ttl_s
    known_ttl_s = max(
        defaults.known_ttl_s, float(options.get("visibility_timeout") or 0), results_s
    )
    ttl_s = max(defaults.ttl_s, known_ttl_s)
    return NamedSessionSettings(prefix=prefix, known_ttl_s=known_ttl_s, ttl_s=ttl_s)


def _seconds(value: Any) -> float:
    """A time of Celery's in seconds: a number, a timedelta, or None for no limit."""
    return float(value.total_seconds() if isinstance(value, timedelta) else value or 0)


def code_profiles(app: Any) -> dict[str, CodeProfileSettings]:
    """The kinds of session in which the app's workers run code that producers send, by name."""
    name = "capsule_code_profiles"
    profiles = setting(app, name)
    if profiles is None:
        return {DEFAULT_CODE_PROFILE: CodeProfileSettings()}
    found = {}
    for profile, values in profiles.items():
        if not isinstance(profile, str) or not profile:
            raise InvalidSetting(name, profiles, "a dict whose keys are names of profiles")
        if not isinstance(values, dict):
            raise InvalidSetting(f"{name}[{profile!r}]", values, "a dict")
        found[profile] = code_profile_settings(f"{name}[{profile!r}]", values)
    return found


def tenant_settings(app: Any) -> dict[str, TenantSettings]:
    """The limits of tenants' named sessions, by tenant."""
    name, found = "capsule_tenants", {}
    for tenant, values in (setting(app, name) or {}).items():
        if not isinstance(tenant, str) or not tenant:
            raise InvalidSetting(name, {tenant: values}, "a dict whose keys are names of tenants")
        if not isinstance(values, dict):
            raise InvalidSetting(f"{name}[{tenant!r}]", values, "a dict")
        found[tenant] = checked_settings(TenantSettings, f"{name}[{tenant!r}]", values)
    return found


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
