"""The event loop that the hub thread and the runtime thread share, and the calls between them.

Celery's hub thread is woken by everything that happens to a task anyway. So the hub thread runs the
loop itself while it is awake, and the runtime thread only stands in: where there is no hub, while
the hub is busy (connecting, shutting down, in a long callback), and for the loop's timers. With two
threads at work on every task, handing over the interpreter would cost more than the work.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import os
import select
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from capsule_tasks.system.descriptors import close_own, own_pipe
from capsule_tasks.system.service import DEFERRED_SIGNALS, ThreadService, set_mask

log = logging.getLogger("capsule_tasks.taskpool")

T = TypeVar("T")

_MAX_ROUNDS = 100
"""Rounds of callbacks in one iteration: the thread that runs the loop has other work, too."""
_TIMEOUT_S = 0.02
"""How long the hub may leave the loop unserved before the runtime thread stands in."""
_MAX_POLL_MS = 3_600_000.0
"""`poll` refuses what does not fit into a C int, about 25 days."""


class WakeupFd:
    """A descriptor that one thread waits on: readable from any thread's `ring` until `clear`."""

    def __init__(self) -> None:
        self._reader, self._writer = own_pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._is_closed = False
        self._closing = threading.Lock()

    def fileno(self) -> int:
        return self._reader

    def ring(self) -> None:
        if not self._is_closed:  # its number may be another descriptor's by now
            # No other wake-up is needed while the pipe is full, or once it is closed.
            with contextlib.suppress(OSError):
                os.write(self._writer, b"!")

    def clear(self) -> None:
        if not self._is_closed:
            with contextlib.suppress(OSError):  # there was no ring, or it is closed
                os.read(self._reader, 4096)

    def close(self) -> None:
        """Release the descriptors; idempotent."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                close_own(self._reader)
                close_own(self._writer)


class CallQueue:
    """Calls that wait for another thread, in order; one wake-up for all. `put` from any thread."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._wake = wake
        self.is_woken = False
        """The other thread is going to make the calls anyway."""

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, call: Callable[..., object], *arguments: Any) -> None:
        """Does not wake the other thread: `flush` does."""
        self._calls.append((call, arguments))

    def flush(self) -> None:
        """Wake the other thread if calls are waiting."""
        if self._calls and not self.is_woken:
            self.is_woken = True
            self._wake()

    def run(self) -> None:
        """Make every call that is waiting. MemoryError and exits of the worker pass through."""
        self.is_woken = False  # before the calls: one that is put from now on wakes again
        while self._calls:
            call, arguments = self._calls.popleft()
            try:
                call(*arguments)
            except Exception:
                log.exception("a call of the pool failed: %r", call)
            except BaseException:
                self.flush()  # an exit of the worker: the next run makes the rest
                raise


class Bridge(ThreadService):
    """Calls for the hub thread, which makes them when the descriptor is readable.

    Where there is no hub, `start` has a thread make them. `stop` releases the descriptors and drops
    what was put and not drained.
    """

    thread_name = "capsule-callbacks"
    stop_limit_s = None

    def __init__(self) -> None:
        super().__init__()
        self._wakeup = WakeupFd()
        self._calls = CallQueue(self._wakeup.ring)

    def fileno(self) -> int:
        """Readable when `drain` has something to do."""
        return self._wakeup.fileno()

    def put(self, call: Callable[..., object], *arguments: Any) -> None:
        """Have a call made on the hub thread; any thread."""
        self._calls.put(call, *arguments)
        self._calls.flush()

    def run_after(self, work: Callable[[], object]) -> None:
        """Do some work on the hub thread, and then the calls that it puts, without a wake-up."""
        self._calls.is_woken = True
        try:
            work()
        except BaseException:  # an exit of the worker, from a signal's handler
            self._calls.is_woken = False
            self._calls.flush()
            raise
        self._calls.run()

    def drain(self) -> None:
        """Make every call that is waiting, because the descriptor is readable."""
        self._wakeup.clear()
        self._calls.run()

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until a call waits, the time is up, or the bridge is stopped.

        A second signal may end the pool inside this call.
        """
        try:
            if not self.stopping.is_set():
                select.select([self], [], [], timeout_s)
        except OSError:
            if not self.stopping.is_set():
                raise

    def stop(self) -> None:
        super().stop()
        self._wakeup.close()

    def wake(self) -> None:
        self._wakeup.ring()

    def run(self) -> None:
        while not self.stopping.is_set():
            self.wait(None)
            self.drain()


class _Selector(selectors.DefaultSelector):
    """Polls once in an iteration, and ends it when nothing more can be done without waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.end_iteration: Callable[[], None] = lambda: None
        self.may_wait = False
        self.idle_s: float | None = None
        """The time until the loop's next timer, as it was when the iteration ended."""
        self.may_poll = False
        self.rounds = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.may_wait:
            return super().select(timeout)
        events: list[tuple[selectors.SelectorKey, int]] = []
        if self.may_poll:
            self.may_poll = False
            events = super().select(0)
        self.rounds += 1
        is_idle = not events and (timeout is None or timeout > 0)
        if is_idle or self.rounds > _MAX_ROUNDS:
            self.idle_s = timeout
            self.end_iteration()
        return events


