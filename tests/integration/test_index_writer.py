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
