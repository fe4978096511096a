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
"""Between two complaints that Redis cannot be reached."""


class Background:
    """Owns tasks: what fails in one is logged, and none outlives it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._complained_at = -_COMPLAIN_S

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def say_unavailable(self, error: BaseException) -> None:
        """Once in a while: every call of every task fails now."""
        now = time.monotonic()
        if now - self._complained_at >= _COMPLAIN_S:
            self._complained_at = now
            log.warning("what tasks say waits for Redis: %s", error)

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a part of the streams failed", exc_info=error)
