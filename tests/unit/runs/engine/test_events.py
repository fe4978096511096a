"""The buffer between a run and its reader."""

from __future__ import annotations

import asyncio

from capsule_tasks.runs.engine.events import EventBuffer


async def test_deltas_are_dropped_once_a_slow_reader_is_behind_and_counted() -> None:
    buffer = EventBuffer(deltas_limit=2)
    for text in "abcd":
        buffer.put("text_delta", "Agent", text)
    buffer.put("item", "Agent", "abcd")
    buffer.put("usage", "Agent")
    buffer.close()
    events = [event async for event in buffer.read()]
    assert [event.data for event in events] == ["a", "b", "abcd", None]
    assert [event.dropped_events for event in events] == [0, 0, 2, 0]


async def test_a_reader_waits_for_events_of_other_threads() -> None:
    buffer = EventBuffer()
    events = buffer.read()
    first = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    await asyncio.to_thread(buffer.put, "progress", "Agent", 1)
    assert (await first).data == 1
    buffer.close()
    assert [event async for event in events] == []
