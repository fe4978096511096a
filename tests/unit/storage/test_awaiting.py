"""One coroutine for methods that block or are awaited; work that no cancel cuts."""

from __future__ import annotations

import asyncio

import pytest

from capsule_tasks.storage.awaiting import result_of, to_the_end, without_waiting


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


@pytest.mark.parametrize("error", [None, OSError("disk full")])
async def test_work_goes_to_its_end_before_a_cancel_is_raised(error: OSError | None) -> None:
    done: list[int] = []

    async def work() -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        done.append(1)
        if error is not None:
            raise error

    task = asyncio.create_task(to_the_end(work(), "not stored"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await task
    assert done == [1]
    assert getattr(cancelled.value, "__notes__", []) == (["not stored: disk full"] if error else [])
