"""The reaper writes the ends of executions whose worker died, and releases its named sessions.

Any worker may be the reaper.

Each end is one script that compares owner and attempt, so two reapers of one worker do no
harm. The next reaper goes on where one that died has stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass, field

from capsule_tasks.errors import InvalidId
from capsule_tasks.executions.ends import LastEvent, another_follows, failure_of, lost, outcome_of
from capsule_tasks.protocol.events import Outcome
from capsule_tasks.settings import ExecutionSettings
from capsule_tasks.storage.executions.holds import HoldStore
from capsule_tasks.storage.executions.store import ExecutionStore
from capsule_tasks.storage.executions.types import RecentEntry, Record
from capsule_tasks.storage.sessions.store import NamedSessionStore

log = logging.getLogger("capsule_tasks.taskpool")

_WHY = "its worker died while it ran, so it may have run in part"
_LOST = lost(_WHY)
_BATCH_SIZE = 32


class _RunsHere(Exception):
    """The execution runs in this worker, and is about to be claimed under its present lease."""


@dataclass(eq=False)
class Reaper:
    """Reaps one dead worker at a time."""

    store: ExecutionStore
    hold_store: HoldStore
    sessions: NamedSessionStore
    ended_elsewhere: Callable[[str], LastEvent | None]
    """The end that the result backend knows of an execution."""
    fail_result: Callable[[str, str], object]
    """Stores a failure in the result backend."""
    retention_of: Callable[[str], ExecutionSettings]
    """How long the streams of a task are retained, by its name."""
    present: Container[str]
    """Executions in this worker. They are left alone while the dead owner has them: after an outage
    of Redis this worker reclaims what it runs, and must not end it meanwhile."""
    after_lost_attempt: Callable[[str, str], Awaitable[object]] | None = None
    """Given the task and the id of an execution that goes on with another attempt; may be called
    again for the same one."""
    _busy: set[str] = field(default_factory=set)

    async def reap(self, worker: str) -> None:
        """End all that a worker held; nothing happens while its lease lasts."""
        if worker in self._busy:
            return
        self._busy.add(worker)
        try:
            left_sessions = await self._release_sessions(worker)
            if left_sessions is None:
                return
            done: list[str] = []
            left: set[str] = set()
            while True:
                held = await self.hold_store.held_by(worker, done)
                if held is None:
                    return
                if not held:
                    if not left_sessions:
                        await self.hold_store.register_worker("", 0, [worker])
                    return
                held = [execution_id for execution_id in held if execution_id not in left]
                if not held:
                    return  # the rest is reaped in the next round
                log.info("worker %s died: reaping %d executions", worker, len(held))
                for first in range(0, len(held), _BATCH_SIZE):
                    left |= await self._reap_batch(worker, held[first : first + _BATCH_SIZE])
                done = [execution_id for execution_id in held if execution_id not in left]
        finally:
            self._busy.discard(worker)

    async def _release_sessions(self, worker: str) -> set[str] | None:
        """Have other workers take the sessions, even if some fail; return those that did.

        None while the worker's lease lasts.
        """
        done: list[str] = []
        left: set[str] = set()
        while True:
            held = await self.sessions.held_sessions(worker, done)
            if held is None:
                return None
            held = [name for name in held if name not in left]
            if not held:
                return left
            log.info("worker %s died: releasing %d sessions", worker, len(held))
            for first in range(0, len(held), _BATCH_SIZE):
                part = held[first : first + _BATCH_SIZE]
                released = (self.sessions.reap(name, worker) for name in part)
                for name, fault in zip(
                    part, await asyncio.gather(*released, return_exceptions=True), strict=True
                ):
                    if isinstance(fault, BaseException):
                        log.warning(
                            "session %r of dead worker %s could not be released: %r",
                            name,
                            worker,
                            fault,
                        )
                        left.add(name)
            done = [name for name in held if name not in left]

    async def _reap_batch(self, worker: str, part: list[str]) -> set[str]:
        """Reap each execution, even if others fail; return those that have to be reaped again."""
        reaped = (self._reap_one(worker, execution_id) for execution_id in part)
        entries: list[tuple[int, RecentEntry]] = []
        left: set[str] = set()
        for execution_id, found in zip(
            part, await asyncio.gather(*reaped, return_exceptions=True), strict=True
        ):
            if isinstance(found, _RunsHere):
                left.add(execution_id)
            elif isinstance(found, BaseException):
                log.warning(
                    "execution %r of dead worker %s could not be reaped: %r",
                    execution_id,
                    worker,
                    found,
                )
                if not isinstance(found, InvalidId):  # that would fail each time
                    left.add(execution_id)
            elif found is not None:
                entries.append(found)
        # Before the holds are released: afterwards no reaper would repair the index.
        await self.store.record_recent(entries)
        return left

    async def _reap_one(self, worker: str, execution_id: str) -> tuple[int, RecentEntry] | None:
        """End the execution if it has not ended, and return its record for the index.

        The result and the group are written again even if another reaper has ended the execution:
        that reaper may have died before it wrote them.
        """
        record, failure = await self.store.read_record(execution_id), ""
        if record.state == "running" and record.owner == worker:
            if execution_id in self.present:
                raise _RunsHere
            failure = await self._end(worker, execution_id, record)
            record = await self.store.read_record(execution_id)
        if record.state not in ("ended", "waiting"):
            return None
        if record.state == "waiting" and self.after_lost_attempt is not None:
            await self.after_lost_attempt(record.task, execution_id)
        if record.outcome == Outcome.LOST:
            failure = failure or failure_of(_LOST)
            if await asyncio.to_thread(self.ended_elsewhere, execution_id) is None:
                await asyncio.to_thread(self.fail_result, execution_id, _WHY)
        if record.group and record.index >= 0 and record.outcome:
            member = (record.index, record.outcome, execution_id, failure)
            await self.store.record_group_ends(record.group, [member])
        state = record.outcome or "waiting"
        return record.attempt, RecentEntry(
            execution_id, 0.0, state, record.task, record.worker, record.claimed_at
        )

    async def _end(self, worker: str, execution_id: str, record: Record) -> str:
        """Write the end of the attempt, unless it has one; return what went wrong."""
        stored = await asyncio.to_thread(self.ended_elsewhere, execution_id)
        event = stored or _last_event_of(record)
        attempt, outcome = record.attempt, outcome_of(event)
        retention = self.retention_of(record.task)
        await self.store.reap(execution_id, worker, attempt, event, outcome, retention=retention)
        return failure_of(event)


def _last_event_of(record: Record) -> LastEvent:
    """A message that was acknowledged is not redelivered; one that was not is."""
    if record.ack == "early":
        return _LOST
    return another_follows("lost", _WHY)
