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
    RealtimeTextDelta,
    RealtimeToolUpdate,
)
from capsule_tasks.realtime.model import AudioDelta

_log = logging.getLogger(__name__)


Watched = RealtimeRawModelEvent | RealtimeTextDelta | RealtimeToolUpdate
"""Events whose content comes as a whole later, or that are for watching only."""


class _Gap:
    """The events that were dropped between two others."""

    __slots__ = ("audio_bytes", "other_events")

    def __init__(self) -> None:
        self.audio_bytes = 0
        self.other_events = 0


class EventQueue:
    """Events that wait to be taken. Several may iterate over it: each event goes to one of them.

    Nothing but the event loop's thread may use it.
    """

    def __init__(self, event_limit: int, audio_limit_bytes: int) -> None:
        self._events: deque[RealtimeEvent | _Gap] = deque()
        self._event_limit = event_limit
        self._audio_limit_bytes = audio_limit_bytes
        self._audio_bytes = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        """One for each iterator that waits for an event."""
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
        if self._is_closed:
            return
        self._events.append(event)
        if self._waiting:
            self._wake_one()

    def put_audio(self, event: RealtimeAudio) -> None:
        """Add audio, or drop it if too much of it waits."""
        size = len(event.data)
        if self._audio_bytes + size > self._audio_limit_bytes:
            self._gap().audio_bytes += size
        elif not self._is_closed:
            self._audio_bytes += size
            self.put(event)

    def put_droppable(self, event: Watched) -> None:
        """Add an event that is for watching only, or drop it if too many events wait.

        A raw event of audio that is going to be dropped is dropped, as it has the same bytes.
        """
        if len(self._events) >= self._event_limit or (
            type(event) is RealtimeRawModelEvent
            and type(event.data) is AudioDelta
            and self._audio_bytes + len(event.data.data) > self._audio_limit_bytes
        ):
            self._gap().other_events += 1
        else:
            self.put(event)

    def remove_audio(self, item_id: str, content_index: int) -> int:
        """Remove the waiting audio of an item, which is not to be played; how many bytes it was."""
        kept: deque[RealtimeEvent | _Gap] = deque()
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
        if self._is_closed:
            return
        self._is_closed = True
        self._error = error
        self._has_room.set()
        while self._waiting:
            self._wake_one()

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

    # --- the consumers' side ---------------------------------------------------------------------

    def __aiter__(self) -> EventQueue:
        return self

    async def __anext__(self) -> RealtimeEvent:
        while not self._events:
            if self._is_closed:
                raise self._error or StopAsyncIteration
            await self._wait_for_event()
        event = self._events.popleft()
        if type(event) is RealtimeAudio:
            self._audio_bytes -= len(event.data)
        elif type(event) is _Gap:
            event = RealtimeEventsDropped(event.audio_bytes, event.other_events)
        self._note_taken()
        assert isinstance(event, RealtimeEvent)
        return event

    async def _wait_for_event(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif self._events:  # it was woken for an event that another one can take
                self._wake_one()
            raise

    def _wake_one(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _note_taken(self) -> None:
        if len(self._events) <= self._event_limit // 2 and not self._has_room.is_set():
            self._has_room.set()

    # --- gaps ------------------------------------------------------------------------------------

    def _gap(self) -> _Gap:
        """The gap at the end of the queue, which is made if there is none."""
        last = self._events[-1] if self._events else None
        if type(last) is _Gap:
            return last
        gap = _Gap()
        if not self._is_closed:
            self._events.append(gap)
            self._wake_one()
        return gap
