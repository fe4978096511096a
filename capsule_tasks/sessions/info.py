"""Snapshots of sessions and pools, and the counters behind them."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

from capsule_tasks.protocol.messages import Heartbeat
from capsule_tasks.sessions.states import SessionState

_LATENCIES = 1000


@dataclasses.dataclass
class InputStats:
    """Questions of executions: how many are open, and how the others ended."""

    pending: int = 0
    high_water: int = 0
    answered: int = 0
    timeouts: int = 0
    cancels: int = 0


@dataclasses.dataclass(frozen=True)
class QueueStats:
    """Messages that wait in the parent, and how often control overtook bulk."""

    executions: int = 0
    buffered_messages: int = 0
    buffered_bytes: int = 0
    session_messages: int = 0
    session_messages_dropped: int = 0
    control_handled: int = 0
    bulk_handled: int = 0
    priority_reads: int = 0


@dataclasses.dataclass(frozen=True)
class Health:
    """Whether heartbeats are missing, and the state and stack of the child when they were."""

    unresponsive: bool = False
    process_state: str = ""
    cpu_s: float = 0.0
    stack: str = ""


@dataclasses.dataclass(frozen=True)
class SessionInfo:
    """A session at one moment. Times are on the monotonic clock."""

    session_id: str
    state: SessionState
    pid: int | None
    created_at: float
    ready_at: float | None
    last_used_at: float | None
    execution_count: int
    error_count: int
    restarts: int
    running: tuple[str, ...]
    condemned_by: str | None
    last_heartbeat: Heartbeat | None
    last_heartbeat_at: float | None
    health: Health
    inputs: InputStats
    queues: QueueStats
    metadata: dict[str, Any]
    """The negotiated protocol: version, capabilities, effective settings, Python."""
    isolation: tuple[str, ...]
    """The confinement that was applied to the child; empty without a sandbox."""
    last_error: str


@dataclasses.dataclass
class Counters:
    """Counters of a session; a restart starts them at zero."""

    execution_count: int = 0
    error_count: int = 0
    cancel_event_triggers: int = 0
    executions_cancelled: int = 0
    interceptor_errors_total: int = 0
    interceptor_quarantine_total: int = 0
    interceptor_skipped_total: int = 0
    """Calls of quarantined interceptors that were skipped because their queue was full."""
    late_output_bytes: int = 0
    inputs: InputStats = dataclasses.field(default_factory=InputStats)
    cancel_latencies_ms: deque[float] = dataclasses.field(
        default_factory=lambda: deque(maxlen=_LATENCIES)
    )

    def metrics(self) -> dict[str, Any]:
        """The counters by name, with quantiles of the latest cancel latencies."""
        latencies = sorted(self.cancel_latencies_ms)
        return {
            **{name: value for name, value in vars(self).items() if isinstance(value, int)},
            "cancel_latency_ms": {
                "count": len(latencies),
                "p50": _quantile(latencies, 0.5),
                "p99": _quantile(latencies, 0.99),
                "max": latencies[-1] if latencies else None,
            },
        }


def _quantile(ordered: list[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else None


@dataclasses.dataclass(frozen=True)
class PoolInfo:
    """The pool of one profile at one moment, with totals since its start."""

    profile: str
    starting: int
    idle: int
    borrowed: int
    working: int
    """Sessions that have work, in a pool that assigns work to sessions."""
    retiring: int
    waiting: int
    breaker_open: bool
    template_pid: int | None
    starts_total: int
    start_failures_total: int
    forks_total: int
    cold_starts_total: int
    templates_lost_total: int
    acquires_total: int
    lost_total: int
    """Sessions that were ready and whose child exited by itself."""
    early_exits: int
    """Sessions in a row that were lost before their first use."""
    retired: dict[str, int]
    """Sessions retired so far, by reason; from the hundredth reason on as "other reasons"."""
    last_error: str
    sessions: tuple[SessionInfo, ...]
