"""Code that is written once, for callers that await and for callers that block.

The blocking classes of redis-py and the awaited ones have the same methods. A coroutine that asks
for each result by `result_of` works with both; over blocking ones it never waits, so that
`without_waiting` can run it where there is no event loop.
"""

from __future__ import annotations

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
