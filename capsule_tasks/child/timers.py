"""Timers of the control thread."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable


class Timers:
    """Calls to make at given times, all by one thread."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time.monotonic() + delay_s, next(self._order), call))

    def run_due(self) -> float | None:
        """Make the calls that are due; when the next one is due, or None."""
        while self._heap and self._heap[0][0] <= time.monotonic():
            heapq.heappop(self._heap)[2]()
        return self._heap[0][0] if self._heap else None
