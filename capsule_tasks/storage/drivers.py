"""Drivers of operations: one for asyncio, one for threads.

A class of operations is written once; each of its generators is a `Method` of its facades.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from capsule_tasks.errors import StorageError
from capsule_tasks.storage.awaiting import result_of, without_waiting
from capsule_tasks.storage.connections.targets import Location, Target
from capsule_tasks.storage.operations import Abandon, Operation, Pause, Reply, closed
from capsule_tasks.storage.scripts import Call

T = TypeVar("T")
S = TypeVar("S", "AsyncStore", "SyncStore")

ABANDON_LIMIT_S = 5.0
_RETRY_DELAY_S = 0.5
"""Between two operations while Redis is unavailable."""


class Store(Protocol):
    """Runs scripts; raises StorageError and nothing else."""

    @property
    def is_closed(self) -> bool: ...
    @property
    def location(self) -> Location: ...
    @property
    def target(self) -> Target | None: ...  # None for a client that belongs to the caller


class AsyncStore(Store, Protocol):
    """For a caller that awaits."""

    async def run(self, call: Call) -> Reply: ...
    async def close(self) -> None: ...


class SyncStore(Store, Protocol):
    """For a caller that blocks."""

    def run_blocking(self, call: Call) -> Reply: ...
    def close_blocking(self) -> None: ...


async def drive(operation: Operation[T], store: AsyncStore) -> T:
    """Carry out an operation, awaiting."""
    return await _drive(operation, store, store.run, asyncio.sleep, _abandon)


def drive_blocking(operation: Operation[T], store: SyncStore) -> T:
    """Carry out an operation, blocking the thread."""
    return without_waiting(
        _drive(operation, store, store.run_blocking, time.sleep, _abandon_blocking)
    )


async def _drive(
    operation: Operation[T],
    store: S,
    run: Callable[[Call], Any],
    pause: Callable[[float], Any],
    abandon: Callable[[Call, S], Any],
) -> T:
    if store.is_closed:  # an operation that has nothing to send would not notice
        raise closed()
    reply: Reply | None = None
    failure: BaseException | None = None
    while True:
        try:
            wanted = operation.send(reply) if failure is None else operation.throw(failure)
        except StopIteration as done:
            result: T = done.value
            return result
        reply = failure = None
        try:
            if type(wanted) is Call:
                reply = await result_of(run(wanted))
            elif type(wanted) is Pause:
                await result_of(pause(wanted.seconds))
            elif type(wanted) is Abandon:
                await result_of(abandon(wanted.call, store))
        except BaseException as error:  # noqa: BLE001  the operation decides, and raises it
            failure = error


async def retry_while_unavailable(
    ask: Callable[[], Awaitable[T]],
    outage_s: float = math.inf,
    *,
    on_fault: Callable[[StorageError], object] = lambda _: None,
) -> T:
    """Repeat an operation while Redis is unavailable; StorageError once that takes too long.

    The only loop around operations, for callers that can do nothing but wait: an operation makes
    its own attempts for some seconds, and `on_fault` is called with each failure of all of them.
    """
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    while True:
        try:
            return await ask()
        except StorageError as error:
            if loop.time() - started_at > outage_s:
                raise
            on_fault(error)
        await asyncio.sleep(_RETRY_DELAY_S)


_abandoning: set[asyncio.Task[None]] = set()


def _abandon_blocking(call: Call, store: SyncStore) -> None:
    with contextlib.suppress(StorageError):
        store.run_blocking(call)


async def _abandon(call: Call, store: AsyncStore) -> None:
    """Wait until the operation is abandoned, also if the caller is cancelled repeatedly."""

    async def abandoning() -> None:
        with contextlib.suppress(StorageError, TimeoutError):
            async with asyncio.timeout(ABANDON_LIMIT_S):
                await store.run(call)

    task = asyncio.ensure_future(abandoning())
    _abandoning.add(task)
    task.add_done_callback(_abandoning.discard)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task})
