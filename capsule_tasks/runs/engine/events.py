"""The events of a run that is streamed in process."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

DELTAS_LIMIT = 10_000
"""Deltas that wait for a slow reader; those that come then are dropped, and counted."""


@dataclass(frozen=True)
class StreamEvent:
    """Something that happened in a run; a durable run has the same kinds with the same data.

    - `agent`: another agent's turn begins;
    - `text_delta`, `reasoning_delta`, `refusal_delta`, `arguments_delta`: a piece of a reply;
    - `attempt_discarded`: the pieces since the last item are void, as the model is asked again;
    - `item`: an item of the run that is certain, as it goes into the history;
    - `compaction`: the history was compacted, or was not; the data says what came of it;
    - `tool_started`, `guardrail`, `usage`.
    """

    kind: str
    agent: str
    data: Any = None
    dropped_events: int = 0
    """Deltas that were dropped before this event, as nobody took them in time."""


class EventBuffer:
    """Events between a run and its reader. The run never waits for the reader.

    Deltas are bounded: they only show an item early, which comes as a whole later. Other events
    are as many as the run has items.
    """

    def __init__(self, deltas_limit: int = DELTAS_LIMIT) -> None:
        self._events: deque[StreamEvent] = deque()
        self._limit = deltas_limit
        self._dropped = 0
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._lock = threading.Lock()
        self._thread = threading.get_ident()

    def put(self, kind: str, agent: str, data: Any = None) -> None:
        """Add an event; may be called in any thread, as tools are."""
        with self._lock:
            if kind.endswith("_delta") and len(self._events) >= self._limit:
                self._dropped += 1
                return
            self._events.append(StreamEvent(kind, agent, data, self._dropped))
            self._dropped = 0
        self._wake()

    def close(self) -> None:
        self._is_closed = True
        self._changed.set()

    async def read(self) -> AsyncIterator[StreamEvent]:
        """Take events until the buffer is closed and empty."""
        while True:
            while self._events:
                yield self._events.popleft()
            if self._is_closed:
                return
            self._changed.clear()
            await self._changed.wait()

    def _wake(self) -> None:
        if threading.get_ident() == self._thread:
            self._changed.set()
        else:
            self._loop.call_soon_threadsafe(self._changed.set)
