"""The faces of the store of executions: for callers that await, and for those that block."""

from __future__ import annotations

from typing import Any

from capsule_tasks.settings import ExecutionSettings
from capsule_tasks.storage.drivers import AsyncStore, awaited, blocking
from capsule_tasks.storage.executions.core import ExecutionCore
from capsule_tasks.storage.executions.holds import HoldCore
from capsule_tasks.storage.facades import AsyncFacade, AsyncTarget, SyncFacade, SyncTarget


class ExecutionStore(AsyncFacade):
    """What executions say and are told, in Redis."""

    core: ExecutionCore

    def __init__(self, redis: AsyncTarget, *, settings: ExecutionSettings | None = None) -> None:
        self.core = ExecutionCore(settings)
        super().__init__(redis)

    claim = awaited(ExecutionCore.claim)
    append = awaited(ExecutionCore.append)
    make = awaited(ExecutionCore.make)
    reap = awaited(ExecutionCore.reap)
    told = awaited(ExecutionCore.told)
    tell = awaited(ExecutionCore.tell)
    read = awaited(ExecutionCore.read)
    look = awaited(ExecutionCore.look)
    record_recent = awaited(ExecutionCore.record_recent)
    list_recent = awaited(ExecutionCore.list_recent)
    find_recent = awaited(ExecutionCore.find_recent)
    record_group_ends = awaited(ExecutionCore.record_group_ends)
    read_group = awaited(ExecutionCore.read_group)


class HoldStore:
    """What workers hold; the connections are another's."""

    def __init__(self, store: AsyncStore, settings: ExecutionSettings) -> None:
        self.core = HoldCore(settings)
        self.store = store

    hold = awaited(HoldCore.hold)
    held_by = awaited(HoldCore.held_by)
    note_worker = awaited(HoldCore.note_worker)


class SyncExecutionStore(SyncFacade):
    """What executions say and are told, in Redis."""

    core: ExecutionCore

    def __init__(self, redis: SyncTarget, *, settings: ExecutionSettings | None = None) -> None:
        self.core = ExecutionCore(settings)
        super().__init__(redis)

    tell = blocking(ExecutionCore.tell)
    read = blocking(ExecutionCore.read)
    look = blocking(ExecutionCore.look)
    list_recent = blocking(ExecutionCore.list_recent)
    read_group = blocking(ExecutionCore.read_group)


__all__: list[Any] = ["ExecutionStore", "HoldStore", "SyncExecutionStore"]
