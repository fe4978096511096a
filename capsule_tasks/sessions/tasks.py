"""The asyncio tasks of a session or of a pool."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from capsule_tasks.errors import SessionLost

log = logging.getLogger("capsule_tasks.sessions")

T = TypeVar("T")


class SessionTasks:
    """The asyncio tasks that work on the children of an owner. Failures are logged."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, which runs to its end even if the caller is cancelled."""
        task = self.spawn(work)
        await asyncio.wait({task})
        return task.result()

    async def end(self, timeout_s: float | None = None) -> None:
        """Wait for all tasks, and those that they start; cancel those that are late."""
        late: set[asyncio.Task[Any]] = set()
        while self._tasks and not late:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in late:
                task.cancel()

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and not isinstance(task.exception(), SessionLost | None):
            log.error("%s: %r failed", self._owner, task, exc_info=task.exception())


async def shielded(work: Awaitable[T]) -> T:
    """Finish `work` before a cancellation of the caller is raised."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait({task})
        raise
