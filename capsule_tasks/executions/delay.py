"""One timer for many items that wait equally long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_EXACT_S = 0.001
"""The resolution of timers."""


class Delay(Generic[T]):
    """Calls `on_due` with the items that were added `seconds` ago and not discarded since."""

    def __init__(self, seconds: float, on_due: Callable[[list[T]], object]) -> None:
        self._seconds = seconds
        self._on_due = on_due
        self.waiting: dict[T, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: T) -> None:
        loop = asyncio.get_running_loop()
        due_at = self.waiting[item] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_at(due_at, self._on_time)

    def discard(self, item: T) -> None:
        self.waiting.pop(item, None)

    def _on_time(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time() + _EXACT_S
        due: list[T] = []
        next_at: float | None = None
        for item, due_at in self.waiting.items():
            if due_at > now:
                next_at = due_at
                break
            due.append(item)
        for item in due:
            del self.waiting[item]
        self._timer = None if next_at is None else loop.call_at(next_at, self._on_time)
        if due:
            self._on_due(due)
