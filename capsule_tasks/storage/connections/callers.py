"""Calls of scripts over connections to one target, for callers that await or that block."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from redis.asyncio.cluster import RedisCluster
from redis.client import NEVER_DECODE
from redis.exceptions import NoScriptError

from capsule_tasks.storage.awaiting import result_of
from capsule_tasks.storage.connections.endpoints import AsyncEndpoint, SyncEndpoint, close_client
from capsule_tasks.storage.connections.faults import FAULTS, storage_errors, to_storage_error
from capsule_tasks.storage.connections.replication import check_replicas, replica_wait
from capsule_tasks.storage.operations import Reply, closed, reply_of
from capsule_tasks.storage.scripts import Call

Permits = AbstractAsyncContextManager[None]


class EndpointCaller:
    """Calls over connections of its own, so that it knows whether a command was sent.

    Taking one and giving it back never waits: a cancelled call strands none.
    """

    def __init__(self, endpoint: AsyncEndpoint | SyncEndpoint, permits: Permits) -> None:
        self._endpoint = endpoint
        self._permits = permits
        self._settings = endpoint.settings
        self._free: list[Any] = []
        self._in_use: set[Any] = set()
        self._is_closed = False

    async def run(self, call: Call) -> Reply:
        async with self._permits:
            if self._is_closed:
                raise closed()
            try:
                connection = self._free.pop()
            except IndexError:
                connection = self._endpoint.connection()
            self._in_use.add(connection)
            was_sent = False
            is_sound = False
            try:
                if not connection.is_connected:
                    await result_of(connection.connect())
                if self._is_closed:
                    raise closed()
                was_sent = True
                async with self._endpoint.time_limit(self._settings.timeout_s):
                    reply = await self._replicated(connection, call)
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
                # A server that answers with an error may be shutting down. After an interrupt, the
                # next call would read the reply to this one.
                if not is_sound or self._is_closed:
                    await result_of(connection.disconnect(True))
                if not self._is_closed:
                    self._free.append(connection)

    async def _replicated(self, connection: Any, call: Call) -> Reply:
        """The reply, once replicas have what the call has written, or have had their time."""
        reply = await _called(connection, call)
        if self._settings.replicas:
            wait = replica_wait(self._settings)
            await result_of(connection.send_command(*wait, check_health=False))
            check_replicas(await result_of(connection.read_response()), self._settings.replicas)
        return reply

    async def close(self) -> None:
        self._is_closed = True
        connections = self._free.copy()
        self._free.clear()
        if isinstance(self._endpoint, AsyncEndpoint):
            # Other threads end their calls first, and disconnect then.
            connections += self._in_use
        try:
            for connection in connections:
                await result_of(connection.disconnect())
        finally:
            # The caller may be cancelled; without waiting this never awaits.
            for connection in connections:
                await result_of(connection.disconnect(True))
        await self._endpoint.close()


async def _called(connection: Any, call: Call) -> Reply:
    packed = call.packed(b"EVALSHA", call.script.sha)
    await result_of(connection.send_packed_command([packed], check_health=False))
    try:
        return reply_of(await result_of(connection.read_response(disable_decoding=True)))
    except NoScriptError:
        # The server was restarted, flushed or failed over. EVAL makes it remember the script.
        packed = call.packed(b"EVAL", call.script.source)
        await result_of(connection.send_packed_command([packed], check_health=False))
        return reply_of(await result_of(connection.read_response(disable_decoding=True)))


class ClusterCaller:
    """Calls through a client's own `execute_command`, which finds the node and follows it.

    It may repeat a command by itself, so whether one was sent is not known: it is assumed.

    A client that is awaited learns the nodes before each call that finds it without them. By itself
    it would first choose any node for that call. Where several calls are made at once, five nodes
    that answer with MOVED then have the client close the connections that the other calls use.
    """

    def __init__(self, client: Any, permits: Permits) -> None:
        self._client = client
        self._permits = permits

    async def run(self, call: Call) -> Reply:
        async with self._permits:
            if isinstance(self._client, RedisCluster):
                with storage_errors(was_sent=False):
                    await self._client.initialize()
            with storage_errors(was_sent=True):
                try:
                    return await self._called(call)
                except (AttributeError, TypeError) as error:
                    if "'NoneType' object" not in str(error):
                        raise
                    # While the cluster fails over, the client closes what other calls use.
                    raise ConnectionResetError("the connection was lost") from error

    async def _called(self, call: Call) -> Reply:
        tail = (len(call.keys), *call.keys, *call.args)
        execute = partial(self._client.execute_command, **{NEVER_DECODE: True})
        try:
            return reply_of(await result_of(execute("EVALSHA", call.script.sha, *tail)))
        except NoScriptError:
            return reply_of(await result_of(execute("EVAL", call.script.source, *tail)))

    async def close(self) -> None:
        await close_client(self._client)
