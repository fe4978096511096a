"""Many calls in flight over one connection; replies come in the order of the calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoScriptError, ResponseError

from capsule_tasks.errors import (
    StorageClosed,
    StorageError,
    StorageUnavailable,
    reason_of,
)
from capsule_tasks.settings import ConnectionSettings
from capsule_tasks.storage.connections import targets
from capsule_tasks.storage.connections.asynchronous import AsyncConnections
from capsule_tasks.storage.connections.endpoints import AsyncEndpoint
from capsule_tasks.storage.connections.faults import (
    FAULTS,
    is_temporary,
    storage_errors,
    to_storage_error,
)
from capsule_tasks.storage.connections.replication import check_replicas, replica_wait
from capsule_tasks.storage.operations import Reply, closed, no_reply
from capsule_tasks.storage.scripts import Call

_MAX_BATCH = 64

Answer = Callable[[Reply | StorageError], object]

log = logging.getLogger("capsule_tasks.storage")


class PipelinedConnection:
    """A connection to one Redis for an event loop that makes many small calls; an `AsyncStore`.

    Calls to one server share a connection, so that a thousand in flight cost one. A cluster has
    a connection for each call in flight, as `AsyncConnections` makes them. A caller that
    is cancelled does not disturb the others: its reply is dropped when it comes.
    """

    def __init__(self, url: str, settings: ConnectionSettings | None = None) -> None:
        self._settings = settings = settings or ConnectionSettings()
        self.target = target = targets.parsed(url, settings)
        self.location = target.location
        self._others = AsyncConnections(url, settings) if target.kind == "cluster" else None
        self.preserves_order = self._others is None
        """Whether calls are done in the order in which they were made."""
        self._endpoint = AsyncEndpoint(target)
        self._link: PipelinedLink | None = None
        # redis-py's cluster client closes connections that are in use when it needs more than it
        # may have: it is never asked for so many.
        self._permits = asyncio.Semaphore(max(1, settings.max_connections // 2))
        self._connecting = asyncio.Lock()
        self.is_closed = False

    async def run(self, call: Call, *, may_batch: bool = False) -> Reply:
        """The reply of a script; raises StorageError.

        A call that may batch waits for others of this iteration: a packet costs more than a call.
        """
        if self.is_closed:
            raise closed()
        if self._others is not None:
            async with self._permits:
                return await self._others.run(call)
        link = self._link
        if link is None or link.is_broken:
            link = await self._connected()
        reply = await link.ask(call, may_batch)
        if isinstance(reply, StorageError):
            # A call that was in flight as this was closed says so, like those that come later.
            raise reply.__cause__ if isinstance(reply.__cause__, StorageClosed) else reply
        return reply

    def send_nowait(self, call: Call, answer: Answer, *, may_batch: bool = False) -> None:
        """Send a call without waiting; `answer` is called with the reply or the error.

        For many small calls where order is preserved. The call is tried once, and not at all
        without a connection: after an error the caller repeats it by `run`.
        """
        link = self._link
        if link is None or link.is_broken or self.is_closed:
            error = StorageUnavailable("Redis: there is no connection")
            asyncio.get_running_loop().call_soon(answer, error)
            return
        link.send_nowait(call, answer, may_batch)

    async def close(self) -> None:
        """Close the connection; calls in flight fail. Safe twice, and each caller waits."""
        self.is_closed = True
        if self._others is not None:
            await self._others.close()
        if self._link is not None:
            await self._link.close()
        await self._endpoint.close()

    async def _connected(self) -> PipelinedLink:
        async with self._connecting:
            link = self._link
            if link is not None and not link.is_broken:
                return link
            with storage_errors(was_sent=False):
                connection = await self._endpoint.open_connection()
            if self.is_closed:
                await connection.disconnect(nowait=True)
                raise closed()
            self._link = PipelinedLink(connection, self._settings)
            return self._link


class PipelinedLink:
    """One connection from connected to broken."""

    def __init__(
        self,
        connection: AbstractConnection,
        settings: ConnectionSettings,
    ) -> None:
        self.is_broken = False
        self._replicas = settings.replicas
        self._wait = connection.pack_command(*replica_wait(settings))
        self._unreplicated: list[tuple[Callable[[Any], object], Any]] = []
        """Replies that wait until the replicas have what was done."""
        self._connection = connection
        self._timeout_s = settings.timeout_s
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[Callable[[Any], object], float]] = deque()
        self._outbox: list[bytes] = []
        self._writer: asyncio.Task[None] | None = None
        self._reader = self._loop.create_task(self._read())
        self._disconnecting: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._flush_handle: asyncio.Handle | None = None

    def ask(self, call: Call, may_batch: bool) -> asyncio.Future[Reply | StorageError]:
        """As `send_nowait`, for a caller that waits, and may be cancelled."""
        answered: asyncio.Future[Reply | StorageError] = self._loop.create_future()

        def resolve(reply: Reply | StorageError) -> None:
            if not answered.done():  # otherwise the caller was cancelled
                answered.set_result(reply)

        self.send_nowait(call, resolve, may_batch)
        return answered

    def send_nowait(self, call: Call, answer: Answer, may_batch: bool) -> None:
        packed = call.packed(b"EVALSHA", call.script.sha)
        self._send(packed, partial(self._on_reply, call, answer), may_batch)

    def _on_reply(self, call: Call, answer: Answer, reply: Any) -> None:
        if type(reply) is list or isinstance(reply, StorageError):
            answer(reply)
        elif isinstance(reply, NoScriptError) and not self.is_broken:
            # The server was restarted, flushed or failed over. EVAL makes it remember the script.
            packed = call.packed(b"EVAL", call.script.source)
            self._send(packed, partial(self._on_reply, call, answer), may_batch=False)
        else:
            answer(_error_of(reply))

    async def close(self) -> None:
        self._break(closed())
        if self._writer is not None:
            self._writer.cancel()
        tasks = (self._reader, self._writer, self._disconnecting)
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)

    def _send(self, packed: bytes, on_reply: Callable[[Any], object], may_batch: bool) -> None:
        self._outbox.append(packed)
        self._waiting.append((on_reply, self._loop.time()))
        if not may_batch or len(self._outbox) >= _MAX_BATCH:
            self.flush()
        elif self._flush_handle is None:
            self._flush_handle = self._loop.call_soon(self.flush)
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._check_timeout)

    def flush(self) -> None:
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        if self._writer is None and self._outbox and not self.is_broken:
            self._writer = self._loop.create_task(self._write())

    async def _write(self) -> None:
        try:
            while self._outbox:
                outbox, self._outbox = self._outbox, []
                if self._replicas:
                    outbox += self._wait
                    self._waiting.append((self._on_replicated, self._loop.time()))
                await self._connection.send_packed_command(b"".join(outbox), check_health=False)
        except FAULTS as error:
            self._break(error)
        finally:
            self._writer = None

    async def _read(self) -> None:
        while not self.is_broken:
            try:
                reply = await self._connection.read_response(disable_decoding=True)
            except ResponseError as error:
                self._answer(error)
                if is_temporary(error):  # another server may be at this address by now
                    self._break(error)
            except FAULTS as error:
                self._break(error)
            else:
                self._answer(reply)

    def _answer(self, reply: Any) -> None:
        if not self._waiting:  # a reply to no call: the connection cannot be trusted
            self._break(StorageUnavailable("Redis: a reply to no call"))
            return
        on_reply = self._waiting.popleft()[0]
        if self._replicas and on_reply != self._on_replicated:
            self._unreplicated.append((on_reply, reply))
        else:
            self._deliver(on_reply, reply)

    def _on_replicated(self, reply: Any) -> None:
        if self.is_broken:
            return
        check_replicas(reply, self._replicas)
        unreplicated, self._unreplicated = self._unreplicated, []
        for on_reply, answer in unreplicated:
            self._deliver(on_reply, answer)

    def _deliver(self, on_reply: Callable[[Any], object], reply: Any) -> None:
        try:
            on_reply(reply)
        except Exception:  # other calls on this connection wait for their replies
            log.exception("callback for a Redis reply failed")

    def _check_timeout(self) -> None:
        """Break the connection if the oldest call has waited too long; it may have been done."""
        self._timer = None
        if not self._waiting or self.is_broken:
            return
        oldest_s = self._loop.time() - self._waiting[0][1]
        if oldest_s >= self._timeout_s:
            self._break(TimeoutError(f"no reply within {self._timeout_s} s"))
        else:
            self._timer = self._loop.call_later(self._timeout_s - oldest_s, self._check_timeout)

    def _break(self, error: BaseException) -> None:
        if self.is_broken:
            return
        self.is_broken = True
        for timer in (self._timer, self._flush_handle):
            if timer is not None:
                timer.cancel()
        self._outbox.clear()
        # Writes that were not replicated may be lost with this primary.
        for on_reply, _ in (*self._unreplicated, *self._waiting):
            # Later, because a callback may make calls.
            self._loop.call_soon(self._deliver, on_reply, _copied(error))
        self._unreplicated.clear()
        self._waiting.clear()
        self._reader.cancel()
        self._disconnecting = self._loop.create_task(self._disconnect())

    async def _disconnect(self) -> None:
        with contextlib.suppress(*FAULTS):
            await self._connection.disconnect(nowait=True)


def _error_of(reply: object) -> StorageError:
    """The error for a reply that no script gives."""
    if isinstance(reply, NoScriptError):
        return StorageUnavailable("Redis: the connection was lost")
    if not isinstance(reply, BaseException):
        return no_reply(reply)
    error = to_storage_error(reply, was_sent=True)
    error.__cause__ = reply
    return error


def _copied(error: BaseException) -> BaseException:
    """An error for one waiter: a traceback grows with every raise, so none is shared."""
    if isinstance(error, StorageClosed):
        return closed()
    return StorageUnavailable(f"Redis: {reason_of(error)}", may_have_written=True)
