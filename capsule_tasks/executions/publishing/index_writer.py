"""The indexes of executions: recent executions, and how many members of a group have ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from capsule_tasks.errors import CapsuleError, LeaseLost, StorageError
from capsule_tasks.executions.background import BackgroundTasks
from capsule_tasks.executions.ends import LastEvent, failure_of, outcome_of
from capsule_tasks.executions.publishing.worker_lease import WorkerLease
from capsule_tasks.storage.executions.store import ExecutionStore
from capsule_tasks.storage.executions.types import RecentEntry

if TYPE_CHECKING:
    from capsule_tasks.executions.publishing.stream_writer import StreamWriter

log = logging.getLogger("capsule_tasks.taskpool")

_GATHER_S = 0.05
"""How long records gather before they are written."""
_BATCH_SIZE = 200
"""In one call."""


@dataclass(eq=False)
class IndexWriter:
    """Writes later, many records in a call; then it releases executions that are over."""

    store: ExecutionStore
    lease: WorkerLease
    background: BackgroundTasks
    worker: str
    _recent: dict[str, tuple[int, RecentEntry]] = field(default_factory=dict)
    _groups: dict[str, list[tuple[int, str, str, str]]] = field(default_factory=dict)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def record_state(self, writer: StreamWriter, state: str) -> None:
        """The execution is `running`, `waiting`, or has this outcome."""
        attempt, name = writer.attempt, writer.execution.call.name
        execution_id = writer.execution_id
        entry = RecentEntry(execution_id, 0.0, state, name, self.worker, attempt / 1000)
        self._recent[execution_id] = (attempt, entry)
        self._wake.set()

    def record_end(self, writer: StreamWriter, event: LastEvent) -> None:
        """The last event is stored; a group counts its member if no other attempt follows."""
        outcome = outcome_of(event)
        self.record_state(writer, outcome or "waiting")
        origin = writer.execution.life.origin
        if origin.group and origin.index >= 0 and outcome:
            member = (origin.index, outcome, writer.execution_id, failure_of(event))
            self._groups.setdefault(origin.group, []).append(member)

    def release(self, execution_id: str) -> None:
        """The execution is over here: release its hold once its records are written."""
        self.lease.release(execution_id)
        self._wake.set()

    async def run(self) -> None:
        """Write what is recorded; until cancelled."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(_GATHER_S)
            self._wake.clear()
            await self.background.call_until_answered(self.write)

    async def write(self) -> None:
        """Groups first: no reaper repairs what is no longer held."""
        async with self._writing:
            await self._write()

    async def _write(self) -> None:
        while self._groups:
            group, members = next(iter(self._groups.items()))
            part = members[:_BATCH_SIZE]
            await _recorded(self.store.record_group_ends(group, part))
            del members[: len(part)]
            if not members:
                del self._groups[group]
        while self._recent:
            batch = dict(itertools.islice(self._recent.items(), _BATCH_SIZE))
            await _recorded(self.store.record_recent(list(batch.values())))
            for execution_id, entry in batch.items():
                if self._recent[execution_id] is entry:  # else it has changed since
                    del self._recent[execution_id]
        with contextlib.suppress(LeaseLost):  # a reaper releases what was held under that lease
            await self.lease.flush_released()


async def _recorded(writing: Awaitable[None]) -> None:
    """Drop a record that Redis refuses for good: all others wait behind it."""
    try:
        await writing
    except StorageError:
        raise
    except CapsuleError as error:
        log.warning("index of recent executions or group counts not updated: %s", error)
