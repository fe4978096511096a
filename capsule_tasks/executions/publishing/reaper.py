"""The reaper: writes the ends of what a worker held that is gone. Any worker may be it.

Each end is one script that compares owner and attempt, so two reapers at once do no harm; what a
reaper leaves half done the next one finds where it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container

from capsule_tasks.errors import InvalidId
from capsule_tasks.executions.ends import LastEvent, another_follows, failure_of, lost, outcome_of
from capsule_tasks.protocol.events import Outcome
from capsule_tasks.settings import ExecutionSettings
from capsule_tasks.storage.executions.store import ExecutionStore, HoldStore
from capsule_tasks.storage.executions.types import RecentEntry, Record

log = logging.getLogger("capsule_tasks.taskpool")

_WHY = "its worker died"
_LOST = lost(_WHY)
_BATCH_SIZE = 32


class _RunsHere(Exception):
    """The execution runs in this worker, and is about to be claimed under its present lease."""


class Reaper:
    """Sees to one dead worker at a time."""

    def __init__(
        self,
        store: ExecutionStore,
        holdings: HoldStore,
        ended_elsewhere: Callable[[str], LastEvent | None],
        fail_result: Callable[[str, str], object],
        retention_of: Callable[[str], ExecutionSettings],
        present: Container[str],
    ) -> None:
        """`retention_of` says how much is kept of the stream of a task with that name.

        Executions that are `present` are left alone while the lost owner has them: after an outage
        of Redis this worker claims anew what it runs, and must not end it meanwhile.
        """
        self._present = present
        self._retention_of = retention_of
        self._store = store
        self._holdings = holdings
        self._ended_elsewhere = ended_elsewhere
        self._fail_result = fail_result
        self._busy: set[str] = set()

    async def reap(self, worker: str) -> None:
        """See to all that a worker held; nothing happens while its lease lasts."""
        if worker in self._busy:
            return
        self._busy.add(worker)
        try:
            done: list[str] = []
            left: set[str] = set()
            while True:
                held = await self._holdings.held_by(worker, done)
                if held is None:
                    return
                if not held:
                    await self._holdings.note_worker("", 0, [worker])
                    return
                held = [one for one in held if one not in left]
                if not held:
                    return  # what is left is for the next round
                log.info("worker %s is gone; %d tasks of it are looked at", worker, len(held))
                for first in range(0, len(held), _BATCH_SIZE):
                    left |= await self._reap_batch(worker, held[first : first + _BATCH_SIZE])
                done = [one for one in held if one not in left]
        finally:
            self._busy.discard(worker)

    async def _reap_batch(self, worker: str, part: list[str]) -> set[str]:
        """Each whatever becomes of the others; those that are to be seen to again."""
        seen_to = (self._reap_one(worker, one) for one in part)
        notes: list[tuple[int, RecentEntry]] = []
        left: set[str] = set()
        for one, found in zip(
            part, await asyncio.gather(*seen_to, return_exceptions=True), strict=True
        ):
            if isinstance(found, _RunsHere):
                left.add(one)
            elif isinstance(found, BaseException):
                log.warning("task %r of worker %s cannot be ended: %r", one, worker, found)
                if not isinstance(found, InvalidId):  # that would never be otherwise
                    left.add(one)
            elif found is not None:
                notes.append(found)
        # Before it is forgotten who held them: nobody else would repair the index.
        await self._store.record_recent(notes)
        return left

    async def _reap_one(self, worker: str, execution_id: str) -> tuple[int, RecentEntry] | None:
        """Have it ended if nobody has, and all told of that; its note for the index.

        What another reaper has ended is told once more: it may have died before it could.
        """
        record, failure = await self._store.look(execution_id), ""
        if record.state == "running" and record.owner == worker:
            if execution_id in self._present:
                raise _RunsHere
            failure = await self._end(worker, execution_id, record)
            record = await self._store.look(execution_id)
        if record.state not in ("ended", "waiting"):
            return None
        if record.outcome == Outcome.LOST:
            failure = failure or failure_of(_LOST)
            if await asyncio.to_thread(self._ended_elsewhere, execution_id) is None:
                await asyncio.to_thread(self._fail_result, execution_id, _WHY)
        if record.group and record.index >= 0 and record.outcome:
            member = (record.index, record.outcome, execution_id, failure)
            await self._store.record_group_ends(record.group, [member])
        state = record.outcome or "waiting"
        return record.attempt, RecentEntry(
            execution_id, 0.0, state, record.task, record.worker, record.begun_at
        )

    async def _end(self, worker: str, execution_id: str, record: Record) -> str:
        """Write the end of the attempt, if nobody else has; what went wrong."""
        stored = await asyncio.to_thread(self._ended_elsewhere, execution_id)
        event = stored or _last_event_of(record)
        attempt, outcome = record.attempt, outcome_of(event)
        kept = self._retention_of(record.task)
        await self._store.reap(execution_id, worker, attempt, event, outcome, kept=kept)
        return failure_of(event)


def _last_event_of(record: Record) -> LastEvent:
    """A message that was acknowledged does not come again; one that was not does."""
    if record.ack == "early":
        return _LOST
    return another_follows("lost", _WHY)
