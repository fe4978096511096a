"""Durable runs, and the steps of tasks."""

from capsule_tasks.settings.declared import MIB, ByteCount, Settings, TimeToLive
from capsule_tasks.settings.storage import RetrySettings


class RunSettings(Settings, frozen=True, kw_only=True):
    """How long runs are kept, and how large what they store may be."""

    ttl_s: TimeToLive = 30 * 86400.0
    """From the last change of a run that has not ended: so long it may wait for a decision."""
    ended_ttl_s: TimeToLive = 7 * 86400.0
    """How long a run that its owner ended can be read; a run that was cancelled has `ttl_s`."""
    max_snapshot_bytes: ByteCount = 16 * MIB
    max_output_bytes: ByteCount = 8 * MIB
    """The bytes of one tool call."""
    prefix: str = "capsule"
    retry: RetrySettings = RetrySettings()


class StepSettings(Settings, frozen=True, kw_only=True):
    """How steps of tasks are remembered."""

    ttl_s: TimeToLive = 7 * 86400.0
    """How long after its last step a task may be delivered again without repeating one."""
    max_output_bytes: ByteCount = 8 * MIB
    prefix: str = "capsule"
    retry: RetrySettings = RetrySettings()
