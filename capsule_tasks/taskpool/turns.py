"""An asyncio loop that several threads may turn, one at a time.

An ordinary loop waits on the thread that runs it. This one never waits: `turn` does what there is
to do and returns, and when it is worth turning again its descriptor says, or its clock. Whichever
thread is awake anyway can do that, so that a message needs no other thread to be woken for it.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import signal
import threading
from collections.abc import Callable
from typing import Any

_MOST_ROUNDS = 100
"""Of callbacks that plan callbacks, in one turn: whoever turns has other things to do."""

PUT_OFF = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_mask: Callable[[int, Any], Any] = getattr(
    signal.pthread_sigmask, "__wrapped__", signal.pthread_sigmask
)
"""Without the enumeration that Python makes of the old mask, which takes longer than the call."""


class _Selector(selectors.DefaultSelector):
    """Looks once in a turn, and ends the turn when nothing more can be done without waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.end_turn: Callable[[], None] = lambda: None
        self.may_wait = False
        self.idle_s: float | None = None
        """How long until the loop's next timer, as it was when the turn ended."""
        self._looks = False
        self._rounds = 0

    def begin(self, *, look: bool) -> None:
        self._looks = look
        self._rounds = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.may_wait:
            return super().select(timeout)
        events: list[tuple[selectors.SelectorKey, int]] = []
        if self._looks:
            self._looks = False
            events = super().select(0)
        self._rounds += 1
        is_idle = not events and (timeout is None or timeout > 0)
        if is_idle or self._rounds > _MOST_ROUNDS:
            self.idle_s = timeout
            self.end_turn()
        return events


class TurnedLoop:
    """`asyncio_loop` is for whoever runs inside of it; the rest is for the threads that turn it."""

    def __init__(self) -> None:
        self._selector = _Selector()
        self.asyncio_loop = asyncio.SelectorEventLoop(self._selector)
        self._selector.end_turn = self.asyncio_loop.stop
        self._lock = threading.Lock()
        self._turner: int | None = None
        self.due_at = math.inf
        """When it has to be turned though its descriptor is not readable, by `time`."""

    def fileno(self) -> int:
        """Readable when there is something to do."""
        return int(self._selector.fileno())

    def time(self) -> float:
        return self.asyncio_loop.time()

    def turn(self, first: Callable[[], object] | None = None, *, look: bool = True) -> None:
        """Do all that can be done without waiting, `first` before the rest.

        Without `look` the descriptors are left for the next turn. Signals are put off until the
        end, since a handler of Celery's may take as long as it likes (a soft shutdown sleeps in
        one), and nobody else could turn the loop meanwhile.
        """
        me = threading.get_ident()
        if self._turner == me:
            return  # in a signal handler, after all
        old_mask = _mask(signal.SIG_BLOCK, PUT_OFF)
        try:
            with self._lock:
                self._turner = me
                try:
                    self._turn(first, look)
                finally:
                    self._turner = None
        finally:
            _mask(signal.SIG_SETMASK, old_mask)

    def _turn(self, first: Callable[[], object] | None, look: bool) -> None:
        loop = self.asyncio_loop
        if first is not None:
            loop.call_soon(first)
        self._selector.begin(look=look)
        loop.run_forever()
        idle_s = self._selector.idle_s
        self.due_at = math.inf if idle_s is None else loop.time() + idle_s

    def call_soon_threadsafe(self, call: Callable[[], object]) -> None:
        """Have it called in the next turn, which the descriptor asks for."""
        self.asyncio_loop.call_soon_threadsafe(call)

    def close(self) -> None:
        """Cancel what still runs, see it end, and release everything."""
        with self._lock:
            loop = self.asyncio_loop
            self._selector.may_wait = True
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(_ended(left))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
