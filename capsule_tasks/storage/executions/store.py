"""The facades of the store of executions and of what workers hold, for callers that await."""

from __future__ import annotations

from capsule_tasks.settings import ExecutionSettings
from capsule_tasks.storage.drivers import AsyncStore
from capsule_tasks.storage.executions.core import ExecutionCore
from capsule_tasks.storage.executions.holds import HoldCore
from capsule_tasks.storage.facades import AsyncFacade, AsyncTarget, Method


class ExecutionStore(AsyncFacade):
    """Events, commands and indexes of executions in Redis."""

    core: ExecutionCore

    def __init__(self, redis: AsyncTarget, *, settings: ExecutionSettings | None = None) -> None:
        self.core = ExecutionCore(settings)
        super().__init__(redis)

    call = Method(ExecutionCore.call)
    reap = Method(ExecutionCore.reap)
    read_commands = Method(ExecutionCore.read_commands)
    send_command = Method(ExecutionCore.send_command)
    read = Method(ExecutionCore.read)
    read_record = Method(ExecutionCore.read_record)
    record_recent = Method(ExecutionCore.record_recent)
    list_recent = Method(ExecutionCore.list_recent)
    find_recent = Method(ExecutionCore.find_recent)
    record_group_ends = Method(ExecutionCore.record_group_ends)
    read_group = Method(ExecutionCore.read_group)


class HoldStore(AsyncFacade):
    """Executions that workers hold, over connections that belong to the caller."""

    def __init__(self, store: AsyncStore, settings: ExecutionSettings) -> None:
        self.core = HoldCore(settings)
        super().__init__(store)

    hold = Method(HoldCore.hold)
    held_by = Method(HoldCore.held_by)
    register_worker = Method(HoldCore.register_worker)
