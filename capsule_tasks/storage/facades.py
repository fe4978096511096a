"""The connections of a store's facades, and who closes them.

Every store has two facades: one for callers that await, one for callers that block. Their `redis`
is a URL, connections to share, or a client of redis-py, which stays open and, if it is
asynchronous, with its own event loop.
"""

from __future__ import annotations

from typing import Any, Self

from redis import Redis as SyncRedis
from redis import RedisCluster as SyncRedisCluster
from redis.asyncio import Redis, RedisCluster

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.storage.connections.asynchronous import AsyncConnections, InjectedClient
from capsule_tasks.storage.connections.blocking import InjectedSyncClient, SyncConnections
from capsule_tasks.storage.drivers import AsyncStore, SyncStore

AsyncTarget = str | AsyncStore | Redis | RedisCluster
SyncTarget = str | SyncStore | SyncRedis | SyncRedisCluster


class AsyncFacade:
    """For callers that await."""

    store: AsyncStore

    def __init__(self, redis: AsyncTarget) -> None:
        self._owns_store = isinstance(redis, str)
        self.store = _async_store(redis)

    async def close(self) -> None:
        """Close the connections that were made here; safe twice. What was given stays open."""
        if self._owns_store:
            await self.store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class SyncFacade:
    """For callers that block."""

    store: SyncStore

    def __init__(self, redis: SyncTarget) -> None:
        self._owns_store = isinstance(redis, str)
        self.store = _sync_store(redis)

    def close(self) -> None:
        """Close the connections that were made here; safe twice. What was given stays open."""
        if self._owns_store:
            self.store.close_blocking()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
