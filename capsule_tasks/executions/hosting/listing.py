"""The index of named sessions, kept in the order of their last use."""

from __future__ import annotations

import asyncio

from capsule_tasks.errors import StorageError
from capsule_tasks.executions.background import BackgroundTasks
from capsule_tasks.storage.sessions.index import SessionIndex
from capsule_tasks.storage.sessions.types import SessionEntry

_PAUSE_S = 1.0
"""From one write to the next, however many calls end."""


class Listing:
    """Records the sessions of a worker that are used, all of them in one write."""

    def __init__(self, index: SessionIndex, background: BackgroundTasks) -> None:
        self._index = index
        self._background = background
        self._used: dict[str, SessionEntry] = {}
        self._has_new = asyncio.Event()

    def used(self, entry: SessionEntry) -> None:
        """Record the session soon as the one that was used last."""
        self._used.pop(entry.session_id, None)
        self._used[entry.session_id] = entry
        self._has_new.set()

    def discard(self, session_id: str) -> None:
        """Leave the record of the session to its next owner."""
        self._used.pop(session_id, None)

    async def drop(self, session_id: str) -> None:
        """Take a session that is closed out of the index. Raises StorageError."""
        self.discard(session_id)
        await self._index.record(dropped=[session_id])

    async def run(self) -> None:
        """Write what is new; until cancelled."""
        while True:
            await self._has_new.wait()
            self._has_new.clear()
            used = dict(self._used)
            try:
                await self._index.record(list(used.values()))
            except StorageError as error:
                self._background.warn_unavailable(error)
                self._has_new.set()
            else:
                for session_id, entry in used.items():
                    if self._used.get(session_id) is entry:
                        del self._used[session_id]
            await asyncio.sleep(_PAUSE_S)
