"""The connections of a store's facades, and who closes them.

Every store has two facades: one for callers that await, one for callers that block. Their `redis`
is a URL, connections to share, or a client of redis-py, which stays open and, if it is
asynchronous, with its own event loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from redis import Redis as SyncRedis
from redis import RedisCluster as SyncRedisCluster
from redis.asyncio import Redis, RedisCluster

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.settings import ConnectionSettings
from capsule_tasks.storage.connections.asynchronous import AsyncConnections, InjectedClient
from capsule_tasks.storage.connections.blocking import InjectedSyncClient, SyncConnections
from capsule_tasks.storage.drivers import AsyncStore, SyncStore, drive, drive_blocking
from capsule_tasks.storage.operations import Operation

P = ParamSpec("P")
T = TypeVar("T")
Target = TypeVar("Target")

AsyncTarget = str | AsyncStore | Redis | RedisCluster
SyncTarget = str | SyncStore | SyncRedis | SyncRedisCluster


class Method(Generic[P, T]):
    """An operation of a core as a method of its facades.

    It stands in for the method in the class that both facades inherit from. Each facade replaces it
    by a coroutine function, or by a function that blocks.
    """

    def __init__(self, operation: Callable[Concatenate[Any, P], Operation[T]]) -> None:
        self.operation = operation

    @overload
    def __get__(self, facade: AsyncFacade, kind: Any) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, facade: SyncFacade, kind: Any) -> Callable[P, T]: ...
    @overload
    def __get__(self, facade: None, kind: Any) -> Callable[Concatenate[Any, P], Any]: ...
    def __get__(self, facade: Any, kind: Any) -> Any:
        return self


class Facade(Generic[Target]):
    """The common base of a store's two facades: a core of operations, and its connections."""

    core: Any
    store: AsyncStore | SyncStore
    _store_of: ClassVar[Callable[..., Any]]
    _method_of: ClassVar[Callable[..., Any]]

    def __init__(self, redis: Target, connection: ConnectionSettings | None = None) -> None:
        """`connection` are the settings of the connections to a URL."""
        self._owns_store = isinstance(redis, str)
        if connection is not None and not self._owns_store:
            raise InvalidSetting("connection", connection, "None: the connections were given")
        self.store = self._store_of(redis, connection)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, each in inspect.getmembers_static(cls):
            if isinstance(each, Method) and hasattr(cls, "_method_of"):
                setattr(cls, name, cls._method_of(each.operation))


class AsyncFacade(Facade[AsyncTarget]):
    """For callers that await."""

    store: AsyncStore

    @staticmethod
    def _store_of(redis: Any, connection: ConnectionSettings | None) -> Any:
        if isinstance(redis, str):
            return AsyncConnections(redis, connection)
        if isinstance(redis, (Redis, RedisCluster)):
            return InjectedClient(redis)
        if hasattr(redis, "run"):
            return redis
        must = "a URL, AsyncConnections, or a client of redis.asyncio"
        raise InvalidSetting("redis", redis, must)

    @staticmethod
    def _method_of(operation: Callable[..., Operation[Any]]) -> Callable[..., Any]:
        @wraps(operation)
        async def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            return await drive(operation(self.core, *args, **kwargs), self.store)

        return call

    async def close(self) -> None:
        """Close the connections that were made here; safe twice. What was given stays open."""
        if self._owns_store:
            await self.store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class SyncFacade(Facade[SyncTarget]):
    """For callers that block."""

    store: SyncStore

    @staticmethod
    def _store_of(redis: Any, connection: ConnectionSettings | None) -> Any:
        if isinstance(redis, str):
            return SyncConnections(redis, connection)
        if isinstance(redis, (SyncRedis, SyncRedisCluster)):
            return InjectedSyncClient(redis)
        if hasattr(redis, "run_blocking"):
            return redis
        raise InvalidSetting("redis", redis, "a URL, SyncConnections, or a client of redis")

    @staticmethod
    def _method_of(operation: Callable[..., Operation[Any]]) -> Callable[..., Any]:
        @wraps(operation)
        def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            return drive_blocking(operation(self.core, *args, **kwargs), self.store)

        return call

    def close(self) -> None:
        """Close the connections that were made here; safe twice. What was given stays open."""
        if self._owns_store:
            self.store.close_blocking()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
