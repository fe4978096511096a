"""One thread of a process that watches for those who block, and towers for those who await.

Each process has its own: after a fork the child makes new ones.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from queue import Queue
from typing import Any, TypeVar

from capsule_tasks.client.configuration import kept_settings
from capsule_tasks.client.redis_location import redis_of_backend, redis_url
from capsule_tasks.client.watching.watcher import ExecutionWatcher
from capsule_tasks.errors import InvalidSetting
from capsule_tasks.settings import ExecutionSettings
from capsule_tasks.system.service import ThreadService

T = TypeVar("T")

_Place = tuple[str, ExecutionSettings, str | None]
"""Apps that differ in any of it, be it the prefix of their keys, share no tower."""

_AHEAD = 256
"""Events that a blocking iterator may have read ahead of who takes them."""


class _Thread(ThreadService):
    """Runs a loop; in the end what runs there is cancelled, and its towers are closed."""

    thread_name = "capsule-watch"

    def set_up(self) -> None:
        self.loop = asyncio.new_event_loop()

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.get_loop().run_forever()

    def wake(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)


class _Hub:
    """The thread, from its first use on, and the towers of every loop."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._thread: _Thread | None = None
        self._towers: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, dict[_Place, ExecutionWatcher]
        ] = weakref.WeakKeyDictionary()
        self._keepers: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, AsyncGenerator[None, None]
        ] = weakref.WeakKeyDictionary()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._thread is None:
                self._thread = _Thread()
                self._thread.start()
            return self._thread.loop

    def stop(self) -> None:
        """End the thread; the next use begins another."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()

    async def tower(self, app: Any) -> ExecutionWatcher:
        """The tower of the running loop for an app's Redis; closed when the loop shuts down."""
        url = redis_url(app)
        if url is None:
            raise InvalidSetting(
                "capsule_redis_url", None, "the URL of the Redis that the streams are in"
            )
        place = url, kept_settings(app), redis_of_backend(app)
        loop = asyncio.get_running_loop()
        with self._lock:
            towers = self._towers.setdefault(loop, {})
            tower = towers.get(place)
            if tower is None:
                tower = towers[place] = ExecutionWatcher(*place)
            keeper = self._keepers.get(loop)
            is_new = keeper is None
            if keeper is None:
                keeper = self._keepers[loop] = self._kept(loop)
        if is_new:
            await anext(keeper)
        return tower

    async def _kept(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None, None]:
        """Its first step registers it with the loop, which closes it at its own end."""
        try:
            yield
        finally:
            with self._lock:
                towers = self._towers.pop(loop, {})
            for tower in towers.values():
                await tower.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it on the thread's loop and wait for it; a caller that is interrupted ends it."""
        doing = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return doing.result()
        finally:
            doing.cancel()

    def iterate(self, make: Callable[[], AsyncGenerator[T, None]]) -> Iterator[T]:
        """What an asynchronous generator yields, one after another; leaving early ends it."""
        loop = self.loop
        found: Queue[tuple[str, Any]] = Queue()
        room = _Room(loop)

        async def drive() -> None:
            generator = make()
            try:
                async for item in generator:
                    found.put(("item", item))
                    await room.take()
            except BaseException as error:
                found.put(("error", error))
                if isinstance(error, asyncio.CancelledError):
                    raise
            else:
                found.put(("end", None))
            finally:
                await generator.aclose()

        driving = asyncio.run_coroutine_threadsafe(drive(), loop)
        try:
            while True:
                kind, value = found.get()
                if kind == "end":
                    return
                if kind == "error":
                    raise value
                room.give()
                yield value
        finally:
            driving.cancel()


class _Room:
    """How far a generator may be ahead of who takes from it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left = asyncio.Semaphore(_AHEAD)

    async def take(self) -> None:
        await self._left.acquire()

    def give(self) -> None:
        self._loop.call_soon_threadsafe(self._left.release)


hub = _Hub()
os.register_at_fork(after_in_child=hub.reset)
