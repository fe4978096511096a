"""The facades of the store of executions and of what workers hold, for callers that await."""

from __future__ import annotations

from capsule_tasks.settings import ExecutionSettings
from capsule_tasks.storage.drivers import AsyncStore, async_method
from capsule_tasks.storage.executions.core import ExecutionCore
from capsule_tasks.storage.executions.holds import HoldCore
from capsule_tasks.storage.facades import AsyncFacade, AsyncTarget


class ExecutionStore(AsyncFacade):
    """Events, commands and indexes of executions in Redis."""

    core: ExecutionCore

    def __init__(self, redis: AsyncTarget, *, settings: ExecutionSettings | None = None) -> None:
        self.core = ExecutionCore(settings)
        super().__init__(redis)

    call = async_method(ExecutionCore.call)
    reap = async_method(ExecutionCore.reap)
    read_commands = async_method(ExecutionCore.read_commands)
    send_command = async_method(ExecutionCore.send_command)
    read = async_method(ExecutionCore.read)
    read_record = async_method(ExecutionCore.read_record)
    record_recent = async_method(ExecutionCore.record_recent)
    list_recent = async_method(ExecutionCore.list_recent)
    find_recent = async_method(ExecutionCore.find_recent)
    record_group_ends = async_method(ExecutionCore.record_group_ends)
    read_group = async_method(ExecutionCore.read_group)


class HoldStore:
    """Executions that workers hold, over connections that belong to the caller."""

    def __init__(self, store: AsyncStore, settings: ExecutionSettings) -> None:
        self.core = HoldCore(settings)
        self.store = store

    hold = async_method(HoldCore.hold)
    held_by = async_method(HoldCore.held_by)
    register_worker = async_method(HoldCore.register_worker)
