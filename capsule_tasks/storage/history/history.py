"""History and SyncHistory: the two facades of one core."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

from capsule_tasks.errors import HistoryConflict
from capsule_tasks.settings import HistorySettings
from capsule_tasks.storage import facades
from capsule_tasks.storage.codec import Codec, Item, JsonCodec
from capsule_tasks.storage.drivers import drive
from capsule_tasks.storage.history.core import HistoryCore
from capsule_tasks.storage.history.types import CompactionSnapshot, SessionLimit, limit_of


class _History(facades.Facade[facades.Target]):
    """The session, settings and codec of both facades."""

    core: HistoryCore
    _owns_store: bool

    def __init__(
        self,
        session_id: str,
        redis: facades.Target,
        *,
        settings: HistorySettings | None = None,
        session_settings: Any = None,
        codec: Codec | None = None,
    ) -> None:
        super().__init__(redis)
        settings = settings or HistorySettings()
        self.core = HistoryCore(session_id, settings, session_settings, codec or JsonCodec())

    get_items = facades.Method(HistoryCore.get_items)
    read = facades.Method(HistoryCore.read)
    add_items = facades.Method(HistoryCore.add_items)
    pop_item = facades.Method(HistoryCore.pop_item)
    pop_suffix = facades.Method(HistoryCore.pop_suffix)
    replace = facades.Method(HistoryCore.replace)
    clear_session = facades.Method(HistoryCore.clear_session)
    info = facades.Method(HistoryCore.info)

    @property
    def session_id(self) -> str:
        return self.core.session_id

    @session_id.setter
    def session_id(self, value: str) -> None:
        core = self.core
        self.core = HistoryCore(value, core.settings, core.session_settings, core.codec)

    @property
    def session_settings(self) -> Any:
        """A mapping or an object with a `limit`, which `get_items` takes when it is given none.

        Settings that openai-agents could not read are given in a shape that it can.
        """
        given = self.core.session_settings
        if given is None or (hasattr(given, "limit") and hasattr(given, "resolve")):
            return given
        return SessionLimit(given)

    @session_settings.setter
    def session_settings(self, value: Any) -> None:
        limit_of(value)  # refuses what has none
        self.core.session_settings = value

    def with_codec(self, codec: Codec) -> Self:
        """The same history, over the same connections, with other records; it never closes them."""
        other = copy.copy(self)
        core = self.core
        other.core = HistoryCore(core.session_id, core.settings, core.session_settings, codec)
        other._owns_store = False  # noqa: SLF001  one of its own kind
        return other

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.session_id!r:.100}>"


class History(_History[facades.AsyncTarget], facades.AsyncFacade):
    """The ordered items of one session, in Redis, for callers that await.

    It satisfies the `Session` protocol of openai-agents. `redis` is a URL, connections to share
    (`AsyncConnections`), or a client of redis-py, which stays open and stays with its own event
    loop. One history may be used from several event loops, threads and processes.
    """

    # --- what the compaction of openai-agents looks for ------------------------------------------
    # Both replace in one step, and are offered by this class alone: a subclass may transform its
    # items in `get_items` and `add_items`, which they would bypass. The compaction of a subclass
    # clears it and adds the summary.

    async def _get_compaction_snapshot(
        self, limit: int, *, prune_prefix: Callable[[Any], bool] | None = None
    ) -> CompactionSnapshot | None:
        """The latest `limit` items, with a way to replace the end of them by a summary.

        `prune_prefix` says of an item that it has expired: the oldest of which it says so are
        removed in the step that replaces.
        """
        if type(self) is not History:
            return None
        snapshot = await self.read(limit)
        version = snapshot.version
        corrupt = set(version.corrupt)
        places = [at for at in range(version.start, version.stop) if at not in corrupt]

        async def replace_suffix(start: int, items: list[Item]) -> bool:
            if start >= len(places):
                return False
            at = places[start]
            end = version._replace(start=at, corrupt=tuple(c for c in version.corrupt if c > at))
            try:
                if prune_prefix is not None:
                    pruned = await drive(self.core.prunable(end, prune_prefix), self.store)
                    end = end._replace(pruned=pruned)
                await self.replace(end, items)
            except HistoryConflict:
                return False
            return True

        return CompactionSnapshot(snapshot.items, snapshot.is_whole, replace_suffix)

    async def _atomic_replace_items(self, items: list[Item]) -> bool:
        """Put these items in the place of all that is there; what is appended meanwhile stays."""
        if type(self) is not History:
            return False
        await self.replace((await self.read()).version, items)
        return True


class SyncHistory(_History[facades.SyncTarget], facades.SyncFacade):
    """The ordered items of one session, in Redis, for callers that block.

    `redis` is a URL, connections to share (`SyncConnections`), or a client of redis-py, which stays
    open. One history may be used from several threads and processes.
    """
