"""Messages of one channel, from the moment on at which the server has confirmed it.

A lost connection is not opened again here: that would hide the messages that were missed.
Every block raises StorageUnavailable, or another StorageError, when its connection is lost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from capsule_tasks.settings import ConnectionSettings
from capsule_tasks.storage.awaiting import result_of, without_waiting
from capsule_tasks.storage.connections import targets
from capsule_tasks.storage.connections.endpoints import AsyncEndpoint, SyncEndpoint
from capsule_tasks.storage.connections.faults import FAULTS, storage_errors


@asynccontextmanager
async def messages(url: str, channel: str) -> AsyncIterator[AsyncIterator[bytes]]:
    """Listen to a channel while the block lasts."""
    endpoint = AsyncEndpoint(targets.parsed(url, ConnectionSettings()))
    async with _subscribed(endpoint, channel) as connection:
        yield _messages(connection)


@contextmanager
def messages_blocking(url: str, channel: str) -> Iterator[Iterator[bytes]]:
    """As `messages`, for callers that block."""
    # Without a time limit for replies: a listener may receive nothing for long.
    endpoint = SyncEndpoint(targets.parsed(url, ConnectionSettings()), socket_timeout=None)
    subscription = _subscribed(endpoint, channel)
    connection = without_waiting(subscription.__aenter__())
    try:
        yield _messages_blocking(connection)
    finally:
        without_waiting(subscription.__aexit__(None, None, None))


@asynccontextmanager
async def _subscribed(endpoint: AsyncEndpoint | SyncEndpoint, channel: str) -> AsyncIterator[Any]:
    connection: Any = None
    try:
        with storage_errors(was_sent=False):
            connection = await endpoint.open_connection()
            await result_of(connection.send_command("SUBSCRIBE", channel, check_health=False))
            await result_of(connection.read_response(disable_decoding=True))
        yield connection
    finally:
        if connection is not None:
            with suppress(*FAULTS):
                await result_of(connection.disconnect())
        await endpoint.close()


async def _messages(connection: Any) -> AsyncIterator[bytes]:
    while True:
        yield await _next_message(connection)


def _messages_blocking(connection: Any) -> Iterator[bytes]:
    while True:
        yield without_waiting(_next_message(connection))


async def _next_message(connection: Any) -> bytes:
    while True:
        with storage_errors(was_sent=False):
            answer = await result_of(connection.read_response(disable_decoding=True))
        if isinstance(answer, list) and answer[0] == b"message":
            message: bytes = answer[2]
            return message
