"""What runs beside the jobs, for as long as the streams do."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger("capsule_tasks.taskpool")

AGAIN_S = 1.0
"""Between two tries while Redis does not answer; each of them has tried for some seconds."""
_COMPLAIN_S = 30.0
"""Between two warnings of the same."""


class Background:
    """Owns tasks: what fails in one is logged, and none outlives it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._warned_at: dict[str, float] = {}

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def say_unavailable(self, error: BaseException) -> None:
        """Every call of every task fails now."""
        self.warn_seldom("what tasks say waits for Redis: %s", error)

    def warn_seldom(self, message: str, *arguments: object) -> None:
        """Once in a while, of what happens all the time."""
        now = time.monotonic()
        if now - self._warned_at.get(message, -_COMPLAIN_S) >= _COMPLAIN_S:
            self._warned_at[message] = now
            log.warning(message, *arguments)

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a part of the streams failed", exc_info=error)
