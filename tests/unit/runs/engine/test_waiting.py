"""Several things at once, of which nothing is left running."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from capsule_tasks.runs.engine.waiting import all_passed, is_cancelled, side_by_side


async def value(it: Any, steps: int = 1) -> Any:
    for _ in range(steps):
        await asyncio.sleep(0)
    if isinstance(it, BaseException):
        raise it
    return it


async def test_side_by_side_each_ends_whatever_becomes_of_the_others() -> None:
    error = OSError()
    found = await side_by_side([value(error), value(1, 5), value(asyncio.CancelledError())])
    assert found[:2] == [error, 1]
    assert isinstance(found[2], asyncio.CancelledError)


async def test_a_cancel_is_raised_when_all_have_ended() -> None:
    ended: list[int] = []

    async def stubborn(number: int) -> None:
        for _ in range(2):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append(number)

    task = asyncio.create_task(side_by_side([stubborn(1), stubborn(2)]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(ended) == [1, 1, 2, 2]


async def test_the_first_failure_stops_the_others_and_the_order_says_which_is_raised() -> None:
    late = asyncio.create_task(value(1, 50))
    first = asyncio.create_task(value(OSError("first")))
    second = asyncio.create_task(value(OSError("second")))
    with pytest.raises(OSError, match="first"):
        await all_passed([first, late, second])
    assert late.cancelled()


async def test_a_cancel_of_user_code_is_none_of_the_task() -> None:
    assert not is_cancelled()
