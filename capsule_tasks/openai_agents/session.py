"""The session that is given to the SDK: its writes travel with the commit of the turn."""

from __future__ import annotations

from typing import Any

from capsule_tasks.storage import History, Version
from capsule_tasks.storage.history.types import limit_of


class BufferedSession:
    """A history with what this turn adds to it, which is not stored before the turn is committed.

    Without it, a crash between the SDK's write and our commit would store a turn's items twice.
    """

    session_settings: Any = None

    def __init__(self, history: History) -> None:
        self.session_id = history.session_id
        self.session_settings = history.session_settings
        self.added: list[Any] = []
        self._history = history
        self._first: Version | None = None

    async def get_items(self, limit: int | None = None) -> list[Any]:
        limit = limit_of(self.session_settings) if limit is None else limit
        if limit is None:
            return [*await self._stored(None), *self.added]
        if limit <= len(self.added):
            return self.added[len(self.added) - limit :] if limit > 0 else []
        return [*await self._stored(limit - len(self.added)), *self.added]

    async def _stored(self, limit: int | None) -> list[Any]:
        """The latest items of the history as it was when this turn first read it.

        The SDK compares what it reads before a write with what it reads afterwards, and refuses a
        session into which somebody else has written. Items that are appended meanwhile are seen by
        the next turn.
        """
        snapshot = await self._history.read(limit)
        if self._first is None or self._first.generation != snapshot.version.generation:
            self._first = snapshot.version
        newer = snapshot.version.stop - self._first.stop
        if not newer:
            return snapshot.items
        if limit is not None:
            snapshot = await self._history.read(limit + newer)
            newer = snapshot.version.stop - self._first.stop
        unreadable = sum(place >= self._first.stop for place in snapshot.version.corrupt)
        items = snapshot.items[: max(0, len(snapshot.items) - newer + unreadable)]
        return items if limit is None else items[max(0, len(items) - limit) :]

    async def add_items(self, items: list[Any]) -> None:
        self.added.extend(items)

    async def pop_item(self) -> Any:
        """Take back an item of this turn; items of earlier turns are committed and stay."""
        return self.added.pop() if self.added else None

    async def clear_session(self) -> None:
        """Refuse: the history belongs to the run's session, which others may read."""
        raise NotImplementedError(
            "a durable run cannot clear the history of its session; use History.clear_session "
            "when no run is active"
        )
