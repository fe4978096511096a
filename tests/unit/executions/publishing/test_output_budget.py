"""Output that waits in a worker for Redis: how much, and how fast it may come."""

from __future__ import annotations

import asyncio
from typing import Any

from capsule_tasks.executions.publishing.event_buffer import EventBuffer
from capsule_tasks.executions.publishing.output_budget import OutputBudget
from capsule_tasks.protocol.events import decode_event
from capsule_tasks.protocol.messages import Output, Progress, RunEvent
from capsule_tasks.settings import MIB, PublishSettings

HANG_S = 10.0


def new_budget() -> OutputBudget:
    return OutputBudget(PublishSettings(), may_drop=True)


class Writer:
    """As much of a stream writer as the budget looks at; its own execution."""

    def __init__(self, budget: OutputBudget, resumed: asyncio.Queue[Any] | None) -> None:
        self.buffer = EventBuffer(PublishSettings(), budget)
        self.execution = self
        self._resumed = resumed

    def resume_output(self) -> None:
        assert self._resumed is not None
        self._resumed.put_nowait(self)


def a_writer(budget: OutputBudget, resumed: asyncio.Queue[Any] | None = None) -> Any:
    return Writer(budget, resumed)


def taken(buffer: EventBuffer) -> list[Any]:
    said: list[Any] = []
    while buffer:
        said += [decode_event(event)[0] for event in buffer.take().events]
    return said


def output(size: int, *, raw: bool) -> Output:
    return Output(execution_id="e", stream="stdout", data="x" * size, raw=raw)


def progress(done: float) -> Progress:
    return Progress(execution_id="e", done=done)


async def test_after_a_flood_of_one_task_another_has_room_within_a_second_or_so() -> None:
    resumed: asyncio.Queue[Any] = asyncio.Queue()
    budget = new_budget()
    flooding, other = a_writer(budget, resumed), a_writer(budget, resumed)
    for _ in range(3000):
        budget.has_room(flooding, output(MIB, raw=True))
    assert not budget.has_room(other, output(2, raw=False))
    async with asyncio.timeout(HANG_S):
        assert {await resumed.get(), await resumed.get()} == {flooding, other}
    assert budget.has_room(other, output(2, raw=False))


async def test_a_descriptor_is_read_at_the_rate_though_nothing_leaves_the_worker() -> None:
    """Redis is away and its window full: it waits for the rate, and for nothing else."""
    resumed: asyncio.Queue[Any] = asyncio.Queue()
    budget = new_budget()
    writer = a_writer(budget, resumed)
    writer.buffer.add_output(output(2 * MIB, raw=True))
    assert budget.has_room(writer, output(1, raw=True))
    assert not budget.has_room(writer, output(4 * MIB, raw=True))
    async with asyncio.timeout(HANG_S):
        assert await resumed.get() is writer
    assert budget.has_room(writer, output(1, raw=True))


def test_only_the_latest_of_much_waiting_progress_is_kept() -> None:
    budget = new_budget()
    buffer = a_writer(budget).buffer
    for done in range(100_000):
        if done % 1000 == 0:
            buffer.add_output(output(10, raw=False))
        buffer.add(progress(done))
    assert len(buffer._items) < 1000
    said = taken(buffer)
    steps = [message.done for message in said if isinstance(message, Progress)]
    assert steps == sorted(steps)
    assert steps[-1] == 99_999
    assert sum(len(m.data) for m in said if isinstance(m, Output)) == 1000


def test_a_little_progress_is_published_unchanged() -> None:
    budget = new_budget()
    buffer = a_writer(budget).buffer
    for _ in range(3):
        for done in range(200):
            buffer.add(progress(done))
        assert [message.done for message in taken(buffer)] == list(range(200))


async def test_events_of_a_run_count_as_output_until_they_are_stored() -> None:
    """A run whose events Redis does not take has no credit for more, so they cannot pile up."""
    budget = new_budget()
    writer = a_writer(budget)
    event = RunEvent.of("raw_response_event", "support", {"delta": "x" * 1000})
    event.execution_id, added = "e", 0
    while budget.has_room(writer, event):
        writer.buffer.add(event)
        added += 1
    assert 500 < added < 2000
    assert writer.buffer.waiting_bytes == budget.waiting_bytes > MIB

    taken_bytes, stored = 0, []
    while writer.buffer:
        batch = writer.buffer.take()
        stored += [decode_event(each)[0] for each in batch.events]
        taken_bytes += batch.size
        writer.buffer.stored(batch.size)
    assert (len(stored), budget.waiting_bytes) == (added, 0)
    assert (stored[0].kind, stored[0].agent) == ("raw_response_event", "support")
    assert stored[0].data == {"delta": "x" * 1000}
    assert stored[0].execution_id == ""
    assert all(len(each) < len(event.json) + 80 for each in batch.events)
