"""The one place where a target becomes connections of redis-py, awaited or blocking."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import ModuleType
from typing import Any, Generic, TypeVar

import redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import AbstractConnection
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode as SyncClusterNode
from redis.cluster import RedisCluster as SyncRedisCluster
from redis.connection import Connection as SyncConnection
from redis.connection import ConnectionPool as SyncConnectionPool

from capsule_tasks.storage.awaiting import result_of
from capsule_tasks.storage.connections.faults import FAULTS
from capsule_tasks.storage.connections.targets import Target

C = TypeVar("C")

_CLUSTER_OPTIONS = frozenset(inspect.signature(RedisCluster.__init__).parameters)
_PROTOCOL = 2
"""A script answers the same in both; listeners and the parsers of replies know this one."""


def _pools(target: Target, library: ModuleType, **changes: Any) -> tuple[deque[Any], list[Any]]:
    """Pools of redis-py, of which only `make_connection` is used, and the Sentinels behind them.

    `library` is `redis` or `redis.asyncio`, which name their classes alike. redis-py repeats
    nothing: `storage.operations` repeats a call, and tells Redis that it does.
    """
    common = {"protocol": _PROTOCOL, "retry": library.retry.Retry(NoBackoff(), 0)}
    options = {**common, **target.options, **changes}
    if target.kind == "sentinel":
        limits = {name: v for name, v in target.options.items() if name.startswith("socket_")}
        sentinel = library.Sentinel(
            list(target.addresses),
            sentinel_kwargs={**common, **limits, **target.sentinel_options},
        )
        primary = sentinel.master_for(target.service, ssl=target.is_tls, **options)
        return deque([primary.connection_pool]), sentinel.sentinels
    # The URL was read for threads: the class that its options name is not for asyncio.
    kind = "UnixDomainSocketConnection" if "path" in options else "Connection"
    options["connection_class"] = getattr(library, "SSLConnection" if target.is_tls else kind)
    nodes = [{"host": host, "port": port} for host, port in target.addresses] or [{}]
    return deque(library.ConnectionPool(**options, **node) for node in nodes), []


class _Endpoint(Generic[C]):
    """Makes connections to one target; each belongs to who asked for it."""

    _library: ModuleType
    time_limit: Callable[[float], AbstractAsyncContextManager[object]]

    def __init__(self, target: Target, **changes: Any) -> None:
        self.settings = target.settings
        self._pools, self._sentinels = _pools(target, self._library, **changes)

    def connection(self) -> C:
        """A new connection, not yet open: to the server, or to the current primary."""
        connection: C = self._pools[0].make_connection()
        return connection

    async def open_connection(self) -> C:
        """A new connection that is open; raises one of FAULTS.

        For a cluster: to the next of the nodes in its URL that answers.
        """
        for _ in range(len(self._pools) - 1):
            with contextlib.suppress(*FAULTS):
                return await self._opened()
        return await self._opened()

    async def _opened(self) -> C:
        connection: Any = self.connection()
        self._pools.rotate(-1)
        # A server may accept a connection and then say nothing.
        limit_s = self.settings.connect_timeout_s + self.settings.reply_timeout_s
        try:
            async with self.time_limit(limit_s):
                await result_of(connection.connect())
        except BaseException:
            with contextlib.suppress(*FAULTS):
                await result_of(connection.disconnect(True))
            raise
        opened: C = connection
        return opened

    async def close(self) -> None:
        """End the connections to Sentinels; safe twice."""
        for sentinel in self._sentinels:
            await close_client(sentinel)


async def close_client(client: Any) -> None:
    await result_of(getattr(client, "aclose", client.close)())


class AsyncEndpoint(_Endpoint[AbstractConnection]):
    """For callers that await, on one event loop. Time limits are set around awaits."""

    _library = redis.asyncio
    time_limit = staticmethod(asyncio.timeout)

    def __init__(self, target: Target) -> None:
        super().__init__(target, socket_timeout=None)


class SyncEndpoint(_Endpoint[SyncConnection]):
    """For callers that block, in any number of threads. Sockets have the time limits."""

    _library = redis
    time_limit = contextlib.nullcontext


def async_cluster(target: Target) -> RedisCluster:
    """A client that finds the node of each key; it learns the nodes when it is first used."""
    options = {"protocol": _PROTOCOL, **target.options}
    known = {name: value for name, value in options.items() if name in _CLUSTER_OPTIONS}
    client = RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in target.addresses],
        ssl=target.is_tls,
        max_connections=target.settings.max_connections,
        **known,
    )
    # The constructor names its options and lacks some of what its connections take (`ssl_ca_path`,
    # `ssl_password`). Nodes that are found later get theirs from the client.
    others = {name: value for name, value in options.items() if name not in known}
    for node in client.nodes_manager.startup_nodes.values():
        node.connection_kwargs.update(others)
    client.connection_kwargs.update(others)
    return client


def sync_cluster(target: Target) -> SyncRedisCluster:
    """The same for callers that block; it learns the nodes at once, and so may raise FAULTS."""
    options = {"protocol": _PROTOCOL, **target.options}
    # The client drops options that it does not list (`ssl_min_version`, `ssl_ciphers`) before it
    # makes connections of them. A pool class of its own, which only a client made by a URL may
    # have, puts them back.
    (host, port), *others = target.addresses
    scheme = "rediss" if target.is_tls else "redis"
    return SyncRedisCluster(
        url=f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}",
        startup_nodes=[SyncClusterNode(host, port) for host, port in others],
        connection_pool_class=partial(SyncConnectionPool, **options),
        **options,
    )
