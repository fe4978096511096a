"""MCP servers of agents, connected in the process that drives their runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextvars import Context
from typing import Any

from agents.mcp import MCPServer

from capsule_tasks.errors import reason_of

log = logging.getLogger("capsule_tasks.openai_agents")


async def connect(servers: Sequence[MCPServer]) -> None:
    """Connect the servers that nobody has connected; they stay connected for later runs.

    An app registers its agents before there is an event loop, so it cannot connect them itself.
    """
    for server in servers:
        connection = _connections.get(server)
        if connection is None:
            if getattr(server, "session", None) is not None:
                continue
            connection = _connections[server] = _Connection(server)
        # A turn that is cancelled meanwhile leaves it to the others that wait for it.
        await asyncio.shield(connection.is_made)


async def reconnect(servers: Sequence[MCPServer]) -> bool:
    """Connect anew those of our servers that do not answer; whether any of them is ours."""
    ours = {server: _connections[server] for server in servers if server in _connections}
    for server, connection in ours.items():
        try:
            # Another turn may be connecting it: only a connection that failed is closed.
            await asyncio.shield(connection.is_made)
            await server.list_tools()
        except Exception as error:  # noqa: BLE001  each transport has errors of its own
            log.warning("MCP server %s does not answer: %s", server.name, reason_of(error))
            await connection.close()
    await connect([*ours])
    return bool(ours)


async def disconnect(servers: Sequence[MCPServer]) -> None:
    """Disconnect those of the servers that `connect` has connected."""
    for server in servers:
        if (connection := _connections.get(server)) is not None:
            await connection.close()


class _Connection:
    """A connection with a task of its own: the task that opens a connection has to close it."""

    def __init__(self, server: MCPServer) -> None:
        self.is_made: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server: Any = server  # the SDK has no types for `connect` and `cleanup`
        self._is_over = asyncio.Event()
        # Without the context variables of the turn that happens to be the first one.
        self._task = asyncio.create_task(self._keep(), context=Context())

    async def close(self) -> None:
        self._is_over.set()
        await asyncio.wait({self._task})

    async def _keep(self) -> None:
        try:
            await self._server.connect()
            self.is_made.set_result(None)
            try:
                await self._is_over.wait()
            finally:
                await self._server.cleanup()
        except Exception as error:  # noqa: BLE001  each transport has errors of its own
            if self.is_made.done():
                why = reason_of(error)
                log.warning("MCP server %s could not be closed: %s", self._server.name, why)
                return
            self.is_made.set_exception(error)
            self.is_made.exception()  # it was seen, although all who waited may be gone
        finally:
            self.is_made.cancel()  # if the loop ends meanwhile
            del _connections[self._server]


_connections: dict[MCPServer, _Connection] = {}
