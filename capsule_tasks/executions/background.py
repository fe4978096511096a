"""Background tasks of an event loop, calls that wait for Redis, and rate-limited warnings."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from capsule_tasks.errors import StorageError

log = logging.getLogger("capsule_tasks.taskpool")

T = TypeVar("T")

RETRY_DELAY_S = 1.0
"""Between two calls while Redis does not answer; each of them has retried for some seconds."""
_WARN_EVERY_S = 30.0
"""Between two warnings of the same message."""


class BackgroundTasks:
    """Owns asyncio tasks: a failure in one is logged, and none outlives `stop`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_stopped = False
        self._warned_at: dict[str, float] = {}

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run the coroutine until `stop`; after that nothing is started."""
        if self._is_stopped:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)

    async def stop(self) -> None:
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def call_until_answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Call until Redis answers, and return the answer."""
        while True:
            try:
                return await ask()
            except StorageError as error:
                self.warn_unavailable(error)
                await asyncio.sleep(RETRY_DELAY_S)

    def warn_unavailable(self, error: BaseException) -> None:
        """Log that Redis does not answer."""
        self.warn_seldom("Redis is unavailable; buffering task events: %s", error)

    def warn_seldom(self, message: str, *arguments: object) -> None:
        """Log a warning, at most every 30 seconds for the same message."""
        now = time.monotonic()
        if now - self._warned_at.get(message, -_WARN_EVERY_S) >= _WARN_EVERY_S:
            self._warned_at[message] = now
            log.warning(message, *arguments)

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work of the executions failed", exc_info=error)
