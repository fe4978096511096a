"""Events of runs on their way into the stream of an execution."""

from __future__ import annotations

import pytest

from capsule_tasks.client.runs import host
from capsule_tasks.client.runs.host import EventPublisher
from capsule_tasks.protocol.messages import RunEvent


class Stream:
    """Takes events while it has room."""

    def __init__(self) -> None:
        self.has_room = True
        self.taken: list[RunEvent] = []

    def publish(self, event: RunEvent, *, is_last: bool = False) -> bool:
        if self.has_room or is_last:
            self.taken.append(event)
        return self.has_room or is_last


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(host, "publish_run_event", stream.publish)
    return stream


def test_events_that_find_no_room_are_counted_by_the_next_one(stream: Stream) -> None:
    publish = EventPublisher()
    publish(RunEvent.of("said", "a", 1))
    stream.has_room = False
    for number in range(3):
        publish(RunEvent.of("said", "a", number))
    stream.has_room = True
    publish(RunEvent.of("said", "a", 2))
    publish(RunEvent.of("said", "a", 3))
    assert [event.dropped_events for event in stream.taken] == [0, 3, 0]


def test_the_calls_that_a_run_waits_for_are_always_told(stream: Stream) -> None:
    stream.has_room = False
    publish = EventPublisher()
    publish(RunEvent.of("said", "a", 1))
    publish(RunEvent.of("run_parked", "a", {"calls": []}))
    (parked,) = stream.taken
    assert (parked.kind, parked.dropped_events) == ("run_parked", 1)


def test_data_that_is_too_large_is_left_out_and_its_size_is_told(stream: Stream) -> None:
    publish = EventPublisher()
    publish(RunEvent.of("said", "a", "x" * 65_536))
    publish(RunEvent.of("said", "a", "x" * 65_534))
    large, small = stream.taken
    assert (large.data, large.left_out_bytes) == (None, 65_538)
    assert (small.data, small.left_out_bytes) == ("x" * 65_534, 0)
