"""Ways to await: code that also serves callers that block, and work that no cancel may cut.

The blocking classes of redis-py and the awaited ones have the same methods. A coroutine that asks
for each result by `result_of` works with both; over blocking ones it never waits, so that
`without_waiting` can run it where there is no event loop.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from types import CoroutineType
from typing import Any, TypeVar

T = TypeVar("T")


async def result_of(answer: Any) -> Any:
    """The result of a method that may be blocking, and is done then, or awaited."""
    if type(answer) is CoroutineType or inspect.isawaitable(answer):
        return await answer
    return answer


def without_waiting(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("something that blocks was awaited")


async def to_the_end(
    work: Coroutine[Any, Any, T], failed: str = "the rest of the work failed"
) -> T:
    """The result of a short piece of work that no cancel may cut; the cancel is raised after it.

    If the work fails then, the cancel has a note of that, which begins with `failed`.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled() and (lost := task.exception()):
            cancelled.add_note(f"{failed}: {lost}")
        raise cancelled
    return task.result()
