"""The settings of code that producers send: its profiles, each one kind of session."""

from typing import Any, Literal, TypeVar

from msgspec.structs import replace

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.settings.child import ChildSettings, LimitSettings, SandboxSettings
from capsule_tasks.settings.declared import (
    MIB,
    ByteCount,
    Count,
    PositiveSeconds,
    Seconds,
    Settings,
)
from capsule_tasks.settings.environment import scrubbed_environment
from capsule_tasks.settings.sessions import PoolSettings, Profile, SessionConfig

S = TypeVar("S", bound=Settings)

DEFAULT_CODE_PROFILE = "sandbox"


class CodeProfileSettings(Settings, frozen=True, kw_only=True):
    """One kind of session for code: how it is confined, and how many a worker keeps."""

    isolation: Literal["sandbox", "none"] = "sandbox"
    """`none` trusts the code like the worker, and gives it the worker's environment."""
    limits: LimitSettings = LimitSettings()
    sandbox: SandboxSettings = SandboxSettings()
    imports: tuple[str, ...] = ()
    """Modules that the template imports before it is copied."""
    warmup: str | None = None
    """Code run once in each session before its first use."""
    warm: Count = 1
    """Fresh sessions that a worker keeps ready once the first code came."""
    max_live: Count = 10
    """Named sessions of this profile that a worker holds; 0 for a worker that holds none."""
    idle_timeout_s: PositiveSeconds = 1800.0
    """A named session that is idle for so long is checkpointed and released."""
    max_age_s: PositiveSeconds | None = None
    """A named session that is older is checkpointed and released."""
    checkpoint_every: Count = 0
    """Executions between two checkpoints of a named session; 0 makes none for that reason."""
    checkpoint_idle_s: Seconds = 30.0
    """A namespace that has changed is checkpointed once it is idle for so long."""
    max_checkpoint_bytes: ByteCount = 256 * MIB

    def profile(self, base: SessionConfig) -> Profile:
        """Sessions of this kind, each used once; `base` has what the settings do not say."""
        is_confined = self.isolation == "sandbox"
        child: ChildSettings = replace(
            base.child, limits=self.limits, sandbox=self.sandbox if is_confined else None
        )
        session = replace(
            base,
            child=child,
            env=base.env or (scrubbed_environment() if is_confined else None),
            warmup=self.warmup,
        )
        pool = PoolSettings(min_idle=0, fresh=True)
        return Profile(session=session, pool=pool, imports=self.imports)


class TenantSettings(Settings, frozen=True, kw_only=True):
    """Limits of the named sessions of one tenant, on all workers together."""

    max_sessions: Count = 0
    """Sessions that are live at once; 0 for any number."""
    max_cpu_s: Seconds = 0.0
    """Processor time within a day; 0 for any. It is checked before each call."""


def code_profile_settings(name: str, values: dict[str, Any]) -> CodeProfileSettings:
    """The settings in a dict; InvalidSetting names a wrong one as the dict does."""
    values = dict(values)
    for group, kind in (("limits", LimitSettings), ("sandbox", SandboxSettings)):
        if isinstance(values.get(group), dict):
            values[group] = checked_settings(kind, f"{name}[{group!r}]", values[group])
    return checked_settings(CodeProfileSettings, name, values)


def checked_settings(kind: type[S], name: str, values: dict[str, Any]) -> S:
    known = kind.__struct_fields__
    given = {}
    for key, value in values.items():
        if key not in known:
            raise InvalidSetting(f"{name}[{key!r}]", value, f"one of {', '.join(known)}")
        # A configuration in JSON or YAML has lists.
        given[key] = tuple(value) if isinstance(value, list) else value
    try:
        return kind(**given)
    except InvalidSetting as error:  # names the field; in the app it has another name
        field = error.name.rpartition(".")[2]
        raise InvalidSetting(f"{name}[{field!r}]", error.value, error.must) from None
