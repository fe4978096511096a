"""Waiting in a way that a signal may interrupt at any bytecode."""

from __future__ import annotations

import time
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable


class InterruptibleCondition:
    """Threads wait here until a predicate holds; threads that make it hold call `notify_all`.

    An exception raised from a signal handler may leave `wait` at any point, where
    `threading.Condition` would stay locked. Here each waiter has a lock of its own: one that an
    interrupted waiter leaves behind is dropped by the next `notify_all`.
    """

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: deque[LockType] = deque()

    def notify_all(self) -> None:
        """Wake all waiters; each checks its predicate again."""
        while True:
            try:
                # Not `while self._waiters`: another thread could take the last one in between.
                waiter = self._waiters.popleft()
            except IndexError:
                return
            waiter.release()

    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until `ready()`; False if the time ran out first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            lock = allocate_lock()
            lock.acquire()
            self._waiters.append(lock)
            # Checked after the lock is in the queue: a `notify_all` between a check and the
            # append would wake no thread, and this thread would sleep on.
            if ready():
                return True
            if deadline is None:
                lock.acquire()
            elif not lock.acquire(True, max(0.0, deadline - time.monotonic())):
                return ready()
