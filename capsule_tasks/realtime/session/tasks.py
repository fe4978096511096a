"""The tasks of a session, which end with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)

_owner: ContextVar[OwnedTasks | None] = ContextVar("_owner", default=None)
"""Whose tasks the code runs in, also in tasks that these have started."""


class OwnedTasks:
    """Tasks that end with their session."""

    def __init__(self, report: Callable[[Exception], None], end_timeout_s: float) -> None:
        """`report` gets the errors that nobody awaits."""
        self.context = copy_context()
        """Each task has a copy of this context."""
        self._report = report
        self._end_timeout_s = end_timeout_s
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T], about: str) -> asyncio.Task[T]:
        """Do this in a task, whose error becomes a report."""
        task = self._created(work, about)
        task.add_done_callback(self._report_error)
        return task

    async def finished(self, work: Coroutine[Any, Any, T], about: str) -> asyncio.Task[T]:
        """Do this in a task that the caller's cancel does not cut; the task, once it has ended."""
        task = self._created(work, about)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.add_done_callback(self._report_error)
            raise
        return task

    def are_ended_here(self) -> bool:
        """Whether the code that asks is in one of these tasks, or below, and was cancelled."""
        task = asyncio.current_task()
        return _owner.get() is self and task is not None and task.cancelling() > 0

    async def end(self) -> None:
        """Cancel all tasks, and wait until they have ended; those that do not are logged."""
        if not self._tasks:
            return
        for task in self._tasks:
            task.cancel()
        _, late = await asyncio.wait(self._tasks, timeout=self._end_timeout_s)
        if late:
            _log.warning(
                "Tasks of a closed realtime session go on %g s after their cancel: %s",
                self._end_timeout_s,
                ", ".join(sorted(task.get_name() for task in late)),
            )

    def _created(self, work: Coroutine[Any, Any, T], about: str) -> asyncio.Task[T]:
        context = self.context.copy()
        context.run(_owner.set, self)
        task = asyncio.create_task(work, name=about, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _report_error(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._report(error)
