"""Awaiting several things at once, so that nothing is left running."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def side_by_side(works: Sequence[Coroutine[Any, Any, T]]) -> list[T | BaseException]:
    """The results or errors of all, in order, once each of them has ended.

    A cancel is passed on to each of them, as often as it comes; it is raised when all have ended.
    """
    tasks = [asyncio.create_task(work) for work in works]
    await ended(tasks)
    return [_outcome(task) for task in tasks]


async def all_passed(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until all tasks have succeeded, or until one fails: the others are cancelled, and end.

    Of several errors, that of the task that comes first in the order is raised.
    """
    waiting = set(tasks)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(task.cancelled() or task.exception() for task in done):
                break
    finally:
        for task in waiting:
            task.cancel()
        await ended(waiting)
    failed = [task for task in tasks if not task.cancelled() and task.exception()]
    for task in failed or tasks:
        task.result()


async def ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Wait until these tasks have ended, however they end."""
    waiting = {task for task in tasks if not task.done()}
    cancelled: asyncio.CancelledError | None = None
    while waiting:
        try:
            _, waiting = await asyncio.wait(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
            waiting = {task for task in waiting if not task.done()}
            for task in waiting:
                task.cancel()
    if cancelled is not None:
        raise cancelled


def is_cancelled() -> bool:
    """Whether somebody cancels the running task; else a CancelledError comes from user code."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def is_ended_by(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Whether this error ends the code in `task` from outside; else user code has raised it.

    A coroutine that is closed, as at the end of an event loop, gets a GeneratorExit while its task
    does not run.
    """
    if isinstance(error, GeneratorExit):
        try:
            return asyncio.current_task() is not task
        except RuntimeError:  # no event loop runs
            return True
    return isinstance(error, asyncio.CancelledError) and is_cancelled()


def _outcome(task: asyncio.Task[T]) -> T | BaseException:
    if task.cancelled():
        return asyncio.CancelledError()
    return task.exception() or task.result()
