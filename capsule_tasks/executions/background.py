"""Background tasks of an event loop, calls that wait for Redis, rare warnings, delays."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from capsule_tasks.errors import OperatorError, StorageError

log = logging.getLogger("capsule_tasks.taskpool")

T = TypeVar("T")

RETRY_DELAY_S = 1.0
"""Between two calls while Redis does not answer; each of them has retried for some seconds."""
_WARN_EVERY_S = 30.0
"""Between two warnings of the same message."""

_EXACT_S = 0.001
"""The resolution of timers."""


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

    async def call_unless_refused(
        self, ask: Callable[[], Awaitable[T]], what: str, patience_s: float = 0.0
    ) -> T:
        """Call until Redis answers; raise what only its operator can mend, after the patience.

        Such errors are StorageFull, StorageDenied and StorageUnusable. `what` waits meanwhile.
        """
        give_up_at = time.monotonic() + patience_s
        while True:
            try:
                return await ask()
            except StorageError as error:
                is_in_time = time.monotonic() + RETRY_DELAY_S < give_up_at
                if isinstance(error, OperatorError) and not is_in_time:
                    raise
                self.warn_seldom("%s waits for Redis: %s", what, error)
                await asyncio.sleep(RETRY_DELAY_S)

    def warn_unavailable(self, error: BaseException) -> None:
        """Log that Redis does not answer, or refuses what this worker writes."""
        if isinstance(error, OperatorError):
            self.warn_seldom("Redis refuses calls of this worker, which are repeated: %s", error)
        else:
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


class Delay(Generic[T]):
    """One timer for many items that wait equally long.

    Calls `on_due` with the items that were added `seconds` ago and not discarded since.
    """

    def __init__(self, seconds: float, on_due: Callable[[list[T]], object]) -> None:
        self._seconds = seconds
        self._on_due = on_due
        self.waiting: dict[T, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: T) -> None:
        loop = asyncio.get_running_loop()
        due_at = self.waiting[item] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_at(due_at, self._on_time)

    def discard(self, item: T) -> None:
        self.waiting.pop(item, None)

    def _on_time(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time() + _EXACT_S
        due: list[T] = []
        next_at: float | None = None
        for item, due_at in self.waiting.items():
            if due_at > now:
                next_at = due_at
                break
            due.append(item)
        for item in due:
            del self.waiting[item]
        self._timer = None if next_at is None else loop.call_at(next_at, self._on_time)
        if due:
            self._on_due(due)
