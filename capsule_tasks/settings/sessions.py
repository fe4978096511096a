"""How a parent starts and treats its children: one session, and how many a pool keeps."""

import sys
from typing import Annotated, Any, ClassVar, Literal, Self

from msgspec import Meta
from msgspec.structs import force_setattr, replace

from capsule_tasks.settings.child import ChildSettings, LimitSettings, SandboxSettings
from capsule_tasks.settings.declared import (
    KIB,
    MIB,
    BriefSeconds,
    ByteCount,
    Count,
    PositiveCount,
    PositiveSeconds,
    Relations,
    Seconds,
    Settings,
)
from capsule_tasks.settings.environment import scrubbed_environment


class TimeoutSettings(Settings, frozen=True, kw_only=True):
    """Deadlines that the parent keeps; all of them are measured on the monotonic clock."""

    ready_s: PositiveSeconds = 10.0
    """From spawn to `Ready`."""
    warmup_s: PositiveSeconds = 60.0
    """For the warmup code."""
    shutdown_s: PositiveSeconds = 5.0
    """From `Shutdown` to the child's exit; after it the child is killed."""
    grace_s: Seconds = 0.5
    """From a cancel to the kill, unless the caller names another grace."""
    drain_s: Seconds = 5.0
    """For the neighbours of a coroutine that does not stop, before their child is killed."""
    stack_s: Seconds = 0.2
    """For the stacks of a child that is about to be cancelled or killed."""
    idle_s: PositiveSeconds = 1.0
    """READY for so long is IDLE."""
    unresponsive_s: PositiveSeconds = 10.0
    """Silence of the heartbeat after which the session is reported unresponsive; several times
    `heartbeat_interval_s`."""


class RoutingSettings(Settings, frozen=True, kw_only=True):
    """How the parent shares its attention between control messages and bulk."""

    control_weight: PositiveCount = 64
    bulk_weight: PositiveCount = 16
    """Messages of each kind that are handled in a row while both are waiting."""
    read_bytes: Annotated[int, Meta(ge=4 * KIB)] = 256 * KIB
    """The most read from one pipe in one iteration of the event loop."""
    session_queue: PositiveCount = 1000
    """Messages of no execution kept for `receive_message`; beyond it the oldest is dropped."""
    session_queue_bytes: ByteCount = 64 * MIB
    """The most bytes in those; beyond it the oldest is dropped, but never the newest."""
    interceptor_budget_s: BriefSeconds = 0.010
    interceptor_overruns: PositiveCount = 3
    """After so many calls over budget an interceptor is quarantined."""
    log_output: bool = True
    """Whether output of no execution also goes to the log `capsule_tasks.sessions`."""
    quarantine_queue: PositiveCount = 1000
    """Messages kept for a quarantined interceptor; beyond it the oldest is dropped and counted."""
    run_bytes: ByteCount = 64 * MIB
    """Output that `run` keeps of one execution; beyond it the oldest is dropped and counted in
    `gaps`."""


class SessionConfig(Settings, frozen=True, kw_only=True):
    """One session: what its child is sent, and how the parent treats it."""

    child: ChildSettings = ChildSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    routing: RoutingSettings = RoutingSettings()
    python: str = sys.executable
    """The interpreter of the child; it must be able to import capsule_tasks and msgspec."""
    cwd: str | None = None
    env: dict[str, str] | None = None
    """The child's environment; None hands on the parent's, or nothing of it to a sandbox."""
    warmup: str | None = None
    """Code run once after the handshake; its output goes to the log."""
    enable_metrics: bool = True
    replace_killed: bool = True
    """Whether a session whose child was killed by a cancel or a limit starts a new one itself."""
    protocol_versions: Annotated[tuple[int, ...], Meta(min_length=1)] = (1,)
    """Versions offered to the child, best first."""

    # A healthy child is silent between two heartbeats: a pool would replace it for that.
    _relations: ClassVar[Relations] = (
        ("timeouts.unresponsive_s", ">", "child.diagnostics.heartbeat_interval_s"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.child.sandbox is not None and self.env is None:
            force_setattr(self, "env", scrubbed_environment())


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
