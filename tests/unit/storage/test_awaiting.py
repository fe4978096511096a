"""One coroutine for methods that block and for methods that are awaited."""

from __future__ import annotations

import asyncio

import pytest

from capsule_tasks.storage.awaiting import result_of, without_waiting


async def doubled(answer: object) -> object:
    return [await result_of(answer), await result_of(answer)]


def test_a_blocking_call_needs_no_event_loop() -> None:
    assert without_waiting(doubled(1)) == [1, 1]


async def test_the_result_of_an_awaitable_is_returned() -> None:
    assert await result_of(asyncio.sleep(0, "done")) == "done"


def test_errors_are_those_of_the_coroutine() -> None:
    async def fail() -> None:
        raise KeyError("from it")

    with pytest.raises(KeyError, match="from it"):
        without_waiting(fail())


def test_something_that_would_wait_is_refused() -> None:
    with pytest.raises(AssertionError, match="awaited"):
        without_waiting(asyncio.sleep(0))
