"""The session that is given to the SDK: its writes travel with the commit of the turn."""

from __future__ import annotations

from typing import Any

from capsule_tasks.storage import History


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

    async def get_items(self, limit: int | None = None) -> list[Any]:
        if limit is None:
            return [*await self._history.get_items(), *self.added]
        if limit <= len(self.added):
            return self.added[len(self.added) - limit :] if limit > 0 else []
        return [*await self._history.get_items(limit - len(self.added)), *self.added]

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
