"""The runtime: one asyncio loop inside a Celery worker, which owns every session.

Celery's hub thread is woken by everything that happens to a task anyway. So the hub thread runs the
loop itself while it is awake, and the runtime thread only stands in: where there is no hub, while
the hub is busy (connecting, shutting down, in a long callback), and for the loop's timers. With two
threads at work on every task, handing over the interpreter would cost more than the work.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import select
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from capsule_tasks.system.service import ThreadService
from capsule_tasks.taskpool.hub.shared_loop import SharedLoop
from capsule_tasks.taskpool.hub.wakeup import WakeupFd

log = logging.getLogger("capsule_tasks.taskpool")

T = TypeVar("T")

_TIMEOUT_S = 0.02
"""How long the hub may leave the loop unserved before the runtime thread stands in."""
_MAX_POLL_MS = 3_600_000.0
"""`poll` refuses what does not fit into a C int, about 25 days."""


class RuntimeThread(ThreadService):
    """The loop and its thread; `stop` cancels what still runs. `post` is for other threads."""

    thread_name = "capsule-runtime"
    stop_limit_s = 30.0

    def __init__(self) -> None:
        super().__init__()
        self._loop: SharedLoop | None = None
        self._inbox: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_woken = False
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
        self._inbox.append((call, arguments))
        self.flush()

    def post_with_batch(self, call: Callable[..., object], *arguments: Any) -> None:
        """The same, at the next `run_posts` or `post`."""
        self._inbox.append((call, arguments))

    def run_posts(self) -> None:
        """Make the calls that wait, on this thread; what they schedule on the loop runs later."""
        loop = self._loop
        if self._inbox and (self._is_woken or loop is None or not loop.call_now(self._take)):
            self.flush()

    def flush(self) -> None:
        """Wake the thread that runs the loop if calls are waiting."""
        loop = self._loop
        if self._inbox and not self._is_woken and loop is not None:
            self._is_woken = True
            try:
                loop.asyncio_loop.call_soon_threadsafe(self._take)
            except RuntimeError:
                log.debug("the runtime has stopped; %d calls are not made", len(self._inbox))

    def start_coroutine(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop; the future has its result."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop.asyncio_loop)

    def wake(self) -> None:
        self._loop = None  # nothing is posted any more
        self._wakeup.ring()

    @property
    def is_running(self) -> bool:
        return self._loop is not None

    # --- from the hub thread -------------------------------------------------------------------

    def fileno(self) -> int:
        """Readable when `run_once` has something to do."""
        assert self._loop is not None
        return self._loop.fileno()

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
        self._waits_until = (
            math.inf
        )  # an iteration that ends right now rings, whichever comes first
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

    def _take(self) -> None:
        self._is_woken = False  # before the calls: one that is posted from now on wakes again
        inbox = self._inbox
        while inbox:
            call, arguments = inbox.popleft()
            try:
                call(*arguments)
            except Exception:
                log.exception("the runtime could not do %r", call)
