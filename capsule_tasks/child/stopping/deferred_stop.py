"""A stop that arrives while code of this package has the main thread.

Raised there, it could leave a lock held or a frame half written. So it is deferred, and raised when
that code returns to the user code that called it. Only a wait may be left by it at any point.
"""

from __future__ import annotations

import sys
import threading
import time
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

import msgspec

Function = TypeVar("Function", bound=Callable[..., Any])

INTERRUPTIBLE: set[CodeType] = set()


def interruptible(function: Function) -> Function:
    """Mark a function of this package that holds nothing: a stop may leave it at any point."""
    INTERRUPTIBLE.add(function.__code__)
    return function


class DeferredStop(msgspec.Struct):
    """Functions that user code calls, and that may take long, end with `raise_pending`."""

    is_pending: bool = False
    main: int | None = None
    """The main thread, once the interrupter is installed."""
    raise_in: Callable[[FrameType], None] = lambda _: None
    """Raises what is due in a frame, if anything is."""

    def raise_pending(self) -> None:
        """Raise a deferred stop in the caller, if the caller is on the main thread."""
        if self.is_pending and threading.get_ident() == self.main:
            self.is_pending = False
            self.raise_in(sys._getframe(1))  # noqa: SLF001 - made for this


deferred_stop = DeferredStop()


class InterruptibleCondition(msgspec.Struct, eq=False):
    """Threads wait here until a predicate holds; threads that make it hold call `notify_all`.

    An exception raised from a signal handler may leave `wait` at any point, where
    `threading.Condition` would stay locked. Here each waiter has a lock of its own: one that an
    interrupted waiter leaves behind is dropped by the next `notify_all`.
    """

    waiters: deque[LockType] = msgspec.field(default_factory=deque)

    def notify_all(self) -> None:
        """Wake all waiters; each checks its predicate again."""
        while True:
            try:
                # Not `while self.waiters`: another thread could take the last one in between.
                waiter = self.waiters.popleft()
            except IndexError:
                return
            waiter.release()

    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until `ready()`; False if the time ran out first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            lock = allocate_lock()
            lock.acquire()
            self.waiters.append(lock)
            # Checked after the lock is in the queue: a `notify_all` between a check and the
            # append would wake no thread, and this thread would sleep on.
            if ready():
                return True
            if deadline is None:
                lock.acquire()
            elif not lock.acquire(True, max(0.0, deadline - time.monotonic())):
                return ready()
