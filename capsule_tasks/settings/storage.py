"""Connections to Redis, how calls are retried, and what is stored there: histories, durable runs,
named sessions, and the steps of tasks.
"""

from capsule_tasks.settings.declared import (
    MIB,
    ByteCount,
    Count,
    PositiveCount,
    PositiveSeconds,
    Seconds,
    Settings,
    TimeToLive,
)


class RetrySettings(Settings, frozen=True, kw_only=True):
    """How often a call to Redis is repeated after its reply was lost, or Redis refused it."""

    attempts: PositiveCount = 6
    """Calls in all; 1 never repeats."""
    first_delay_s: Seconds = 0.05
    """The longest pause before the first repeat; it doubles, and each pause is a random part."""
    max_delay_s: Seconds = 2.0


class ConnectionSettings(Settings, frozen=True, kw_only=True):
    """How connections to Redis are made and used."""

    connect_timeout_s: PositiveSeconds = 5.0
    reply_timeout_s: PositiveSeconds = 5.0
    """Silence after which a connection is closed; a call that was sent may still have been done."""
    max_connections: PositiveCount = 64
    """Connections of one event loop; further calls wait for their turn."""
    replicas: Count = 0
    """So many replicas must have what a call has written before it counts as stored."""
    replica_wait_s: PositiveSeconds = 1.0
    """How long the replicas have; then it counts as stored all the same, with a warning."""

    @property
    def timeout_s(self) -> float:
        """How long a call may take, replicas included."""
        return self.reply_timeout_s + (self.replica_wait_s if self.replicas else 0)


class HistorySettings(Settings, frozen=True, kw_only=True):
    """How long a history is kept, and how large it may grow."""

    ttl_s: PositiveSeconds = 90 * 86400.0
    """The TTL of a history, set again by every write."""
    renew_on_read: bool = False
    """Whether a read also sets the TTL again."""
    max_item_bytes: ByteCount = 8 * MIB
    max_items: PositiveCount = 100_000
    max_bytes: ByteCount = 256 * MIB
    """The bytes of all items of one history."""
    max_quarantined: PositiveCount = 1000
    """Corrupt records kept for inspection; the newest stay."""
    prefix: str = "capsule"
    """The beginning of every key."""
    retry: RetrySettings = RetrySettings()


class RunSettings(Settings, frozen=True, kw_only=True):
    """How long runs are kept, and how large what they store may be."""

    ttl_s: TimeToLive = 30 * 86400.0
    """From the last change of a run that has not ended: so long it may wait for a decision."""
    ended_ttl_s: TimeToLive = 7 * 86400.0
    """How long a run that its owner ended can be read; a run that was cancelled has `ttl_s`."""
    max_snapshot_bytes: ByteCount = 16 * MIB
    max_output_bytes: ByteCount = 8 * MIB
    """The bytes of one tool call; also of the result or the error of a run."""
    max_journal_bytes: ByteCount = 32 * MIB
    """The bytes of all replies of models in one turn."""
    prefix: str = "capsule"
    retry: RetrySettings = RetrySettings()


class NamedSessionSettings(Settings, frozen=True, kw_only=True):
    """How long what Redis has of named sessions is kept, and how large it may grow."""

    ttl_s: TimeToLive = 30 * 86400.0
    """From the last call of a session, or its last owner; no less than `known_ttl_s`."""
    known_ttl_s: TimeToLive = 86400.0
    """How long the id of a call is known after its end: so long, the call never runs again."""
    max_waiting: PositiveCount = 10_000
    """Calls that wait in the log of one session."""
    request_ttl_s: TimeToLive = 60.0
    """How long a request waits for the owner, and the reply for its reader."""
    index_max: PositiveCount = 10_000
    """Sessions in the list of all of them."""
    usage_window_s: TimeToLive = 86400.0
    """The windows of time in which the processor time of a tenant is counted."""
    hold_ttl_s: TimeToLive = 8 * 86400.0
    """How long Redis knows what a worker holds that does not renew its lease."""
    prefix: str = "capsule"
    retry: RetrySettings = RetrySettings()


class StepSettings(Settings, frozen=True, kw_only=True):
    """How steps of tasks are remembered."""

    ttl_s: TimeToLive = 7 * 86400.0
    """How long after its last step a task may be delivered again without repeating one."""
    max_output_bytes: ByteCount = 8 * MIB
    prefix: str = "capsule"
    retry: RetrySettings = RetrySettings()
