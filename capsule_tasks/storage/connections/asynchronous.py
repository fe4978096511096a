"""Connections for callers that await: one set for each event loop, and none shared with a fork."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.client import NEVER_DECODE
from redis.exceptions import NoScriptError

from capsule_tasks.settings import ConnectionSettings
from capsule_tasks.storage.connections import targets
from capsule_tasks.storage.connections.endpoints import AsyncEndpoint, async_cluster
from capsule_tasks.storage.connections.faults import FAULTS, storage_errors, to_storage_error
from capsule_tasks.storage.connections.per_loop import PerLoop
from capsule_tasks.storage.connections.targets import Target
from capsule_tasks.storage.operations import Reply, closed, reply_of
from capsule_tasks.storage.scripts import Call

MAX_UNAWAITED_BYTES = 32 * 1024
"""An empty transport takes this much without asking its writer to wait."""


class AsyncConnections:
    """Connections to one URL, made when needed, for each event loop and process by itself.

    They may be used from several loops and threads, and by both sides of a fork. Those of a loop
    that `asyncio.run` ends are closed with it; `close` ends those of the loop that it runs in, and
    all further use. Share one between the histories of a process.
    """

    def __init__(self, url: str, settings: ConnectionSettings | None = None) -> None:
        self._target = targets.parsed(url, settings or ConnectionSettings())
        self.location = self._target.location
        self.is_closed = False
        self._callers = PerLoop(self._made)

    async def run(self, call: Call) -> Reply:
        """The reply of a script; raises StorageError."""
        if self.is_closed:
            raise closed()
        caller = self._callers.of_this_loop() or await self._callers.make_for_this_loop()
        return await caller.run(call)

    async def close(self) -> None:
        """Close this loop's connections; safe before any use, twice, and while calls are made."""
        self.is_closed = True
        await self._callers.close_for_this_loop()

    def _made(self) -> _EndpointCaller | _ClusterCaller:
        if self._target.kind == "cluster":
            permits = asyncio.Semaphore(self._target.settings.max_connections)
            return _ClusterCaller(async_cluster(self._target), permits)
        return _EndpointCaller(self._target)


class _EndpointCaller:
    """Calls over connections of its own, so that it knows whether a command was sent.

    Taking one and giving it back never awaits: a cancelled call strands none.
    """

    def __init__(self, target: Target) -> None:
        self._endpoint = AsyncEndpoint(target)
        self._reply_timeout_s = target.settings.reply_timeout_s
        self._permits = asyncio.Semaphore(target.settings.max_connections)
        self._free: list[AbstractConnection] = []
        self._in_use: set[AbstractConnection] = set()
        self._is_closed = False

    async def run(self, call: Call) -> Reply:
        async with self._permits:
            if self._is_closed:
                raise closed()
            connection = self._free.pop() if self._free else self._endpoint.connection()
            self._in_use.add(connection)
            was_sent = False
            is_sound = False
            try:
                if not connection.is_connected:
                    await connection.connect()
                if self._is_closed:
                    raise closed()
                was_sent = True
                reply = await _called(connection, call, self._reply_timeout_s)
                is_sound = True
                return reply
            except FAULTS as error:
                raise to_storage_error(error, was_sent=was_sent) from error
            except TypeError as error:
                if "'NoneType' object is not callable" not in str(error):
                    raise
                # Python 3.13.0 says so of a transport that was lost just before it is written to.
                lost = ConnectionResetError("the connection was lost")
                raise to_storage_error(lost, was_sent=was_sent) from error
            finally:
                self._in_use.discard(connection)
                # A server that answers with an error may be shutting down.
                if not is_sound or self._is_closed:
                    await connection.disconnect(nowait=True)
                if not self._is_closed:
                    self._free.append(connection)

    async def close(self) -> None:
        self._is_closed = True
        connections = [*self._free, *self._in_use]
        self._free.clear()
        try:
            for connection in connections:
                await connection.disconnect()
        finally:
            # The caller may be cancelled; without waiting this never awaits.
            for connection in connections:
                await connection.disconnect(nowait=True)
        await self._endpoint.close()


async def _called(connection: AbstractConnection, call: Call, limit_s: float) -> Reply:
    packed = call.packed(b"EVALSHA", call.script.sha)
    # A short command is written without waiting; the time limit is set up while the server works.
    is_sent = len(packed) <= MAX_UNAWAITED_BYTES
    if is_sent:
        await connection.send_packed_command([packed], check_health=False)
    async with asyncio.timeout(limit_s):
        if not is_sent:
            await connection.send_packed_command([packed], check_health=False)
        try:
            return reply_of(await connection.read_response(disable_decoding=True))
        except NoScriptError:
            # The server was restarted, flushed or failed over. EVAL makes it remember the script.
            packed = call.packed(b"EVAL", call.script.source)
            await connection.send_packed_command([packed], check_health=False)
            return reply_of(await connection.read_response(disable_decoding=True))


class _ClusterCaller:
    """Calls through a client's own `execute_command`, which finds the node and follows it.

    It may repeat a command by itself, so whether one was sent is not known: it is assumed.
    """

    def __init__(self, client: Any, permits: AbstractAsyncContextManager[None]) -> None:
        self._client = client
        self._permits = permits

    async def run(self, call: Call) -> Reply:
        tail = (len(call.keys), *call.keys, *call.args)
        execute = partial(self._client.execute_command, **{NEVER_DECODE: True})
        async with self._permits:
            with storage_errors(was_sent=True):
                try:
                    return reply_of(await execute("EVALSHA", call.script.sha, *tail))
                except NoScriptError:
                    return reply_of(await execute("EVAL", call.script.source, *tail))

    async def close(self) -> None:
        await self._client.aclose()


class InjectedClient(_ClusterCaller):
    """A client that belongs to the caller: used as it is, never closed."""

    is_closed = False

    def __init__(self, client: Any) -> None:
        super().__init__(client, nullcontext())
        self.location = targets.location_of_client(client)

    async def close(self) -> None:
        """Do nothing: the client stays open."""
