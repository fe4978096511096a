"""Slots of a worker without a hub."""

from __future__ import annotations

import threading


class Slots:
    """Blocks who applies a job while every slot is taken; for workers without a hub."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken = 0
        self._changed = threading.Condition()

    def acquire(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._taken < self._size)
            self._taken += 1

    def release(self) -> None:
        with self._changed:
            self._taken = max(0, self._taken - 1)
            self._changed.notify()

    def grow(self, n: int) -> None:
        with self._changed:
            self._size += n
            self._changed.notify_all()

    def shrink(self, n: int) -> None:
        with self._changed:
            self._size -= n
