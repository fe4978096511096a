"""The one place where a target becomes connections of redis-py, awaited or blocking."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import deque
from functools import partial
from types import ModuleType
from typing import Any

import redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import AbstractConnection
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode as SyncClusterNode
from redis.cluster import RedisCluster as SyncRedisCluster
from redis.connection import Connection as SyncConnection
from redis.connection import ConnectionPool as SyncConnectionPool

from capsule_tasks.storage.connections.faults import FAULTS
from capsule_tasks.storage.connections.targets import Target

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
    if target.is_tls:
        options["connection_class"] = library.SSLConnection
    elif "path" in options:
        options["connection_class"] = library.UnixDomainSocketConnection
    else:
        options["connection_class"] = library.Connection
    nodes = [{"host": host, "port": port} for host, port in target.addresses] or [{}]
    return deque(library.ConnectionPool(**options, **node) for node in nodes), []


class AsyncEndpoint:
    """Makes connections to one target, on one event loop; each belongs to who asked for it."""

    def __init__(self, target: Target) -> None:
        self._settings = target.settings
        # Time limits are set around awaits, not on sockets.
        self._pools, self._sentinels = _pools(target, redis.asyncio, socket_timeout=None)

    def connection(self) -> AbstractConnection:
        """A new connection, not yet open: to the server, or to the current primary."""
        connection: AbstractConnection = self._pools[0].make_connection()
        return connection

    async def open_connection(self) -> AbstractConnection:
        """A new connection that is open; raises one of FAULTS.

        For a cluster: to the next of the nodes in its URL that answers.
        """
        for _ in range(len(self._pools) - 1):
            with contextlib.suppress(*FAULTS):
                return await self._opened()
        return await self._opened()

    async def _opened(self) -> AbstractConnection:
        connection = self.connection()
        self._pools.rotate(-1)
        # A server may accept a connection and then say nothing.
        limit_s = self._settings.connect_timeout_s + self._settings.reply_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await connection.connect()
        except BaseException:
            with contextlib.suppress(*FAULTS):
                await connection.disconnect(nowait=True)
            raise
        return connection

    async def close(self) -> None:
        """End the connections to Sentinels; safe twice."""
        for sentinel in self._sentinels:
            await sentinel.aclose()


class SyncEndpoint:
    """The same for callers that block; usable by many threads."""

    def __init__(self, target: Target) -> None:
        self._pools, self._sentinels = _pools(target, redis)

    def connection(self) -> SyncConnection:
        """A new connection, not yet open: to the server, or to the current primary."""
        connection: SyncConnection = self._pools[0].make_connection()
        return connection

    def open_connection(self) -> SyncConnection:
        """A new connection that is open, as by `AsyncEndpoint.open_connection`."""
        for _ in range(len(self._pools) - 1):
            with contextlib.suppress(*FAULTS):
                return self._opened()
        return self._opened()

    def _opened(self) -> SyncConnection:
        connection = self.connection()
        self._pools.rotate(-1)
        try:
            connection.connect()
        except BaseException:
            connection.disconnect()
            raise
        return connection

    def close(self) -> None:
        """End the connections to Sentinels; safe twice."""
        for sentinel in self._sentinels:
            sentinel.close()


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
