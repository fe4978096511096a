"""Calls from the runtime to the hub thread, in order; one wake-up for all that wait."""

from __future__ import annotations

import logging
import select
from collections import deque
from collections.abc import Callable
from typing import Any

from capsule_tasks.system.service import ThreadService
from capsule_tasks.taskpool.hub.wakeup import WakeupFd

log = logging.getLogger("capsule_tasks.taskpool")

Call = Callable[[], object]


class Bridge(ThreadService):
    """Calls that are waiting for the hub thread, and a descriptor that is readable when some are.

    `put` may be called from any thread. The calls are made by `drain`, which the hub calls when
    the descriptor is readable. Where there is no hub, `start` has a thread do that. `stop` releases
    the descriptors and drops what was put and not drained.
    """

    thread_name = "capsule-callbacks"
    stop_limit_s = None

    def __init__(self) -> None:
        super().__init__()
        self._calls: deque[Call] = deque()
        self._is_woken = False
        self._wakeup = WakeupFd()
        self.suppresses_wakeup = False
        """Set by the hub thread while it runs the loop: it makes the calls afterwards anyway."""

    def put(self, call: Call) -> None:
        self._calls.append(call)
        self.flush()

    def flush(self) -> None:
        """Wake the hub thread if calls are waiting."""
        if self._calls and not self._is_woken and not self.suppresses_wakeup:
            self._is_woken = True
            self._wakeup.ring()

    def register(self, hub: Any) -> None:
        """Have the hub drain; again after each reconnect, when the hub has dropped its readers."""
        hub.add_reader(self._wakeup, self.drain)

    def unregister(self, hub: Any) -> None:
        hub.remove_reader(self._wakeup)

    def drain(self) -> None:
        """Make every call that is waiting, because the descriptor is readable."""
        self._wakeup.clear()
        self._is_woken = False  # before the calls: one that is put from now on wakes again
        self.run_calls()

    def run_calls(self) -> None:
        """Make every call that is waiting. MemoryError and exits of the worker pass through."""
        calls = self._calls
        while calls:
            call = calls.popleft()
            try:
                call()
            except Exception:
                log.exception("a callback of the pool failed: %r", call)
            except BaseException:
                if calls:  # an exit of the worker: the next drain makes the rest
                    self._wakeup.ring()
                raise

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until a call waits, the time is up, or the bridge is stopped.

        A second signal may end the pool inside this call.
        """
        try:
            if not self.stopping.is_set():
                select.select([self._wakeup], [], [], timeout_s)
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
            select.select([self._wakeup], [], [])
            self.drain()
