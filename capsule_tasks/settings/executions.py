"""Settings of events and their retention, and of workers' leases."""

from typing import Annotated, ClassVar

from msgspec import Meta

from capsule_tasks.settings.declared import (
    KIB,
    MIB,
    ByteCount,
    Count,
    Kibibytes,
    PositiveCount,
    PositiveSeconds,
    Relations,
    Seconds,
    Settings,
    TimeToLive,
)
from capsule_tasks.settings.storage import RetrySettings


class LeaseSettings(Settings, frozen=True, kw_only=True):
    """How long a worker counts as alive after it last renewed its lease."""

    lease_s: Annotated[float, Meta(ge=0.05)] = 15.0
    lapsed_ttl_s: TimeToLive = 86400.0
    """How long Redis remembers that a lease has lapsed."""


class ExecutionSettings(Settings, frozen=True, kw_only=True):
    """How long, and how much of, the events of executions are retained."""

    unfinished_ttl_s: TimeToLive = 7 * 86400.0
    """From the last event of an execution that has not ended, until Redis forgets it."""
    live_bytes: ByteCount = 1 * MIB
    """The bytes of one running execution's events. The oldest events are trimmed."""
    retention_bytes: ByteCount = 64 * KIB
    """The bytes of an ended execution's events."""
    retention_s: TimeToLive = 3600.0
    """After the end of an execution with output, progress or questions."""
    silent_retention_s: Annotated[float, Meta(ge=0.1)] = 30.0
    """After the end of an execution without them. Later watchers are answered by the result
    backend."""
    control_ttl_s: TimeToLive = 86400.0
    """How long a command waits for an execution that no worker has claimed."""
    recent_max: PositiveCount = 10_000
    """Executions in the index of recent ones."""
    recent_ttl_s: TimeToLive = 7 * 86400.0
    group_ttl_s: TimeToLive = 86400.0
    """After the last end in a group."""
    group_failures: PositiveCount = 1000
    """Failures of one group that are described; all are counted."""
    hold_ttl_s: TimeToLive = 8 * 86400.0
    """How long Redis knows what a worker holds that does not renew its lease."""
    prefix: str = "capsule"
    """The beginning of every key."""
    retry: RetrySettings = RetrySettings()

    _relations: ClassVar[Relations] = (("live_bytes", ">=", "retention_bytes"),)


class PublishSettings(Settings, frozen=True, kw_only=True):
    """How a worker publishes the events of its executions."""

    window_bytes: Kibibytes = 1 * MIB
    """The buffered bytes of one execution. Beyond this it drops output, or waits."""
    total_bytes: ByteCount = 64 * MIB
    """The buffered bytes of all executions of a worker."""
    event_bytes_max: Kibibytes = 16 * KIB
    """The largest text of one event."""
    batch_max: PositiveCount = 64
    """Events of one execution in one call."""
    rate_bytes_per_second: Kibibytes = 20 * MIB
    """Output of a worker; more starves its other work (Celery's hub, other tasks)."""
    claim_wait_s: Seconds = 5.0
    """How long a task waits for a Redis that does not answer, before it starts all the same."""
    end_wait_s: Seconds = 5.0
    """How long Celery waits for a task's last event to be stored."""
    cancel_grace_s: Seconds = 2.0
    """From a cancel that names no grace to the kill."""
    replicas: Count = 0
    """So many replicas must have a claim, an event or an end before it counts as stored."""
    replica_wait_s: PositiveSeconds = 1.0
    """How long the replicas have; then it counts as stored all the same, with a warning."""

    _relations: ClassVar[Relations] = (("total_bytes", ">=", "window_bytes"),)
