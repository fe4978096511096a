"""History and SyncHistory: the two faces of one core."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from redis import Redis as SyncRedis
from redis import RedisCluster as SyncRedisCluster
from redis.asyncio import Redis, RedisCluster

from capsule_tasks.errors import HistoryConflict, InvalidSetting
from capsule_tasks.settings import HistorySettings
from capsule_tasks.storage.async_connections import AsyncConnections, InjectedClient
from capsule_tasks.storage.codec import Codec, Item, JsonCodec
from capsule_tasks.storage.drivers import AsyncStore, SyncStore, awaited, blocking
from capsule_tasks.storage.history_core import HistoryCore
from capsule_tasks.storage.history_types import CompactionSnapshot
from capsule_tasks.storage.sync_connections import InjectedSyncClient, SyncConnections

S = TypeVar("S")


class _Face(Generic[S]):
    """What both faces have: the core, the way to Redis, and whether that way is its own."""

    core: HistoryCore
    store: S

    def __init__(
        self,
        session_id: str,
        store: S,
        owns_store: bool,
        settings: HistorySettings | None,
        session_settings: Any,
        codec: Codec | None,
    ) -> None:
        settings = settings or HistorySettings()
        self.core = HistoryCore(session_id, settings, session_settings, codec or JsonCodec())
        self.store = store
        self._owns_store = owns_store

    @property
    def session_id(self) -> str:
        return self.core.session_id

    @session_id.setter
    def session_id(self, value: str) -> None:
        core = self.core
        self.core = HistoryCore(value, core.settings, core.session_settings, core.codec)

    @property
    def session_settings(self) -> Any:
        """Any object with a `limit`, which `get_items` takes when it is given none."""
        return self.core.session_settings

    @session_settings.setter
    def session_settings(self, value: Any) -> None:
        self.core.session_settings = value

    def with_codec(self, codec: Codec) -> Self:
        """The same history, over the same connections, with other records; it never closes them."""
        other = type(self).__new__(type(self))
        core = self.core
        _Face.__init__(
            other, core.session_id, self.store, False, core.settings, core.session_settings, codec
        )
        return other

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.session_id!r:.100}>"


class History(_Face[AsyncStore]):
    """The ordered items of one session, in Redis, for callers that await.

    It satisfies the `Session` protocol of openai-agents. `redis` is a URL, connections to share
    (`AsyncConnections`), or a client of redis-py, which stays open and stays with its own event
    loop. One history may be used from several event loops, threads and processes.
    """

    def __init__(
        self,
        session_id: str,
        redis: str | AsyncStore | Redis | RedisCluster,
        *,
        settings: HistorySettings | None = None,
        session_settings: Any = None,
        codec: Codec | None = None,
    ) -> None:
        store = _async_store(redis)
        owns = isinstance(redis, str)
        super().__init__(session_id, store, owns, settings, session_settings, codec)

    get_items = awaited(HistoryCore.get_items)
    read = awaited(HistoryCore.read)
    add_items = awaited(HistoryCore.add_items)
    pop_item = awaited(HistoryCore.pop_item)
    pop_suffix = awaited(HistoryCore.pop_suffix)
    replace = awaited(HistoryCore.replace)
    clear_session = awaited(HistoryCore.clear_session)
    info = awaited(HistoryCore.info)

    async def _get_compaction_snapshot(
        self, limit: int, *, prune_prefix: object = None
    ) -> CompactionSnapshot | None:
        """What openai-agents' compaction looks for, so that it replaces in one step.

        Without it, or where this gives None, it clears the session and adds the summary.
        """
        snapshot = await self.read(limit)
        if snapshot.corrupt or prune_prefix is not None:
            return None

        async def replace_suffix(start: int, items: list[Item]) -> bool:
            version = snapshot.version
            try:
                await self.replace(version._replace(start=version.start + start), items)
            except HistoryConflict:
                return False
            return True

        return CompactionSnapshot(snapshot.items, snapshot.is_whole, replace_suffix)

    async def close(self) -> None:
        """Close the connections that this history made; safe twice. What was given stays open."""
        if self._owns_store:
            await self.store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class SyncHistory(_Face[SyncStore]):
    """The ordered items of one session, in Redis, for callers that block.

    `redis` is a URL, connections to share (`SyncConnections`), or a client of redis-py, which stays
    open. One history may be used from several threads and processes.
    """

    def __init__(
        self,
        session_id: str,
        redis: str | SyncStore | SyncRedis | SyncRedisCluster,
        *,
        settings: HistorySettings | None = None,
        session_settings: Any = None,
        codec: Codec | None = None,
    ) -> None:
        store = _sync_store(redis)
        owns = isinstance(redis, str)
        super().__init__(session_id, store, owns, settings, session_settings, codec)

    get_items = blocking(HistoryCore.get_items)
    read = blocking(HistoryCore.read)
    add_items = blocking(HistoryCore.add_items)
    pop_item = blocking(HistoryCore.pop_item)
    pop_suffix = blocking(HistoryCore.pop_suffix)
    replace = blocking(HistoryCore.replace)
    clear_session = blocking(HistoryCore.clear_session)
    info = blocking(HistoryCore.info)

    def close(self) -> None:
        """Close the connections that this history made; safe twice. What was given stays open."""
        if self._owns_store:
            self.store.close_blocking()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _async_store(redis: Any) -> AsyncStore:
    if isinstance(redis, str):
        return AsyncConnections(redis)
    if isinstance(redis, (Redis, RedisCluster)):
        return InjectedClient(redis)
    if hasattr(redis, "run"):
        store: AsyncStore = redis
        return store
    raise InvalidSetting("redis", redis, "a URL, AsyncConnections, or a client of redis.asyncio")


def _sync_store(redis: Any) -> SyncStore:
    if isinstance(redis, str):
        return SyncConnections(redis)
    if isinstance(redis, (SyncRedis, SyncRedisCluster)):
        return InjectedSyncClient(redis)
    if hasattr(redis, "run_blocking"):
        store: SyncStore = redis
        return store
    raise InvalidSetting("redis", redis, "a URL, SyncConnections, or a client of redis")
