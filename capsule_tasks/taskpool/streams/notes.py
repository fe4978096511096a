"""The indexes of executions: what happened lately, and what became of the members of groups."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from capsule_tasks.errors import CapsuleError, LeaseLost, StorageError
from capsule_tasks.storage.execution_types import RecentEntry
from capsule_tasks.storage.executions import ExecutionStore
from capsule_tasks.taskpool.endings import Ending
from capsule_tasks.taskpool.streams.background import AGAIN_S, Background
from capsule_tasks.taskpool.streams.tenure import Tenure

if TYPE_CHECKING:
    from capsule_tasks.taskpool.streams.publication import Publication

log = logging.getLogger("capsule_tasks.taskpool")

_GATHER_S = 0.05
"""How long notes gather."""
_MOST = 200
"""In one call."""


class Notes:
    """Written behind, many in a call; what is no longer held is given back after them."""

    def __init__(
        self, store: ExecutionStore, tenure: Tenure, background: Background, *, worker: str
    ) -> None:
        self._store = store
        self._tenure = tenure
        self._background = background
        self._worker = worker
        self._recent: dict[str, tuple[int, RecentEntry]] = {}
        self._groups: dict[str, list[tuple[int, str, str, str]]] = {}
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()

    def state(self, publication: Publication, state: str) -> None:
        """How an execution stands now."""
        attempt, name = publication.attempt.number, publication.job.call.name
        execution_id = publication.execution_id
        entry = RecentEntry(execution_id, 0.0, state, name, self._worker, attempt / 1000)
        self._recent[execution_id] = (attempt, entry)
        self._wake.set()

    def end(self, publication: Publication, ending: Ending) -> None:
        """Its last event is stored."""
        outcome = ending.outcome
        self.state(publication, outcome or "waiting")
        group, index = publication.job.group
        if group and index >= 0 and outcome:
            member = (index, outcome, publication.execution_id, ending.failure)
            self._groups.setdefault(group, []).append(member)

    def release(self, execution_id: str) -> None:
        """It is over here, and no longer held once what is noted of it is written."""
        self._tenure.release(execution_id)
        self._wake.set()

    async def keep(self) -> None:
        """Write whatever is noted, for ever."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(_GATHER_S)
            self._wake.clear()
            try:
                await self.write()
            except StorageError as error:
                self._background.say_unavailable(error)
                await asyncio.sleep(AGAIN_S)
                self._wake.set()

    async def write(self) -> None:
        """Groups first: what is no longer held nobody repairs."""
        async with self._writing:
            await self._write()

    async def _write(self) -> None:
        while self._groups:
            group, members = next(iter(self._groups.items()))
            part = members[:_MOST]
            await _noted(self._store.note_group(group, part))
            del members[: len(part)]
            if not members:
                del self._groups[group]
        while self._recent:
            notes = {one: self._recent[one] for one in list(self._recent)[:_MOST]}
            await _noted(self._store.note_recent(list(notes.values())))
            for execution_id, note in notes.items():
                if self._recent[execution_id] is note:  # else there is news since
                    del self._recent[execution_id]
        with contextlib.suppress(LeaseLost):  # what was held under that lease is the reaper's
            await self._tenure.give_back()


async def _noted(note: Awaitable[None]) -> None:
    """A note that is refused for what it is is dropped: all others are behind it."""
    try:
        await note
    except StorageError:
        raise
    except CapsuleError as error:
        log.warning("what became of some tasks is not noted: %s", error)
