"""Drivers of operations: one for asyncio, one for threads, and methods made of both.

A class of operations is written once. `awaited` and `blocking` turn each of its generators into
the method that a user calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from capsule_tasks.errors import StorageError
from capsule_tasks.storage.connections.targets import Location
from capsule_tasks.storage.operations import Abandon, Operation, Pause, Reply, closed
from capsule_tasks.storage.scripts import Call

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C")

ABANDON_LIMIT_S = 5.0
_RETRY_DELAY_S = 0.5
"""Between two operations while Redis is away."""


class AsyncStore(Protocol):
    """Whoever answers calls for a caller that awaits; raises StorageError and nothing else."""

    @property
    def is_closed(self) -> bool: ...
    @property
    def location(self) -> Location: ...
    async def run(self, call: Call) -> Reply: ...
    async def close(self) -> None: ...


class SyncStore(Protocol):
    """Whoever answers calls for a caller that blocks; raises StorageError and nothing else."""

    @property
    def is_closed(self) -> bool: ...
    @property
    def location(self) -> Location: ...
    def run_blocking(self, call: Call) -> Reply: ...
    def close_blocking(self) -> None: ...


async def drive(operation: Operation[T], store: AsyncStore) -> T:
    """Do what the operation asks for, awaiting."""
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
                reply = await store.run(wanted)
            elif type(wanted) is Pause:
                await asyncio.sleep(wanted.seconds)
            elif type(wanted) is Abandon:
                await _abandon(wanted, store)
        except BaseException as error:  # noqa: BLE001  the operation decides, and raises it
            failure = error


def drive_blocking(operation: Operation[T], store: SyncStore) -> T:
    """Do what the operation asks for, blocking the thread."""
    if store.is_closed:  # as above
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
                reply = store.run_blocking(wanted)
            elif type(wanted) is Pause:
                time.sleep(wanted.seconds)
            elif type(wanted) is Abandon:
                with contextlib.suppress(StorageError):
                    store.run_blocking(wanted.call)
        except BaseException as error:  # noqa: BLE001  the operation decides, and raises it
            failure = error


async def retry_while_unavailable(
    ask: Callable[[], Awaitable[T]],
    outage_s: float = math.inf,
    *,
    on_fault: Callable[[StorageError], object] = lambda _: None,
) -> T:
    """What Redis says, also if it is away for a while; StorageError once that is too long.

    The one loop around operations, for callers that have nothing to do but wait: an operation makes
    its own attempts, for some seconds, and `on_fault` hears of each one that failed.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while True:
        try:
            return await ask()
        except StorageError as error:
            if loop.time() - begun > outage_s:
                raise
            on_fault(error)
        await asyncio.sleep(_RETRY_DELAY_S)


_abandoning: set[asyncio.Task[None]] = set()


async def _abandon(abandon: Abandon, store: AsyncStore) -> None:
    """Wait for the settling, also while the caller is cancelled over and over."""

    async def abandoning() -> None:
        with contextlib.suppress(StorageError, TimeoutError):
            async with asyncio.timeout(ABANDON_LIMIT_S):
                await store.run(abandon.call)

    task = asyncio.ensure_future(abandoning())
    _abandoning.add(task)
    task.add_done_callback(_abandoning.discard)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task})


def async_method(
    method: Callable[Concatenate[C, P], Operation[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The method of an asynchronous face that runs this operation of its core."""

    @functools.wraps(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await drive(method(self.core, *args, **kwargs), self.store)

    return call


def sync_method(
    method: Callable[Concatenate[C, P], Operation[T]],
) -> Callable[Concatenate[Any, P], T]:
    """The method of a blocking face that runs this operation of its core."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return drive_blocking(method(self.core, *args, **kwargs), self.store)

    return call
