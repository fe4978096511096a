"""The thread that sends output which no writer has sent in time."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Protocol


class Flushable(Protocol):
    """The objects that the pump flushes: the sinks, and the outbox with its deferred frame."""

    def flush_from_pump(self) -> bool:
        """Send what waits; True if the pump should call again after its interval."""


class OutputPump:
    """Flushes its sources every few milliseconds; sleeps while it has none."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._added: SimpleQueue[Flushable] = SimpleQueue()

    def start(self) -> None:
        threading.Thread(target=self._run, name="capsule-pump", daemon=True).start()

    def add(self, source: Flushable) -> None:
        """Flush `source` now, and again for as long as it asks for that."""
        self._added.put(source)

    def _run(self) -> None:
        sources: set[Flushable] = set()
        while True:
            if not sources:
                sources.add(self._added.get())
            while not self._added.empty():
                sources.add(self._added.get())
            sources = {source for source in sources if source.flush_from_pump()}
            if sources:
                time.sleep(self._interval_s)
