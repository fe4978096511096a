"""Connections for callers that await: one set for each event loop, and none shared with a fork."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Protocol

from redis.asyncio import RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import AbstractConnection, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.client import NEVER_DECODE
from redis.exceptions import NoScriptError

from capsule_tasks.errors import StorageNotReady
from capsule_tasks.settings import ConnectionSettings
from capsule_tasks.storage import targets
from capsule_tasks.storage.faults import FAULTS, told
from capsule_tasks.storage.operations import Reply, closed
from capsule_tasks.storage.scripts import Call
from capsule_tasks.storage.targets import Target

_CLUSTER_OPTIONS = frozenset(inspect.signature(RedisCluster.__init__).parameters)
AT_ONCE_BYTES = 32 * 1024
"""An empty transport takes this much without asking its writer to wait."""


class _Caller(Protocol):
    async def run(self, call: Call) -> Reply: ...
    async def close(self) -> None: ...


class AsyncConnections:
    """Connections to one URL, made when needed, for each event loop and process by itself.

    They may be used from several loops and threads, and by both sides of a fork. Those of a loop
    that `asyncio.run` ends are closed with it; `close` ends those of the loop that it runs in, and
    all further use. Share one between the histories of a process.
    """

    def __init__(self, url: str, settings: ConnectionSettings | None = None) -> None:
        self._settings = settings or ConnectionSettings()
        self._target = targets.parsed(url, self._settings)
        self.location = self._target.location
        self.is_closed = False
        self._callers = _PerLoop(self._made)

    async def run(self, call: Call) -> Reply:
        """The reply of a script; raises StorageError."""
        if self.is_closed:
            raise closed()
        caller = self._callers.mine() or await self._callers.make_mine()
        return await caller.run(call)

    async def close(self) -> None:
        """Close this loop's connections; safe before any use, twice, and while calls are made."""
        self.is_closed = True
        await self._callers.close_mine()

    def _made(self) -> _Caller:
        match self._target.kind:
            case "cluster":
                places = asyncio.Semaphore(self._settings.max_connections)
                return _ClusterCaller(_cluster(self._target, self._settings), places)
            case "sentinel":
                return _PoolCaller(*_sentinel_pool(self._target), self._settings)
            case "server":
                return _PoolCaller(server_pool(self._target), None, self._settings)


class InjectedClient:
    """A client that belongs to the caller: used as it is, never closed."""

    is_closed = False

    def __init__(self, client: Any) -> None:
        self.location = targets.location_of_client(client)
        self._caller = _ClusterCaller(client, nullcontext())

    async def run(self, call: Call) -> Reply:
        return await self._caller.run(call)

    async def close(self) -> None:
        """Nothing: what was injected stays open."""


class _PoolCaller:
    """Calls over connections of its own, so that it knows whether a command was sent.

    Taking one and giving it back never awaits: a cancelled call strands none.
    """

    def __init__(
        self, pool: ConnectionPool, sentinel: Sentinel | None, settings: ConnectionSettings
    ) -> None:
        self._pool = pool
        self._sentinel = sentinel
        self._settings = settings
        self._places = asyncio.Semaphore(settings.max_connections)
        self._free: list[AbstractConnection] = []
        self._lent: set[AbstractConnection] = set()
        self._is_closed = False

    async def run(self, call: Call) -> Reply:
        async with self._places:
            if self._is_closed:
                raise closed()
            connection = self._free.pop() if self._free else self._pool.make_connection()
            self._lent.add(connection)
            was_sent = False
            is_sound = False
            try:
                if not connection.is_connected:
                    await connection.connect()
                if self._is_closed:
                    raise closed()
                was_sent = True
                reply = await _called(connection, call, self._settings.reply_timeout_s)
                is_sound = True
                return reply
            except FAULTS as error:
                raise told(error, was_sent=was_sent) from error
            except TypeError as error:
                if "'NoneType' object is not callable" not in str(error):
                    raise
                # Python 3.13.0 says so of a transport that was lost just before it is written to.
                lost = ConnectionResetError("the connection was lost")
                raise told(lost, was_sent=was_sent) from error
            finally:
                self._lent.discard(connection)
                # What was answered with an error may be a server that is on its way down.
                if not is_sound or self._is_closed:
                    await connection.disconnect(nowait=True)
                if not self._is_closed:
                    self._free.append(connection)

    async def close(self) -> None:
        self._is_closed = True
        connections = [*self._free, *self._lent]
        self._free.clear()
        try:
            for connection in connections:
                await connection.disconnect()
        finally:
            # Who closes may be cancelled; without waiting this never awaits.
            for connection in connections:
                await connection.disconnect(nowait=True)
        if self._sentinel is not None:
            for sentinel in self._sentinel.sentinels:
                await sentinel.aclose()


async def _called(connection: AbstractConnection, call: Call, limit_s: float) -> Reply:
    packed = call.packed(b"EVALSHA", call.script.sha)
    # What is short goes out without waiting; the time limit is set up while the server works.
    is_sent = len(packed) <= AT_ONCE_BYTES
    if is_sent:
        await connection.send_packed_command([packed], check_health=False)
    async with asyncio.timeout(limit_s):
        if not is_sent:
            await connection.send_packed_command([packed], check_health=False)
        try:
            return _reply(await connection.read_response(disable_decoding=True))
        except NoScriptError:
            # The server was restarted, flushed or failed over. EVAL makes it remember the script.
            packed = call.packed(b"EVAL", call.script.source)
            await connection.send_packed_command([packed], check_health=False)
            return _reply(await connection.read_response(disable_decoding=True))


