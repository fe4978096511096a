"""The queue of a session's events: its bounds, its gaps, its pauses, and those who wait at it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from capsule_tasks.realtime.events import (
    RealtimeAudio,
    RealtimeErrorEvent,
    RealtimeEvent,
    RealtimeEventsDropped,
    RealtimeInputAudioTimeout,
    RealtimeRawModelEvent,
)
from capsule_tasks.realtime.model import AudioDelta, ItemDeleted
from capsule_tasks.realtime.session.event_queue import EventQueue

EVENT_LIMIT, AUDIO_LIMIT_BYTES = 6, 20


def control(number: int) -> RealtimeEvent:
    return RealtimeInputAudioTimeout(str(number))


def raw(number: int) -> RealtimeRawModelEvent:
    return RealtimeRawModelEvent(ItemDeleted(str(number)))


def audio(size: int, item_id: str = "item") -> RealtimeAudio:
    return RealtimeAudio(bytes(size), "response", item_id, 0)


def run_until_it_waits(queue: EventQueue) -> RealtimeEvent | None:
    """The next event, or None if there is none yet. Nothing else may run meanwhile."""
    try:
        queue.__anext__().send(None)
    except StopIteration as done:
        event: RealtimeEvent = done.value
        return event
    raise AssertionError("the queue waits although it has events")


class Expected:
    """The events that a consumer gets who takes everything now."""

    def __init__(self) -> None:
        self.events: list[RealtimeEvent] = []

    def drop(self, *, audio_bytes: int = 0, others: int = 0) -> None:
        if self.events and isinstance(gap := self.events[-1], RealtimeEventsDropped):
            audio_bytes += gap.audio_bytes
            others += gap.other_events
            self.events.pop()
        self.events.append(RealtimeEventsDropped(audio_bytes, others))

    @property
    def audio_bytes(self) -> int:
        return sum(len(each.data) for each in self.events if isinstance(each, RealtimeAudio))


class QueueMachine(RuleBasedStateMachine):
    """The queue beside a list without bounds, which knows what must be dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = EventQueue(EVENT_LIMIT, AUDIO_LIMIT_BYTES)
        self.expected = Expected()
        self.count = 0

    @rule()
    def put_control(self) -> None:
        self.count += 1
        event = control(self.count)
        self.queue.put(event)
        self.expected.events.append(event)

    @rule()
    def put_raw(self) -> None:
        self.count += 1
        event = raw(self.count)
        is_kept = len(self.expected.events) < EVENT_LIMIT
        self.queue.put_droppable(event)
        if is_kept:
            self.expected.events.append(event)
        else:
            self.expected.drop(others=1)

    @rule(size=st.integers(0, 12), item_id=st.sampled_from("ab"))
    def put_audio(self, size: int, item_id: str) -> None:
        event = audio(size, item_id)
        is_kept = self.expected.audio_bytes + size <= AUDIO_LIMIT_BYTES
        self.queue.put_audio(event)
        if is_kept:
            self.expected.events.append(event)
        else:
            self.expected.drop(audio_bytes=size)

    @rule(item_id=st.sampled_from("ab"))
    def interrupt(self, item_id: str) -> None:
        of_item = [
            each
            for each in self.expected.events
            if isinstance(each, RealtimeAudio) and each.item_id == item_id
        ]
        assert self.queue.remove_audio(item_id, 0) == sum(len(each.data) for each in of_item)
        self.expected.events = [each for each in self.expected.events if each not in of_item]
        self.put_control()

    @precondition(lambda self: bool(self.expected.events))
    @rule()
    def take(self) -> None:
        assert run_until_it_waits(self.queue) == self.expected.events.pop(0)

    @invariant()
    def bounds_hold(self) -> None:
        assert len(self.queue) == len(self.expected.events)
        assert self.queue.is_full == (len(self.expected.events) >= EVENT_LIMIT)
        assert self.expected.audio_bytes <= AUDIO_LIMIT_BYTES

    def teardown(self) -> None:
        self.queue.close()
        for event in self.expected.events:
            assert run_until_it_waits(self.queue) == event
        with pytest.raises(StopAsyncIteration):
            self.queue.__anext__().send(None)


TestQueue = QueueMachine.TestCase


# --- drops ---------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 30), max_size=30))
def test_audio_that_waits_is_bounded_and_all_that_is_missing_is_counted(sizes: list[int]) -> None:
    queue = EventQueue(1_000, 100)
    for size in sizes:
        queue.put_audio(audio(size))
    queue.close()
    got = [run_until_it_waits(queue) for _ in range(len(queue))]
    kept = sum(len(each.data) for each in got if isinstance(each, RealtimeAudio))
    missing = sum(each.audio_bytes for each in got if isinstance(each, RealtimeEventsDropped))
    assert kept <= 100
    assert kept + missing == sum(sizes)


