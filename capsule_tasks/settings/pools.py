"""How many sessions a pool keeps, and of which kinds."""

from typing import Any, ClassVar, Literal, Self

from msgspec.structs import replace

from capsule_tasks.settings.child import ChildSettings
from capsule_tasks.settings.declared import (
    ByteCount,
    Count,
    PositiveCount,
    PositiveSeconds,
    Relations,
    Settings,
)
from capsule_tasks.settings.environment import scrubbed_environment
from capsule_tasks.settings.sandbox import LimitSettings, SandboxSettings
from capsule_tasks.settings.sessions import SessionConfig


class PoolSettings(Settings, frozen=True, kw_only=True):
    """How many sessions a pool keeps, and for how long each is used."""

    min_idle: Count = 1
    """Sessions that are kept ready while none is borrowed."""
    max_sessions: PositiveCount = 4
    """Sessions at any moment, those that are being started or ended included."""
    idle_timeout_s: PositiveSeconds = 300.0
    """An idle session beyond `min_idle` is ended after so long."""
    fresh: bool = True
    """Whether every borrower gets a session that was never used before; named ones excepted. False
    is for code whose borrowers may see what others left: no process is started for each of them."""
    max_uses: PositiveCount | None = None
    max_age_s: PositiveSeconds | None = None
    max_growth_bytes: ByteCount | None = None
    max_rss_bytes: ByteCount | None = None
    """A session is replaced after so many executions (a borrower that runs none counts as one), so
    long, so much growth of its memory, or when it uses more memory than that."""
    breaker_failures: PositiveCount = 3
    """After so many failed starts in a row, borrowers get an error instead of waiting."""
    breaker_reset_s: PositiveSeconds = 5.0
    """After so long one more start is tried."""

    _relations: ClassVar[Relations] = (("min_idle", "<=", "max_sessions"),)


class Profile(Settings, frozen=True, kw_only=True):
    """One kind of session that a pool offers: how it is started, configured and kept."""

    session: SessionConfig = SessionConfig()
    pool: PoolSettings = PoolSettings()
    start: Literal["fork", "cold"] = "fork"
    """`fork` copies a template that has imported everything; `cold` starts a fresh interpreter."""
    imports: tuple[str, ...] = ()
    """Modules that the template imports before it is copied."""
    template_timeout_s: PositiveSeconds = 60.0
    stop_mode: Literal["kill", "graceful"] = "kill"
    """How an idle session is ended: `graceful` runs its exit hooks, for `shutdown_s` at most."""

    @classmethod
    def app(cls, pool: PoolSettings | None = None, **changes: Any) -> Self:
        """Trusted code in the environment of this process.

        Its sessions are used again, unless the given `pool` says otherwise by `fresh`.
        """
        return cls(pool=pool or PoolSettings(fresh=False), **changes)

    @classmethod
    def sandbox(
        cls,
        sandbox: SandboxSettings | None = None,
        limits: LimitSettings | None = None,
        pool: PoolSettings | None = None,
        **changes: Any,
    ) -> Self:
        """Untrusted code: confined, without secrets, and a fresh session for every borrower."""
        child = ChildSettings(
            sandbox=sandbox or SandboxSettings(),
            limits=limits or LimitSettings(),
        )
        return cls(
            session=SessionConfig(child=child, env=scrubbed_environment()),
            pool=replace(pool or PoolSettings(), fresh=True),
            **changes,
        )
