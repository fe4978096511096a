"""Messages of one channel, from the moment on at which the server has confirmed it.

A lost connection is not opened again here: that would hide the messages that were missed.
Every block raises StorageUnavailable, or another StorageError, when its connection is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.connection import Connection as SyncConnection

from capsule_tasks.settings import ConnectionSettings
from capsule_tasks.storage.connections import targets
from capsule_tasks.storage.connections.endpoints import AsyncEndpoint, SyncEndpoint
from capsule_tasks.storage.connections.faults import FAULTS, storage_errors


@asynccontextmanager
async def messages(url: str, channel: str) -> AsyncIterator[AsyncIterator[bytes]]:
    """Listen to a channel while the block lasts."""
    endpoint = AsyncEndpoint(targets.parsed(url, ConnectionSettings()))
    connection: AbstractConnection | None = None
    try:
        with storage_errors(was_sent=False):
            connection = await endpoint.open_connection()
            await connection.send_command("SUBSCRIBE", channel, check_health=False)
            await connection.read_response(disable_decoding=True)
        yield _messages(connection)
    finally:
        if connection is not None:
            with contextlib.suppress(*FAULTS):
                await connection.disconnect()
        await endpoint.close()


@contextmanager
def messages_blocking(url: str, channel: str) -> Iterator[Iterator[bytes]]:
    """As `messages`, for callers that block."""
    endpoint = SyncEndpoint(targets.parsed(url, ConnectionSettings()).for_listening())
    connection: SyncConnection | None = None
    try:
        with storage_errors(was_sent=False):
            connection = endpoint.open_connection()
            connection.send_command("SUBSCRIBE", channel, check_health=False)
            connection.read_response(disable_decoding=True)
        yield _messages_blocking(connection)
    finally:
        if connection is not None:
            connection.disconnect()
        endpoint.close()


async def _messages(connection: AbstractConnection) -> AsyncIterator[bytes]:
    while True:
        with storage_errors(was_sent=False):
            answer = await connection.read_response(disable_decoding=True)
        if (data := _data(answer)) is not None:
            yield data


def _messages_blocking(connection: SyncConnection) -> Iterator[bytes]:
    while True:
        with storage_errors(was_sent=False):
            answer = connection.read_response(disable_decoding=True)
        if (data := _data(answer)) is not None:
            yield data


def _data(answer: Any) -> bytes | None:
    return answer[2] if isinstance(answer, list) and answer[0] == b"message" else None
