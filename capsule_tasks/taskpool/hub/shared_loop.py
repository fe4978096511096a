"""An asyncio loop that several threads may run, one at a time.

An ordinary loop waits on the thread that runs it. This one never waits: `run_once` does what can be
done now and returns. The loop's descriptor (or its clock, for timers) tells when to run it again.
Whichever thread is awake anyway runs the loop, so no other thread has to be woken for a message.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import signal
import threading
from collections.abc import Callable
from typing import Any

from capsule_tasks.system.threads import DEFERRED_SIGNALS, set_mask

_MAX_ROUNDS = 100
"""Rounds of callbacks in one iteration: the thread that runs the loop has other work, too."""


class _Selector(selectors.DefaultSelector):
    """Polls once in an iteration, and ends it when nothing more can be done without waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.end_iteration: Callable[[], None] = lambda: None
        self.may_wait = False
        self.idle_s: float | None = None
        """The time until the loop's next timer, as it was when the iteration ended."""
        self._may_poll = False
        self._rounds = 0

    def start_iteration(self) -> None:
        self._may_poll = True
        self._rounds = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.may_wait:
            return super().select(timeout)
        events: list[tuple[selectors.SelectorKey, int]] = []
        if self._may_poll:
            self._may_poll = False
            events = super().select(0)
        self._rounds += 1
        is_idle = not events and (timeout is None or timeout > 0)
        if is_idle or self._rounds > _MAX_ROUNDS:
            self.idle_s = timeout
            self.end_iteration()
        return events


class SharedLoop:
    """`asyncio_loop` is for code on the loop; the rest is for the threads that run it."""

    def __init__(self) -> None:
        self._selector = _Selector()
        self.asyncio_loop = asyncio.SelectorEventLoop(self._selector)
        self._selector.end_iteration = self.asyncio_loop.stop
        self._lock = threading.Lock()
        self._owner_thread: int | None = None
        self.due_at = math.inf
        """When to run the loop though its descriptor is not readable, by its own clock."""

    def fileno(self) -> int:
        """Readable when there is something to do."""
        return int(self._selector.fileno())

    def run_once(self) -> None:
        """Do all that can be done without waiting."""
        if self._owner_thread == threading.get_ident():
            return  # in a signal handler, after all
        old_mask = self._acquire()
        try:
            self._selector.start_iteration()
            self.asyncio_loop.run_forever()
            idle_s = self._selector.idle_s
            self.due_at = math.inf if idle_s is None else self.asyncio_loop.time() + idle_s
        finally:
            self._release(old_mask)

    def call_now(self, call: Callable[[], object]) -> bool:
        """Make one call as if on the loop, at a fraction of an iteration's cost.

        What the call schedules on the loop runs in the next iteration. On the thread that is
        running the loop, make no call and return False.
        """
        if self._owner_thread == threading.get_ident():
            return False
        loop: Any = self.asyncio_loop
        old_mask = self._acquire()
        timers = len(loop._scheduled)  # noqa: SLF001 - no public way
        try:
            asyncio._set_running_loop(loop)  # noqa: SLF001 - meant for loops, as this one is
            call()
        finally:
            asyncio._set_running_loop(None)  # noqa: SLF001 - meant for loops
            if loop._ready or len(loop._scheduled) != timers:  # noqa: SLF001 - as above
                loop.call_soon_threadsafe(_nothing)  # which asks for an iteration
            self._release(old_mask)
        return True

    def _acquire(self) -> Any:
        """Lock the loop for this thread, and defer signals.

        A signal handler of Celery's may take long (a soft shutdown sleeps in one), and no other
        thread could run the loop meanwhile.
        """
        old_mask = set_mask(signal.SIG_BLOCK, DEFERRED_SIGNALS)
        self._lock.acquire()
        self._owner_thread = threading.get_ident()
        return old_mask

    def _release(self, old_mask: Any) -> None:
        self._owner_thread = None
        self._lock.release()
        set_mask(signal.SIG_SETMASK, old_mask)

    def close(self) -> None:
        """Cancel what still runs, wait until it has ended, and release everything."""
        with self._lock:
            loop = self.asyncio_loop
            self._selector.may_wait = True
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(_ended(left))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


def _nothing() -> None:
    """Only wakes the loop."""


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