class SharedLoop:
    """An asyncio loop that several threads may run, one at a time.

    An ordinary loop waits on the thread that runs it. This one never waits: `run_once` does what
    can be done now and returns. The loop's descriptor (or its clock, for timers) tells when to run
    it again. Whichever thread is awake anyway runs the loop, so no other thread has to be woken for
    a message. `asyncio_loop` is for code on the loop; the rest is for the threads that run it.
    """

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
            self._selector.may_poll, self._selector.rounds = True, 0
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
            if left:
                # `gather` retrieves the errors, which asyncio would otherwise log later.
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


def _nothing() -> None:
    """Only wakes the loop."""


class RuntimeThread(ThreadService):
    """The loop and its thread; `stop` cancels what still runs. `post` is for other threads."""

    thread_name = "capsule-runtime"
    stop_limit_s = 30.0

    def __init__(self) -> None:
        super().__init__()
        self._loop: SharedLoop | None = None
        self._inbox = CallQueue(self._wake_loop)
        self._is_hub_attached = False
        self._hub_iterations = 0
        self._stand_in_iteration = -1
        """The hub's iterations when it was found busy; it counts as busy until its next one."""
        self._waits_until = math.inf

    def set_up(self) -> None:
        self._loop = self._shared_loop = SharedLoop()
        self._wakeup = WakeupFd()

    def stop(self) -> None:
        super().stop()
        if self.is_hanging:
            log.warning("the runtime thread did not end within %s s", self.stop_limit_s)

    # --- from other threads --------------------------------------------------------------------

    def post(self, call: Callable[..., object], *arguments: Any) -> None:
        """Have a call made on the loop, in order; one wake-up for all that wait."""
        self._inbox.put(call, *arguments)
        self._flush()

    def post_with_batch(self, call: Callable[..., object], *arguments: Any) -> None:
        """The same, at the next `run_posts` or `post`."""
        self._inbox.put(call, *arguments)

    def run_posts(self) -> None:
        """Make the calls that wait, on this thread; what they schedule on the loop runs later."""
        inbox, loop = self._inbox, self._loop
        if inbox and (inbox.is_woken or loop is None or not loop.call_now(inbox.run)):
            self._flush()

    def _flush(self) -> None:
        """Wake the thread that runs the loop if calls are waiting."""
        if self._loop is not None:
            self._inbox.flush()

    def _wake_loop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the runtime has stopped
            self._shared_loop.asyncio_loop.call_soon_threadsafe(self._inbox.run)

    def start_coroutine(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop; the future has its result."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop.asyncio_loop)

    def wake(self) -> None:
        self._loop = None  # nothing is posted any more
        self._wakeup.ring()

    # --- from the hub thread -------------------------------------------------------------------

    def fileno(self) -> int:
        """Readable when `run_once` has something to do."""
        return self._shared_loop.fileno()

    def attach_hub(self) -> None:
        """The hub thread runs the loop from now on."""
        self._is_hub_attached = True

    def detach_hub(self) -> None:
        """The runtime thread runs the loop from now on."""
        if self._is_hub_attached:
            self._is_hub_attached = False
            self._wakeup.ring()

    def run_once(self) -> None:
        """Run what is ready on the loop."""
        loop = self._loop
        if loop is None:
            return
        self._hub_iterations += 1
        loop.run_once()
        if loop.due_at < self._waits_until:
            self._wakeup.ring()  # there is a timer that the runtime thread does not know of

    # --- the runtime thread --------------------------------------------------------------------

    def run(self) -> None:
        loop, wakeup = self._shared_loop, self._wakeup
        asyncio.set_event_loop(loop.asyncio_loop)
        poller = select.poll()
        poller.register(loop, select.POLLIN)
        poller.register(wakeup, select.POLLIN)
        try:
            while not self.stopping.is_set():
                if self._wait(loop, wakeup, poller):
                    loop.run_once()
            loop.close()
        finally:
            asyncio.set_event_loop(None)
            wakeup.close()

    def _wait(self, loop: SharedLoop, wakeup: WakeupFd, poller: select.poll) -> bool:
        """Wait until the loop has something to do; True if this thread has to run it."""
        # Infinite first: an iteration that ends right now rings, whichever comes first.
        self._waits_until = math.inf
        self._waits_until = loop.due_at
        timeout_s = self._waits_until - loop.asyncio_loop.time()
        ready = {fd for fd, _ in poller.poll(min(max(0.0, timeout_s * 1000), _MAX_POLL_MS))}
        if wakeup.fileno() in ready:
            wakeup.clear()
        if not ready:
            return True  # a timer is due
        if loop.fileno() not in ready or self.stopping.is_set():
            return False
        if not self._is_hub_attached or self._stand_in_iteration == self._hub_iterations:
            return True
        turns = self._hub_iterations
        time.sleep(_TIMEOUT_S)
        if turns != self._hub_iterations:
            return False
        self._stand_in_iteration = turns
        return True
