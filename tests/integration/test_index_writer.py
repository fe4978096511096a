"""An entry of the indexes of executions is written once, by one writer or another."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any
from unittest.mock import AsyncMock

from capsule_tasks.executions.background import BackgroundTasks
from capsule_tasks.executions.publishing.publisher import IndexWriter
from capsule_tasks.protocol.events import Ended, Outcome
from capsule_tasks.settings import ExecutionSettings
from capsule_tasks.storage.connections.pipelined import PipelinedConnection
from capsule_tasks.storage.executions.store import ExecutionStore
from capsule_tasks.storage.executions.types import RecentEntry
from tests.streaming import new_execution

MEMBERS = 450


class Writer:
    """As much of a stream writer as an index takes."""

    def __init__(self, group: str, index: int) -> None:
        self.execution = new_execution(f"{group}-{index}", group=(group, index))
        self.execution_id = self.execution.call.task_id
        self.attempt = 1


async def test_two_may_write_at_once_as_when_the_worker_stops(valkey_url: str) -> None:
    connection = PipelinedConnection(valkey_url)
    settings = ExecutionSettings(prefix=f"p{uuid.uuid4().hex[:8]}")
    store = ExecutionStore(connection, settings=settings)
    indexes = IndexWriter(store, AsyncMock(), BackgroundTasks(), worker="w")
    group = uuid.uuid4().hex
    for index in range(MEMBERS):
        member: Any = Writer(group, index)
        indexes.record_end(member, Ended(outcome=Outcome.SUCCEEDED))
    await asyncio.gather(*(indexes.write() for _ in range(3)))
    assert (await store.read_group(group)).counts["succeeded"] == MEMBERS
    assert len(await store.list_recent(limit=MEMBERS + 1)) == MEMBERS
    await connection.close()


class BusyStore(AsyncMock):
    """A store that takes so long that more executions have ended by the time it answers."""

    indexes: IndexWriter
    batches: list[list[str]]

    async def record_recent(self, notes: list[tuple[int, RecentEntry]]) -> None:
        self.batches.append([entry.execution_id for _, entry in notes])
        self.end_one()

    def end_one(self) -> None:
        member: Any = Writer("g", len(self.batches))
        self.indexes.record_end(member, Ended(outcome=Outcome.SUCCEEDED))
        self.indexes.release(member.execution_id)


async def test_records_gather_while_others_are_written_and_are_released_after() -> None:
    """A worker that is busy would else make a call for each execution."""
    store, lease = BusyStore(batches=[]), AsyncMock()
    released: list[str] = []
    lease.release = released.append
    store.indexes = IndexWriter(store, lease, BackgroundTasks(), worker="w")
    store.end_one()
    await store.indexes.write()
    assert store.batches == [["g-0"]]
    assert released == ["g-0"]
    await store.indexes.write()
    assert store.batches == [["g-0"], ["g-1"]]
    assert released == ["g-0", "g-1"]
