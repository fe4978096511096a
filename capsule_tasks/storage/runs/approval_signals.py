"""Signals of approval requests and decisions.

A signal is a hint to read the store. Signals are lost while a process does not listen: read the
pending approvals once listening has started.
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
    """None for signals that this release does not know: newer ones may add kinds."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


@asynccontextmanager
async def listening(url: str, *, prefix: str = "capsule") -> AsyncIterator[AsyncIterator[Signal]]:
    """Signals from the moment on at which the block is entered.

    Raises StorageUnavailable if the connection is lost: listen again, and read what is pending.
    """
    async with messages(url, ApprovalKeys(prefix).channel) as published:
        yield (signal async for data in published if (signal := _signal(data)) is not None)


@contextmanager
def listening_blocking(url: str, *, prefix: str = "capsule") -> Iterator[Iterator[Signal]]:
    """As `listening`, for callers that block."""
    with messages_blocking(url, ApprovalKeys(prefix).channel) as published:
        yield (signal for data in published if (signal := _signal(data)) is not None)
