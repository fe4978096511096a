"""Threads in which `async def` tasks call functions that block, as `asyncio.to_thread` does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger("capsule_tasks.child")

_WARN_EVERY_S = 10.0


class BlockingThreads(ThreadPoolExecutor):
    """A limited number of threads; it counts those whose caller no longer waits for them.

    A thread cannot be stopped: after a timeout or a cancel the function in it goes on, and keeps
    its thread from others. Once all threads are taken, a warning says how many are lost so.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit, "capsule-blocking")
        self._limit = limit
        self._running: set[Future[Any]] = set()
        self._abandoned: set[Future[Any]] = set()
        self._warned_at = -_WARN_EVERY_S

    @property
    def abandoned(self) -> int:
        """Threads whose function runs on though its caller has gone."""
        return len(self._abandoned)

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        if len(self._running) >= self._limit:
            self._warn()
        future = super().submit(function, *args, **kwargs)
        self._running.add(future)
        future.add_done_callback(self._on_done)
        vars(future)["cancel"] = partial(self._cancel, future)
        return future

    def _cancel(self, future: Future[Any]) -> bool:
        """Called by asyncio once the coroutine that waits for the future is cancelled."""
        if Future.cancel(future):
            return True
        if not future.done():
            self._abandoned.add(future)
            if future.done():  # meanwhile
                self._abandoned.discard(future)
        return False

    def _on_done(self, future: Future[Any]) -> None:
        self._running.discard(future)
        self._abandoned.discard(future)

    def _warn(self) -> None:
        now = time.monotonic()
        if now - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = now
            log.warning(
                "all %d threads for blocking functions of coroutines are taken, so the next one "
                "waits; in %d of them the function runs on after its timeout or cancel "
                "(capsule_async_threads)",
                self._limit,
                self.abandoned,
            )
