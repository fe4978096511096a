"""The indexes of executions are written once, whoever writes them."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any
from unittest.mock import AsyncMock

from capsule_tasks.protocol.events import Ended, Outcome
from capsule_tasks.settings import ExecutionSettings
from capsule_tasks.storage.executions import ExecutionStore
from capsule_tasks.storage.pipeline import PipelinedConnection
from capsule_tasks.taskpool.endings import Ending
from capsule_tasks.taskpool.streams.background import Background
from capsule_tasks.taskpool.streams.notes import Notes

MEMBERS = 450


class Member:
    """As much of a publication as a note takes."""

    def __init__(self, group: str, index: int) -> None:
        self.execution_id = f"{group}-{index}"
        self.attempt: Any = type("Attempt", (), {"number": 1})
        call = type("Call", (), {"name": "t"})
        self.job: Any = type("Job", (), {"call": call, "group": (group, index)})


async def test_two_may_write_at_once_as_when_the_worker_stops(valkey_url: str) -> None:
    connection = PipelinedConnection(valkey_url)
    settings = ExecutionSettings(prefix=f"p{uuid.uuid4().hex[:8]}")
    store = ExecutionStore(connection, settings=settings)
    notes = Notes(store, AsyncMock(), Background(), worker="w")
    group = uuid.uuid4().hex
    for index in range(MEMBERS):
        member: Any = Member(group, index)
        notes.end(member, Ending(Ended(outcome=Outcome.SUCCEEDED)))
    await asyncio.gather(*(notes.write() for _ in range(3)))
    assert (await store.read_group(group)).counts["succeeded"] == MEMBERS
    assert len(await store.list_recent(limit=MEMBERS + 1)) == MEMBERS
    await connection.close()