def test_a_raw_event_of_audio_that_is_dropped_is_dropped_too() -> None:
    queue = EventQueue(100, 10)
    queue.put_audio(audio(8))
    queue.put_droppable(RealtimeRawModelEvent(AudioDelta(bytes(8), "response", "item")))
    queue.put_audio(audio(8))
    run_until_it_waits(queue)
    assert run_until_it_waits(queue) == RealtimeEventsDropped(8, 1)


def test_what_comes_after_the_close_is_neither_added_nor_counted() -> None:
    queue = EventQueue(1, 10)
    queue.put_audio(audio(11))
    queue.close()
    queue.put(control(1))
    queue.put_audio(audio(11))
    queue.put_droppable(raw(1))
    assert run_until_it_waits(queue) == RealtimeEventsDropped(11, 0)
    assert len(queue) == 0


# --- pauses --------------------------------------------------------------------------------------


async def test_a_pause_ends_when_half_of_the_events_were_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = EventQueue(4, 0)
    for number in range(4):
        queue.put(control(number))
    pauses = [asyncio.create_task(queue.room()) for _ in range(2)]
    await asyncio.sleep(0)
    await anext(queue)
    await asyncio.sleep(0)
    assert not any(pause.done() for pause in pauses)
    await anext(queue)
    await asyncio.gather(*pauses)
    assert caplog.text.count("Pausing a realtime model: 4 events wait") == 1


async def test_a_pause_ends_when_a_command_waits_for_an_answer_of_the_server() -> None:
    queue = EventQueue(1, 0)
    queue.put(control(1))
    pause = asyncio.create_task(queue.room())
    await asyncio.sleep(0)
    with queue.without_pause():
        assert not queue.is_full
        await pause
    assert queue.is_full


async def test_a_pause_ends_with_the_queue() -> None:
    queue = EventQueue(1, 0)
    queue.put(control(1))
    pause = asyncio.create_task(queue.room())
    await asyncio.sleep(0)
    queue.close()
    await pause
    assert not queue.is_full


async def test_a_cancelled_pause_leaves_the_other_ones_waiting() -> None:
    queue = EventQueue(2, 0)
    for number in range(2):
        queue.put(control(number))
    first, second = (asyncio.create_task(queue.room()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not second.done()
    await anext(queue)
    await second


# --- those who wait ------------------------------------------------------------------------------


async def test_each_event_goes_to_one_of_those_who_wait() -> None:
    queue = EventQueue(10, 0)
    waiting = [asyncio.create_task(anext(queue)) for _ in range(3)]
    await asyncio.sleep(0)
    events = [control(number) for number in range(3)]
    for event in events:
        queue.put(event)
    assert await asyncio.gather(*waiting) == events


async def test_the_close_wakes_all_after_the_events_that_came_before() -> None:
    queue = EventQueue(10, 0)

    async def taken() -> list[RealtimeEvent]:
        return [event async for event in queue]

    consumers = [asyncio.create_task(taken()) for _ in range(3)]
    await asyncio.sleep(0)
    queue.put(control(1))
    queue.close()
    queue.put(control(2))
    queue.put_audio(audio(0))
    assert sorted(map(len, await asyncio.gather(*consumers))) == [0, 0, 1]


async def test_all_get_the_error_with_which_the_queue_is_closed() -> None:
    queue = EventQueue(10, 0)
    waiting = [asyncio.create_task(anext(queue)) for _ in range(2)]
    await asyncio.sleep(0)
    queue.close(error := ValueError("lost"))
    queue.close(ValueError("a later one"))
    assert await asyncio.gather(*waiting, return_exceptions=True) == [error, error]
    with pytest.raises(ValueError, match="lost"):
        await anext(queue)


async def test_a_cancelled_iterator_leaves_its_event_to_another_one() -> None:
    queue = EventQueue(10, 0)
    first, second = (asyncio.create_task(anext(queue)) for _ in range(2))
    await asyncio.sleep(0)
    queue.put(event := control(1))
    first.cancel()  # it was woken, and has not taken the event yet
    assert await second is event
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_an_iterator_that_was_cancelled_while_it_waited_is_woken_no_more() -> None:
    queue = EventQueue(10, 0)
    gone = asyncio.create_task(anext(queue))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    queue.put(event := RealtimeErrorEvent(ValueError()))
    assert await anext(queue) is event
