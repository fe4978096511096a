"""Cancels one task of a program at one of its awaits, wherever in the libraries that is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any


class CancelAt:
    """Cancels the first task whose name begins with `name` when it waits for the `at`-th time.

    With `anybody`, the waits of all tasks count.
    """

    def __init__(self, name: str, at: int, *, anybody: bool = False) -> None:
        self.has_cancelled = False
        self._name = name
        self._at = at
        self._anybody = anybody
        self._count = 0
        self._task: asyncio.Task[Any] | None = None

    def waits(self, task: asyncio.Task[Any]) -> None:
        if self._task is None and task.get_name().startswith(self._name):
            self._task = task
        if self._task is None or not (self._anybody or task is self._task):
            return
        self._count += 1
        if self._count == self._at and not self._task.done():
            self.has_cancelled = True
            self._task.cancel()  # a task that runs is cancelled as soon as it waits


@contextmanager
def cancelling(plan: CancelAt) -> Iterator[None]:
    """Carry the plan out for tasks that are created within the block."""
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()

    def make(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Future[Any]:
        return asyncio.Task(_Stepped(work, plan), loop=loop, **options)

    loop.set_task_factory(make)
    try:
        yield
    finally:
        loop.set_task_factory(before)


class _Stepped(Coroutine[Any, Any, Any]):
    """The work of a task, which tells the plan whenever it waits."""

    def __init__(self, work: Coroutine[Any, Any, Any], plan: CancelAt) -> None:
        self._work = work
        self._plan = plan

    def send(self, value: Any) -> Any:
        return self._noted(self._work.send(value))

    def throw(self, *error: Any) -> Any:
        return self._noted(self._work.throw(*error))

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._work.__await__()

    def _noted(self, waits_for: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self._plan.waits(task)
        return waits_for
