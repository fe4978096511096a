"""Connections for callers that await: one set for each event loop, and none shared with a fork."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from typing import Any

from capsule_tasks.settings import ConnectionSettings
from capsule_tasks.storage.connections import targets
from capsule_tasks.storage.connections.callers import ClusterCaller, EndpointCaller
from capsule_tasks.storage.connections.endpoints import AsyncEndpoint, async_cluster
from capsule_tasks.storage.operations import Reply, closed
from capsule_tasks.storage.scripts import Call

Caller = EndpointCaller | ClusterCaller


class AsyncConnections:
    """Connections to one URL, made when needed, for each event loop and process by itself.

    They may be used from several loops and threads, and by both sides of a fork. Those of a loop
    that `asyncio.run` ends are closed with it; `close` ends those of the loop that it runs in, and
    all further use. Share one between the histories of a process.
    """

    def __init__(self, url: str, settings: ConnectionSettings | None = None) -> None:
        self.target = targets.parsed(url, settings or ConnectionSettings())
        self.location = self.target.location
        self.is_closed = False
        self._forget_loops()
        _all.add(self)

    def _forget_loops(self) -> None:
        self._lock = threading.Lock()
        self._by_loop: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[Caller, AsyncGenerator[None]]
        ] = weakref.WeakKeyDictionary()

    async def run(self, call: Call) -> Reply:
        """The reply of a script; raises StorageError."""
        if self.is_closed:
            raise closed()
        loop = asyncio.get_running_loop()
        entry = self._by_loop.get(loop)
        caller = entry[0] if entry else await self._caller_for(loop)
        return await caller.run(call)

    async def close(self) -> None:
        """Close this loop's connections; safe before any use, twice, and while calls are made."""
        self.is_closed = True
        if (entry := self._by_loop.get(asyncio.get_running_loop())) is not None:
            await entry[1].aclose()

    async def _caller_for(self, loop: asyncio.AbstractEventLoop) -> Caller:
        with self._lock:
            for other in [other for other in self._by_loop if other.is_closed()]:
                del self._by_loop[other]
            permits = asyncio.Semaphore(self.target.settings.max_connections)
            caller = (
                ClusterCaller(async_cluster(self.target), permits)
                if self.target.kind == "cluster"
                else EndpointCaller(AsyncEndpoint(self.target), permits)
            )
            keeper = self._close_with_loop(loop, caller)
            self._by_loop[loop] = (caller, keeper)
        # The first step registers it with the loop, which closes it when it shuts down.
        await anext(keeper)
        return caller

    async def _close_with_loop(
        self, loop: asyncio.AbstractEventLoop, caller: Caller
    ) -> AsyncGenerator[None]:
        made_in = os.getpid()
        try:
            yield
        finally:
            # A fork may run on inside a copy of this loop and shut it down: not its sockets.
            if made_in == os.getpid():
                with self._lock:
                    self._by_loop.pop(loop, None)
                await caller.close()

    def leave_to_parent(self) -> None:
        """Forget everything, in a fork, but let it live on untouched.

        The sockets are the parent's, too. Closing them here would write into its TLS streams and
        take them out of the poll set that both processes share.
        """
        _left_to_parent.extend(self._by_loop.items())
        self._forget_loops()


class InjectedClient(ClusterCaller):
    """A client that belongs to the caller: used as it is, never closed."""

    is_closed = False
    target = None

    def __init__(self, client: Any) -> None:
        super().__init__(client, nullcontext())
        self.location = targets.location_of_client(client)

    async def close(self) -> None:
        """Do nothing: the client stays open."""


_all: weakref.WeakSet[AsyncConnections] = weakref.WeakSet()
_left_to_parent: list[object] = []


def _after_fork() -> None:
    for connections in list(_all):
        connections.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
