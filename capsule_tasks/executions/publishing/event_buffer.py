"""Events of one execution that wait for Redis, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from capsule_tasks.executions.ends import LastEvent
from capsule_tasks.executions.publishing.output_budget import OutputBudget, size_of
from capsule_tasks.protocol.events import Accepted, EventMessage, encode_event
from capsule_tasks.protocol.flow import utf8_size
from capsule_tasks.protocol.messages import Gap, Output, Progress, RunEvent, Stream
from capsule_tasks.settings import PublishSettings

_MAX_STEPS = 256
"""Progress events that may wait; beyond that only the latest is kept."""


class _Text(msgspec.Struct):
    """Output that waits; more output of the same stream is added to it."""

    stream: Stream
    parts: list[str] = []
    size: int = 0


class _Piece(Output, kw_only=True, tag="output"):
    """Output as it is stored: without the id, which would repeat the key."""

    id: str = ""
    timestamp: float = 0.0


class _StoredRunEvent(RunEvent, kw_only=True, tag="run_event"):
    """An event of a run as it is stored: without ids."""

    id: str = ""
    timestamp: float = 0.0


class EventBatch(msgspec.Struct):
    """Events that go in one call; kept until the call is answered."""

    events: list[bytes] = []
    size: int = 0
    """Bytes of output, and of events of runs, in them."""
    has_stream_content: bool = False
    """Whether there is anything but claims, starts and ends among them."""
    ending: LastEvent | None = None
    """The last event, if it is among them."""
    is_claim: bool = False


class EventBuffer:
    """One execution's buffer; where output may be lost, the oldest gives way, and is counted."""

    def __init__(self, settings: PublishSettings, budget: OutputBudget) -> None:
        self.offset = 0
        """Bytes of output, dropped ones included, before the next batch."""
        self.waiting_bytes = 0
        """Bytes of output that are not stored yet, including those on their way."""
        self._settings = settings
        self._budget = budget
        self._items: deque[_Text | EventMessage] = deque()
        self._steps = 0
        """Progress events that wait."""
        self._dropped: dict[Stream, tuple[int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._items)

    def add(self, event: EventMessage) -> None:
        if isinstance(event, Progress):
            self._steps += 1
            if self._steps > _MAX_STEPS:
                self._merge_progress()
        elif isinstance(event, RunEvent):
            self._account(size_of(event))
        self._items.append(event)

    def add_output(self, output: Output) -> None:
        size = utf8_size(output.data)
        self._account(size)
        self._add_text(output.stream, (output.data,), size)
        if output.raw and self._budget.may_drop:
            self._drop_beyond(2 * self._settings.window_bytes)

    def take(self) -> EventBatch:
        """Take the next events, encoded as they are stored."""
        batch = EventBatch()
        events = batch.events
        for stream, (lost_bytes, lost) in self._dropped.items():
            self._encode(Gap(stream=stream, lost_bytes=lost_bytes, lost_messages=lost), events)
        self._dropped.clear()
        while self._items and len(events) < self._settings.batch_max:
            item = self._items.popleft()
            batch.has_stream_content = batch.has_stream_content or not isinstance(item, Accepted)
            self._steps -= isinstance(item, Progress)
            if isinstance(item, RunEvent):
                batch.size += size_of(item)
            if isinstance(item, _Text):
                batch.size += item.size
                self._encode_text(item, events)
            else:
                self._encode(item, events)
        return batch

    def stored(self, size: int) -> None:
        """That many bytes of output are stored."""
        self._account(-size)

    def clear(self) -> None:
        """Discard events that were never sent."""
        self._items.clear()
        self._steps = 0
        self._dropped.clear()
        self._account(-self.waiting_bytes)

    def _add_text(self, stream: Stream, parts: Iterable[str], size: int) -> None:
        last = self._items[-1] if self._items else None
        max_bytes = self._settings.event_bytes_max
        if not isinstance(last, _Text) or last.stream != stream or last.size + size > max_bytes:
            last = _Text(stream)
            self._items.append(last)
        last.parts.extend(parts)
        last.size += size

    def _merge_progress(self) -> None:
        """Drop all progress events that wait: a newer one follows."""
        items, self._items, self._steps = self._items, deque(), 1
        for item in items:
            if isinstance(item, _Text):
                self._add_text(item.stream, item.parts, item.size)
            elif not isinstance(item, Progress):
                self._items.append(item)

    def _encode(self, event: EventMessage, events: list[bytes]) -> None:
        if isinstance(event, Gap):
            self.offset += event.lost_bytes
        elif isinstance(event, RunEvent):
            event = _stored(event)
        events.append(encode_event(event, self.offset))

    def _encode_text(self, text: _Text, events: list[bytes]) -> None:
        for data in _pieces("".join(text.parts), text.size, self._settings.event_bytes_max):
            events.append(encode_event(_Piece(stream=text.stream, data=data), self.offset))
            self.offset += utf8_size(data)

    def _drop_beyond(self, max_bytes: int) -> None:
        """Drop and count the oldest output: a descriptor has no credit to withhold."""
        if self.waiting_bytes <= max_bytes:
            return
        kept: deque[_Text | EventMessage] = deque()
        while self._items and self.waiting_bytes > max_bytes // 2:
            item = self._items.popleft()
            if isinstance(item, _Text):
                lost_bytes, lost = self._dropped.get(item.stream, (0, 0))
                self._dropped[item.stream] = (lost_bytes + item.size, lost + 1)
                self._account(-item.size)
            else:
                kept.append(item)
        self._items.extendleft(reversed(kept))

    def _account(self, size: int) -> None:
        self.waiting_bytes += size
        self._budget.waiting_bytes += size


def _stored(event: RunEvent) -> RunEvent:
    return _StoredRunEvent(
        kind=event.kind,
        agent=event.agent,
        json=event.json,
        left_out_bytes=event.left_out_bytes,
        dropped_events=event.dropped_events,
    )


def _pieces(text: str, size: int, max_bytes: int) -> list[str]:
    """The text in parts of at most `max_bytes` bytes."""
    if size <= max_bytes:
        return [text]
    step = max_bytes if size == len(text) else max(1, max_bytes // 4)
    return [text[first : first + step] for first in range(0, len(text), step)]
