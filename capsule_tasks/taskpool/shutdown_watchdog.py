"""The last resort for a worker that was asked to stop and cannot.

A Redis that accepts connections and does not answer blocks Celery's main thread for ever, and a
child that stores a result for minutes. Tasks may take as long as they need, but only while the
servers answer that store their results and acknowledgements. Unacknowledged messages are
redelivered after their visibility timeout.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from capsule_tasks.client.redis_location import redis_of_backend, redis_of_broker
from capsule_tasks.storage.connections.blocking import is_reachable
from capsule_tasks.system.service import ThreadService

log = logging.getLogger("capsule_tasks.taskpool")

EXIT_BY_FORCE = 70
"""EX_SOFTWARE."""
_LOOKS = 8
"""Checks of the servers within the limit."""
_ANSWER_TIMEOUT_S = 1.0


class ShutdownWatchdog(ThreadService):
    """Ends the process if the worker does not stop by itself. Its children notice, and end too."""

    thread_name = "capsule-watchdog"
    stop_limit_s = 1.0

    def __init__(
        self, limit_s: float, is_busy: Callable[[], bool], servers_reachable: Callable[[], bool]
    ) -> None:
        """Both functions are called on the watchdog's thread.

        `is_busy` tells whether tasks run, `servers_reachable` whether their ends can be stored and
        acknowledged.
        """
        super().__init__()
        self._limit_s = limit_s
        self._is_busy = is_busy
        self._servers_answer = servers_reachable
        self._has_warned = False
        self._ended = threading.Event()
        self._begun: SimpleQueue[None] = SimpleQueue()

    def start(self) -> None:
        """Start only if the worker has the main thread: otherwise it is part of another program."""
        if threading.current_thread() is threading.main_thread():
            super().start()

    def wake(self) -> None:
        self._ended.set()
        self._begun.put(None)

    def watch(self, ended: threading.Event) -> None:
        """The worker will set `ended` when it has stopped."""
        self._ended = ended

    def on_worker_stopped(self, **_: Any) -> None:
        """The worker has stopped, perhaps before it connected and `watch` was called."""
        self._ended.set()
        self.stop()

    def on_stopping(self, **_: Any) -> None:
        """The worker is to stop. May be called in a signal handler, and more than once."""
        self._begun.put(None)

    def run(self) -> None:
        self._begun.get()
        ended = self._ended
        late_at = time.monotonic() + self._limit_s
        while not ended.wait(max(0.0, min(self._limit_s / _LOOKS, late_at - time.monotonic()))):
            # The thread that ends tasks may be the one that hangs.
            is_busy = self._is_busy()
            if is_busy and self._can_end_tasks():
                late_at = time.monotonic() + self._limit_s
            elif time.monotonic() >= late_at:
                self._end_by_force(
                    "Redis does not answer, and tasks cannot end"
                    if is_busy
                    else "it had nothing left to do"
                )

    def _can_end_tasks(self) -> bool:
        """Whether the servers answer; an error of the check is no reason to end tasks."""
        try:
            return self._servers_answer()
        except Exception:
            if not self._has_warned:
                self._has_warned = True
                log.exception("cannot check whether the servers answer: waiting for tasks")
            return True

    def _end_by_force(self, reason: str) -> None:
        frames = sys._current_frames()  # noqa: SLF001 - documented, for purposes like this
        frame = frames.get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frame))
        log.critical(
            "the worker did not stop within %s s (%s): exiting; its main thread was at:\n%s",
            self._limit_s,
            reason,
            stack,
        )
        logging.shutdown()
        os._exit(EXIT_BY_FORCE)


def servers_reachable(app: Any) -> bool:
    """Whether the broker and the result backend answer; one that is no plain Redis counts as if."""
    urls = {redis_of_broker(app), redis_of_backend(app)}
    return all(is_reachable(url, _ANSWER_TIMEOUT_S) for url in urls if url is not None)
