"""The thread that watches executions for blocking callers, and the watcher of each event loop.

Each process has its own: after a fork the child makes new ones.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import aclosing
from queue import Queue
from typing import Any, Concatenate, ParamSpec, TypeVar

from capsule_tasks.client.configuration import (
    named_session_settings,
    retention_settings,
    run_settings,
    setting,
)
from capsule_tasks.client.redis_location import needed_redis_url, redis_of_backend
from capsule_tasks.client.watching.watcher import ExecutionWatcher
from capsule_tasks.settings import ExecutionSettings, NamedSessionSettings, RunSettings
from capsule_tasks.system.service import ThreadService

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C")

_Source = tuple[str, ExecutionSettings, str | None, NamedSessionSettings, str, RunSettings]
"""The settings of a watcher: Redis, retention, result backend, how named sessions are kept, where
their checkpoints are, and how runs are kept. Apps share a watcher if all of these agree."""

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
            asyncio.AbstractEventLoop, AsyncGenerator[dict[_Source, ExecutionWatcher], None]
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
        source = (
            needed_redis_url(app),
            retention_settings(app),
            redis_of_backend(app),
            named_session_settings(app),
            setting(app, "capsule_checkpoints"),
            run_settings(app),
        )
        loop = asyncio.get_running_loop()
        with self._lock:
            if (of_loop := self._watchers.get(loop)) is None:
                of_loop = self._watchers[loop] = self._watchers_of(loop)
        watchers = await anext(of_loop)
        if source not in watchers:
            watchers[source] = ExecutionWatcher(*source)
        return watchers[source]

    async def _watchers_of(
        self, loop: asyncio.AbstractEventLoop
    ) -> AsyncGenerator[dict[_Source, ExecutionWatcher], None]:
        """Yield the watchers of a loop at each step, of which the first registers with the loop.

        A loop that shuts down closes its generators, and thereby the watchers.
        """
        watchers: dict[_Source, ExecutionWatcher] = {}
        try:
            while True:
                yield watchers
        finally:
            with self._lock:
                self._watchers.pop(loop, None)
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
        found: Queue[T | Future[None]] = Queue()
        slots = asyncio.Semaphore(_AHEAD)

        async def drive() -> None:
            async with aclosing(make()) as items:
                async for item in items:
                    found.put(item)
                    await slots.acquire()

        driving = asyncio.run_coroutine_threadsafe(drive(), loop)
        driving.add_done_callback(found.put)
        try:
            while not isinstance(item := found.get(), Future):
                loop.call_soon_threadsafe(slots.release)
                yield item
            item.result()  # raises the error that ended it
        finally:
            driving.cancel()


watch_thread = WatchThread()
os.register_at_fork(after_in_child=watch_thread.reset)


def blocking(
    method: Callable[Concatenate[C, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[C, P], T]:
    """The blocking form of an asyncio method, also where a subclass overrides that method."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
        work: Coroutine[Any, Any, T] = getattr(self, name)(*args, **kwargs)
        return watch_thread.call(work)

    return call
