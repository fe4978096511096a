"""Hearing of what is asked and decided, as it happens.

A signal says that there is something to look at. The store is the truth: one that was sent while
nobody listened is lost, so whoever listens lists what waits once the listening has begun.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgspec

from capsule_tasks.storage.connections.listeners import messages, messages_blocking
from capsule_tasks.storage.keys import ApprovalKeys
from capsule_tasks.storage.runs.types import Signal

_decode = msgspec.msgpack.Decoder(Signal).decode


def _signal(data: bytes) -> Signal | None:
    """None for what this release does not know: a newer one may tell more, in the same channel."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


@asynccontextmanager
async def listening(url: str, *, prefix: str = "capsule") -> AsyncIterator[AsyncIterator[Signal]]:
    """Signals from now on: what happens after the block was entered is heard.

    Raises StorageUnavailable when the connection is lost: begin again, and list what waits.
    """
    async with messages(url, ApprovalKeys(prefix).channel) as published:
        yield (signal async for data in published if (signal := _signal(data)) is not None)


@contextmanager
def listening_blocking(url: str, *, prefix: str = "capsule") -> Iterator[Iterator[Signal]]:
    """As `listening`, for callers that block."""
    with messages_blocking(url, ApprovalKeys(prefix).channel) as published:
        yield (signal for data in published if (signal := _signal(data)) is not None)
