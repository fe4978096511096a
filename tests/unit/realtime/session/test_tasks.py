"""The tasks of a session, which end with it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from contextvars import ContextVar, copy_context

import pytest

from capsule_tasks.realtime.session.tasks import OwnedTasks

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
    return OwnedTasks(reports.append, end_timeout_s=5)


async def test_the_end_cancels_all_tasks_and_waits_for_them(tasks: OwnedTasks) -> None:
    workers = [Worker() for _ in range(3)]
    for worker in workers:
        tasks.start(worker.work(), "work")
        await worker.has_begun.wait()
    await tasks.end()
    assert [worker.ends for worker in workers] == [["cancelled"]] * 3
    await tasks.end()  # nothing is left


async def test_a_task_that_goes_on_after_its_cancel_is_named_in_the_log(
    reports: list[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    tasks = OwnedTasks(reports.append, end_timeout_s=0.01)
    has_begun, is_allowed = asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        while not is_allowed.is_set():
            has_begun.set()
            with suppress(asyncio.CancelledError):
                await is_allowed.wait()

    task = tasks.start(stubborn(), "call 1 of dig")
    await has_begun.wait()
    await tasks.end()
    assert "go on 0.01 s after their cancel: call 1 of dig" in caplog.text
    is_allowed.set()
    await task


async def test_an_error_that_nobody_awaits_is_reported(
    tasks: OwnedTasks, reports: list[Exception]
) -> None:
    async def failing() -> None:
        raise ValueError("broken")

    task = tasks.start(failing(), "work")
    await asyncio.wait({task})
    await asyncio.sleep(0)  # its callbacks
    assert [str(error) for error in reports] == ["broken"]


async def test_an_error_that_is_awaited_is_not_reported(
    tasks: OwnedTasks, reports: list[Exception]
) -> None:
    async def failing() -> None:
        raise ValueError("broken")

    task = await tasks.finished(failing(), "work")
    assert (str(task.exception()), reports) == ("broken", [])


async def test_a_cancel_of_the_caller_does_not_cut_the_work(
    tasks: OwnedTasks, reports: list[Exception]
) -> None:
    worker = Worker()

    async def failing_afterwards() -> None:
        await worker.work()
        raise ValueError("broken")

    caller = asyncio.create_task(tasks.finished(failing_afterwards(), "work"))
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
    tasks.context = copy_context()
    colour.set("blue")

    async def seen() -> str:
        before = colour.get()
        colour.set("green")
        return before

    for _ in range(2):
        assert (await tasks.finished(seen(), "work")).result() == "red"
    assert colour.get() == "blue"
