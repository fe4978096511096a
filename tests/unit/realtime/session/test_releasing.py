"""The tasks of a session, and the steps of its cleanup."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from contextvars import ContextVar, copy_context

import pytest

from capsule_tasks.realtime.session.releasing import Cleanup, OwnedTasks

colour = ContextVar[str]("colour", default="none")


class Worker:
    """Work that says how far it has come."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.is_allowed = asyncio.Event()
        self.ends: list[str] = []

    async def work(self) -> str:
        self.has_begun.set()
        try:
            await self.is_allowed.wait()
        except asyncio.CancelledError:
            self.ends.append("cancelled")
            raise
        self.ends.append("done")
        return "result"


@pytest.fixture
def reports() -> list[Exception]:
    return []


@pytest.fixture
def tasks(reports: list[Exception]) -> OwnedTasks:
    return OwnedTasks(reports.append)


async def test_the_end_cancels_all_tasks_and_waits_for_them(tasks: OwnedTasks) -> None:
    workers = [Worker() for _ in range(3)]
    for worker in workers:
        tasks.start(worker.work(), "work", None)
        await worker.has_begun.wait()
    await tasks.end(timeout_s=5)
    assert [worker.ends for worker in workers] == [["cancelled"]] * 3
    await tasks.end(timeout_s=5)  # nothing is left


async def test_a_task_that_goes_on_after_its_cancel_is_named_in_the_log(
    tasks: OwnedTasks, caplog: pytest.LogCaptureFixture
) -> None:
    has_begun, is_allowed = asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        while not is_allowed.is_set():
            has_begun.set()
            with suppress(asyncio.CancelledError):
                await is_allowed.wait()

    task = tasks.start(stubborn(), "call 1 of dig", None)
    await has_begun.wait()
    await tasks.end(timeout_s=0.01)
    assert "go on 0.01 s after their cancel: call 1 of dig" in caplog.text
    is_allowed.set()
    await task


async def test_an_error_that_nobody_awaits_is_reported(
    tasks: OwnedTasks, reports: list[Exception]
) -> None:
    async def failing() -> None:
        raise ValueError("broken")

    task = tasks.start(failing(), "work", None)
    await asyncio.wait({task})
    await asyncio.sleep(0)  # its callbacks
    assert [str(error) for error in reports] == ["broken"]


async def test_an_error_that_is_awaited_is_not_reported(
    tasks: OwnedTasks, reports: list[Exception]
) -> None:
    async def failing() -> None:
        raise ValueError("broken")

    task = await tasks.finished(failing(), "work", None)
    assert (str(task.exception()), reports) == ("broken", [])


async def test_a_cancel_of_the_caller_does_not_cut_the_work(
    tasks: OwnedTasks, reports: list[Exception]
) -> None:
    worker = Worker()

    async def failing_afterwards() -> None:
        await worker.work()
        raise ValueError("broken")

    caller = asyncio.create_task(tasks.finished(failing_afterwards(), "work", None))
    await worker.has_begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert worker.ends == []
    worker.is_allowed.set()
    while not reports:
        await asyncio.sleep(0)
    assert worker.ends == ["done"]
    assert str(reports[0]) == "broken"


async def test_each_task_has_a_copy_of_the_context(tasks: OwnedTasks) -> None:
    colour.set("red")
    context = copy_context()
    colour.set("blue")

    async def seen() -> str:
        before = colour.get()
        colour.set("green")
        return before

    for _ in range(2):
        assert (await tasks.finished(seen(), "work", context)).result() == "red"
    assert colour.get() == "blue"


# --- the cleanup ---------------------------------------------------------------------------------


async def test_all_steps_are_tried_and_only_failed_ones_are_made_again() -> None:
    made: list[str] = []
    failing = {"second": ValueError("second"), "third": ValueError("third")}

    def step(name: str) -> object:
        async def make() -> None:
            made.append(name)
            if name in failing:
                raise failing.pop(name)

        return make

    names = ("first", "second", "third", "fourth", "fifth")
    cleanup = Cleanup(**{name: step(name) for name in names})  # type: ignore[arg-type]
    cleanup.add("fourth", "third", "second", "first")
    assert str(await cleanup.run()) == "second"
    assert made == ["first", "second", "third", "fourth"]
    assert await cleanup.run() is None
    assert made[4:] == ["second", "third"]
    assert await cleanup.run() is None
    assert made[6:] == []


async def test_a_cancel_of_the_cleanup_skips_no_later_step() -> None:
    made: list[str] = []
    has_begun = asyncio.Event()

    async def waiting() -> None:
        has_begun.set()
        await asyncio.Event().wait()

    async def later() -> None:
        made.append("later")

    cleanup = Cleanup(waiting=waiting, later=later)
    cleanup.add("waiting", "later")
    running = asyncio.create_task(cleanup.run())
    await has_begun.wait()
    running.cancel()
    assert isinstance(await running, asyncio.CancelledError)
    assert made == ["later"]
