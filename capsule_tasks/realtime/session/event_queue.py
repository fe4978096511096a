"""The events of a session between the session, which never waits, and those who iterate over it.

Control events are kept however many there are: the model is paused while they are too many. Audio
beyond a number of bytes is dropped; so are raw events, deltas of texts and updates of tools beyond
a number of events. An `events_dropped` event in their place counts them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from capsule_tasks.realtime.events import (
    RealtimeAudio,
    RealtimeEvent,
    RealtimeEventsDropped,
    RealtimeRawModelEvent,
)
from capsule_tasks.realtime.model import AudioDelta

_log = logging.getLogger(__name__)


class EventQueue:
    """Events that wait to be taken. Several may iterate over it: each event goes to one of them.

    Nothing but the event loop's thread may use it.
    """

    def __init__(self, event_limit: int, audio_limit_bytes: int) -> None:
        self._events: deque[RealtimeEvent] = deque()
        self._event_limit = event_limit
        self._audio_limit_bytes = audio_limit_bytes
        self._audio_bytes = 0
        self._has_news = asyncio.Event()
        """Set when an event was added, and by the close."""
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._holds = 0
        self._has_warned = False
        self._is_closed = False
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._events)

    # --- the session's side ----------------------------------------------------------------------

    def put(self, event: RealtimeEvent) -> None:
        """Add a control event, which is never dropped. After the close it is ignored."""
        if not self._is_closed:
            self._events.append(event)
            self._has_news.set()

    def put_audio(self, event: RealtimeAudio) -> None:
        """Add audio, or drop it if too much of it waits."""
        size = len(event.data)
        if self._audio_bytes + size > self._audio_limit_bytes:
            self._drop(audio_bytes=size)
        elif not self._is_closed:
            self._audio_bytes += size
            self.put(event)

    def put_droppable(self, event: RealtimeEvent) -> None:
        """Add an event that is for watching only, or drop it if too many events wait.

        A raw event of audio that is going to be dropped is dropped, as it has the same bytes.
        """
        if len(self._events) >= self._event_limit or (
            type(event) is RealtimeRawModelEvent
            and type(event.data) is AudioDelta
            and self._audio_bytes + len(event.data.data) > self._audio_limit_bytes
        ):
            self._drop(other_events=1)
        else:
            self.put(event)

    def _drop(self, *, audio_bytes: int = 0, other_events: int = 0) -> None:
        """Count what is dropped in an event at the end of the queue."""
        last = self._events[-1] if self._events and not self._is_closed else None
        if type(last) is RealtimeEventsDropped:
            self._events.pop()
            audio_bytes += last.audio_bytes
            other_events += last.other_events
        self.put(RealtimeEventsDropped(audio_bytes, other_events))

    def remove_audio(self, item_id: str, content_index: int) -> int:
        """Remove the waiting audio of an item, which is not to be played; how many bytes it was."""
        kept: deque[RealtimeEvent] = deque()
        removed = 0
        for event in self._events:
            if (
                type(event) is RealtimeAudio
                and event.item_id == item_id
                and event.content_index == content_index
            ):
                removed += len(event.data)
            else:
                kept.append(event)
        self._events = kept
        self._audio_bytes -= removed
        self._note_taken()
        return removed

    def close(self, error: Exception | None = None) -> None:
        """Let iterators take what waits, and end then, or raise the error. It may be repeated."""
        if not self._is_closed:
            self._is_closed = True
            self._error = error
            self._has_room.set()
            self._has_news.set()

    # --- the pause of the model ------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the model is to pause before it brings more events."""
        return len(self._events) >= self._event_limit and not (self._holds or self._is_closed)

    async def room(self) -> None:
        """Wait until those who iterate have taken half of what waits."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "Pausing a realtime model: %d events wait for those who iterate over the session",
                len(self._events),
            )
        if self.is_full:
            self._has_room.clear()
        await self._has_room.wait()

    @contextmanager
    def without_pause(self) -> Iterator[None]:
        """Let the model read meanwhile: a server that is not read may not answer, or not read."""
        self._holds += 1
        self._has_room.set()
        try:
            yield
        finally:
            self._holds -= 1

    def _note_taken(self) -> None:
        if len(self._events) <= self._event_limit // 2:
            self._has_room.set()

    # --- the consumers' side ---------------------------------------------------------------------

    def __aiter__(self) -> EventQueue:
        return self

    async def __anext__(self) -> RealtimeEvent:
        while not self._events:
            if self._is_closed:
                raise self._error or StopAsyncIteration
            self._has_news.clear()
            # All who wait are woken for an event; one of them takes it, and the others wait again.
            await self._has_news.wait()
        event = self._events.popleft()
        if type(event) is RealtimeAudio:
            self._audio_bytes -= len(event.data)
        self._note_taken()
        return event
