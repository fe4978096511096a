"""What a session has to release, and how: its tasks, and the steps of its cleanup."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)

_owner: ContextVar[OwnedTasks | None] = ContextVar("_owner", default=None)
"""Whose tasks the code runs in, also in tasks that these have started."""


class OwnedTasks:
    """Tasks that end with their session."""

    def __init__(self, report: Callable[[Exception], None]) -> None:
        """`report` gets the errors that nobody awaits."""
        self._report = report
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(
        self, work: Coroutine[Any, Any, T], about: str, context: Context | None
    ) -> asyncio.Task[T]:
        """Do this in a task with a copy of a context; its error becomes a report."""
        task = self._created(work, about, context)
        task.add_done_callback(self._report_error)
        return task

    async def finished(
        self, work: Coroutine[Any, Any, T], about: str, context: Context | None
    ) -> asyncio.Task[T]:
        """Do this in a task that the caller's cancel does not cut; the task, once it has ended."""
        task = self._created(work, about, context)
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

    async def end(self, timeout_s: float) -> None:
        """Cancel all tasks, and wait until they have ended; those that do not are logged."""
        if not self._tasks:
            return
        for task in self._tasks:
            task.cancel()
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        if late:
            names = ", ".join(sorted(task.get_name() for task in late))
            _log.warning(
                "Tasks of a closed realtime session go on %g s after their cancel: %s",
                timeout_s,
                names,
            )

    def _created(
        self, work: Coroutine[Any, Any, T], about: str, context: Context | None
    ) -> asyncio.Task[T]:
        own = copy_context() if context is None else context.copy()
        own.run(_owner.set, self)
        task = asyncio.create_task(work, name=about, context=own)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _report_error(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._report(error)


class Cleanup:
    """Steps of which each is made until it has succeeded once, in their order."""

    def __init__(self, **steps: Callable[[], Awaitable[None]]) -> None:
        self._steps = steps
        self._left: set[str] = set()

    def add(self, *names: str) -> None:
        """From now on, these steps are to be made."""
        self._left.update(names)

    async def run(self) -> BaseException | None:
        """Make all steps that are left, whatever becomes of each; the first error of them."""
        first: BaseException | None = None
        for name, step in self._steps.items():
            if name in self._left:
                try:
                    await step()
                except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
                    # A cancel can only be that of an event loop which ends.
                    first = first or error
                else:
                    self._left.discard(name)
        return first
