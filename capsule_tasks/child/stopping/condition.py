"""Waiting in a way that a signal may interrupt at any bytecode."""

from __future__ import annotations

import time
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable


class Gate:
    """Threads wait here until a condition holds; whoever makes it hold calls `open`.

    `wait` may be left by an exception raised from a signal handler at any point: a waiter owns
    its lock alone, and one it leaves behind is dropped by the next `open`.
    """

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: deque[LockType] = deque()

    def open(self) -> None:
        """Wake everyone who waits; they look at their condition again."""
        while True:
            try:
                waiter = self._waiters.popleft()
            except IndexError:  # looked at first, another thread could take the last one
                return
            waiter.release()

    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until `ready()`; False if the time ran out first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            lock = allocate_lock()
            lock.acquire()
            self._waiters.append(lock)
            if ready():  # looked at after joining the queue, so that no wake-up is missed
                return True
            if deadline is None:
                lock.acquire()
            elif not lock.acquire(True, max(0.0, deadline - time.monotonic())):
                return ready()
