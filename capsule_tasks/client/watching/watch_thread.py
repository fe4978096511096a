"""The thread that watches executions for blocking callers, and the watcher of each event loop.

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

from capsule_tasks.client.configuration import retention_settings
from capsule_tasks.client.redis_location import redis_of_backend, redis_url
from capsule_tasks.client.watching.watcher import ExecutionWatcher
from capsule_tasks.errors import InvalidSetting
from capsule_tasks.settings import ExecutionSettings
from capsule_tasks.system.service import ThreadService

T = TypeVar("T")

_Source = tuple[str, ExecutionSettings, str | None]
"""The Redis, settings and result backend of a watcher, which apps share if all three agree."""

_AHEAD = 256
"""Events that a blocking iterator may read ahead of its consumer."""


class _LoopThread(ThreadService):
    """Runs an event loop. At its end tasks are cancelled and watchers are closed."""

    thread_name = "capsule-watch"

    def set_up(self) -> None:
        self.loop = asyncio.new_event_loop()

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.get_loop().run_forever()

    def wake(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)


class WatchThread:
    """The thread, which starts with its first use, and the watchers of every event loop."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._thread: _LoopThread | None = None
        self._watchers: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, dict[_Source, ExecutionWatcher]
        ] = weakref.WeakKeyDictionary()
        self._closers: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, AsyncGenerator[None, None]
        ] = weakref.WeakKeyDictionary()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._thread is None:
                self._thread = _LoopThread()
                self._thread.start()
            return self._thread.loop

    def stop(self) -> None:
        """End the thread; the next use starts another."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()

    async def watcher(self, app: Any) -> ExecutionWatcher:
        """The running loop's watcher of the app's Redis, closed when the loop shuts down."""
        url = redis_url(app)
        if url is None:
            raise InvalidSetting(
                "capsule_redis_url", None, "the URL of the Redis that the streams are in"
            )
        source = url, retention_settings(app), redis_of_backend(app)
        loop = asyncio.get_running_loop()
        with self._lock:
            watchers = self._watchers.setdefault(loop, {})
            watcher = watchers.get(source)
            if watcher is None:
                watcher = watchers[source] = ExecutionWatcher(*source)
            closer = self._closers.get(loop)
            is_new = closer is None
            if closer is None:
                closer = self._closers[loop] = self._close_with_loop(loop)
        if is_new:
            await anext(closer)
        return watcher

    async def _close_with_loop(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None, None]:
        """Close the watchers of a loop. The first step registers the generator with the loop."""
        try:
            yield
        finally:
            with self._lock:
                watchers = self._watchers.pop(loop, {})
            for watcher in watchers.values():
                await watcher.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the thread's loop; cancel it if the caller is interrupted."""
        doing = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return doing.result()
        finally:
            doing.cancel()

    def iterate(self, make: Callable[[], AsyncGenerator[T, None]]) -> Iterator[T]:
        """Iterate over an asynchronous generator from a thread; leaving early closes it."""
        loop = self.loop
        found: Queue[tuple[str, Any]] = Queue()
        room = _ReadAhead(loop)

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


class _ReadAhead:
    """Bounds how far a generator reads ahead of its consumer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left = asyncio.Semaphore(_AHEAD)

    async def take(self) -> None:
        await self._left.acquire()

    def give(self) -> None:
        self._loop.call_soon_threadsafe(self._left.release)


watch_thread = WatchThread()
os.register_at_fork(after_in_child=watch_thread.reset)
