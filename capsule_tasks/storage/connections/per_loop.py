"""One thing for each event loop, ended with the loop, and never shared with a fork."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable
from typing import Any, Generic, Protocol, TypeVar


class Closable(Protocol):
    async def close(self) -> None: ...


T = TypeVar("T", bound=Closable)


class PerLoop(Generic[T]):
    """One object for each event loop, made at its first use and closed with the loop."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._by_loop: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[None]]
        ] = weakref.WeakKeyDictionary()

    def of_this_loop(self) -> T | None:
        entry = self._by_loop.get(asyncio.get_running_loop())
        return entry and entry[0]

    async def make_for_this_loop(self) -> T:
        loop = asyncio.get_running_loop()
        with self._lock:
            for other in [other for other in self._by_loop if other.is_closed()]:
                del self._by_loop[other]
            thing = self._make()
            keeper = self._close_with_loop(loop, thing)
            self._by_loop[loop] = (thing, keeper)
        # The first step registers it with the loop, which closes it when it shuts down.
        await anext(keeper)
        return thing

    async def close_for_this_loop(self) -> None:
        entry = self._by_loop.get(asyncio.get_running_loop())
        if entry is not None:
            await entry[1].aclose()

    async def _close_with_loop(
        self, loop: asyncio.AbstractEventLoop, thing: T
    ) -> AsyncGenerator[None]:
        made_in = os.getpid()
        try:
            yield
        finally:
            # A fork may run on inside a copy of this loop and shut it down: not its sockets.
            if made_in == os.getpid():
                with self._lock:
                    self._by_loop.pop(loop, None)
                await thing.close()

    def leave_to_parent(self) -> list[object]:
        """Forget everything, in a fork, and return what must live on untouched.

        The sockets are the parent's, too. Closing them here would write into its TLS streams and
        take them out of the poll set that both processes share.
        """
        left: list[object] = list(self._by_loop.items())
        self._reset()
        return left


_all: weakref.WeakSet[PerLoop[Any]] = weakref.WeakSet()
_left_to_parent: list[object] = []


def _after_fork() -> None:
    for per_loop in list(_all):
        _left_to_parent.extend(per_loop.leave_to_parent())


os.register_at_fork(after_in_child=_after_fork)