class _ClusterCaller:
    """Calls through a client's own `execute_command`, which finds the node and follows it.

    It may repeat a command by itself, so whether one was sent is not known: it is assumed.
    """

    def __init__(self, client: Any, places: AbstractAsyncContextManager[None]) -> None:
        self._client = client
        self._places = places

    async def run(self, call: Call) -> Reply:
        async with self._places:
            return await self._executed(call)

    async def _executed(self, call: Call) -> Reply:
        tail = (len(call.keys), *call.keys, *call.args)
        execute = self._client.execute_command
        undecoded = {NEVER_DECODE: True}
        try:
            try:
                return _reply(await execute("EVALSHA", call.script.sha, *tail, **undecoded))
            except NoScriptError:
                return _reply(await execute("EVAL", call.script.source, *tail, **undecoded))
        except FAULTS as error:
            raise told(error, was_sent=True) from error

    async def close(self) -> None:
        await self._client.aclose()


def _reply(reply: Any) -> Reply:
    if not isinstance(reply, list):
        raise StorageNotReady(f"Redis: a script was answered with {reply!r}", may_have_written=True)
    return reply


class _PerLoop:
    """What each event loop has of its own, made at its first use and ended with the loop."""

    def __init__(self, make: Callable[[], _Caller]) -> None:
        self._make = make
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._of_loop: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[_Caller, AsyncGenerator[None]]
        ] = weakref.WeakKeyDictionary()

    def mine(self) -> _Caller | None:
        entry = self._of_loop.get(asyncio.get_running_loop())
        return entry and entry[0]

    async def make_mine(self) -> _Caller:
        loop = asyncio.get_running_loop()
        with self._lock:
            for other in [other for other in self._of_loop if other.is_closed()]:
                del self._of_loop[other]
            caller = self._make()
            keeper = self._kept_until_the_loop_ends(loop, caller)
            self._of_loop[loop] = (caller, keeper)
        # The first step registers it with the loop, which closes it when it shuts down.
        await anext(keeper)
        return caller

    async def close_mine(self) -> None:
        entry = self._of_loop.get(asyncio.get_running_loop())
        if entry is not None:
            await entry[1].aclose()

    async def _kept_until_the_loop_ends(
        self, loop: asyncio.AbstractEventLoop, caller: _Caller
    ) -> AsyncGenerator[None]:
        made_in = os.getpid()
        try:
            yield
        finally:
            # A fork may run on inside a copy of this loop and shut it down: not its sockets.
            if made_in == os.getpid():
                with self._lock:
                    self._of_loop.pop(loop, None)
                await caller.close()

    def leave_to_parent(self) -> list[object]:
        """Forget everything, in a fork, and return what must live on untouched.

        The sockets are the parent's, too. Closing them here would write into its TLS streams and
        take them out of the poll set that both processes share.
        """
        left: list[object] = list(self._of_loop.items())
        self._reset()
        return left


_all: weakref.WeakSet[_PerLoop] = weakref.WeakSet()
_left_to_parent: list[object] = []


def _after_fork() -> None:
    for per_loop in list(_all):
        _left_to_parent.extend(per_loop.leave_to_parent())


os.register_at_fork(after_in_child=_after_fork)


def _no_retry() -> Retry:
    """Repeating is this package's part: it tells the server that it repeats."""
    return Retry(NoBackoff(), 0)


def server_pool(target: Target) -> ConnectionPool:
    return _pool(target, target.options)


def node_pools(target: Target) -> list[ConnectionPool]:
    """One for each node of a cluster that its URL names."""
    options = _of_cluster(target)
    return [_pool(target, {**options, "host": h, "port": p}) for h, p in target.addresses]


def _pool(target: Target, of_target: Mapping[str, Any]) -> ConnectionPool:
    options = {"protocol": 2, **of_target, "socket_timeout": None, "retry": _no_retry()}
    # The URL was read for threads; here the classes of asyncio take its place.
    if target.is_tls:
        options["connection_class"] = SSLConnection
    elif "path" in options:
        options["connection_class"] = _unix_class()
    return ConnectionPool(**options)


def _unix_class() -> type[AbstractConnection]:
    from redis.asyncio.connection import UnixDomainSocketConnection  # noqa: PLC0415  rarely needed

    return UnixDomainSocketConnection


def _sentinel_pool(target: Target) -> tuple[ConnectionPool, Sentinel]:
    common = {"protocol": 2, "retry": _no_retry()}
    timeouts = {k: v for k, v in target.options.items() if k.startswith("socket_")}
    sentinel = Sentinel(
        list(target.addresses),
        sentinel_kwargs={**common, **timeouts, **target.sentinel_options},
    )
    options = {**common, **target.options, "socket_timeout": None, "ssl": target.is_tls}
    pool: ConnectionPool = sentinel.master_for(target.service, **options).connection_pool
    return pool, sentinel


def _of_cluster(target: Target) -> dict[str, Any]:
    """A cluster has one database, and redis-py refuses to be told which."""
    return {name: value for name, value in target.options.items() if name != "db"}


def _cluster(target: Target, settings: ConnectionSettings) -> RedisCluster:
    options = {"protocol": 2, **_of_cluster(target)}
    known = {name: value for name, value in options.items() if name in _CLUSTER_OPTIONS}
    client = RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in target.addresses],
        ssl=target.is_tls,
        max_connections=settings.max_connections,
        **known,
    )
    # The constructor names its options and lacks some of what its connections take (`ssl_ca_path`,
    # `ssl_password`). Nodes that are found later get theirs from the client.
    others = {name: value for name, value in options.items() if name not in known}
    for node in client.nodes_manager.startup_nodes.values():
        node.connection_kwargs.update(others)
    client.connection_kwargs.update(others)
    return client
