"""The last resort: a worker that was told to leave, has nothing left to do, and does not leave.

A Redis that accepts and says nothing holds Celery's main thread for as long as its sockets wait,
which is for ever. What a worker held then comes back when its visibility timeout is over.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from capsule_tasks.taskpool.turns import QuietThread

log = logging.getLogger("capsule_tasks.taskpool")

EXIT_BY_FORCE = 70
"""EX_SOFTWARE."""
_BETWEEN_LOOKS_S = 1.0


class Leaving:
    """Ends the process if the worker does not end by itself. Its children notice, and end too."""

    def __init__(self, limit_s: float, is_busy: Callable[[], bool]) -> None:
        """`is_busy` is asked on another thread: whether anything runs that is waited for."""
        self._limit_s = limit_s
        self._is_busy = is_busy
        self._ended = threading.Event()
        self._begun: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def arm(self) -> None:
        """From now on; more than once is no matter.

        Only where the worker has the main thread: beside one in another is somebody's program.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if self._thread is None and is_main:
            self._thread = QuietThread(target=self._run, name="capsule-leaving", daemon=True)
            self._thread.start()

    def watch(self, ended: threading.Event) -> None:
        """The worker will set `ended` when it has ended."""
        self._ended = ended

    def note_end(self, **_: Any) -> None:
        """The worker has ended; also one that never connected, so that nobody could `watch` it."""
        self._ended.set()

    def begin(self) -> None:
        """The worker is to leave. May be called in a signal's handler, and again."""
        self._begun.put(None)

    def _run(self) -> None:
        self._begun.get()
        ended = self._ended
        while self._is_busy():  # whoever would say that it is not may be what hangs
            if ended.wait(_BETWEEN_LOOKS_S):
                return
        if ended.wait(self._limit_s):
            return
        frames = sys._current_frames()  # noqa: SLF001 - documented, for purposes like this
        frame = frames.get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frame))
        log.critical("the worker did not end within %s s and is ended:\n%s", self._limit_s, stack)
        logging.shutdown()
        os._exit(EXIT_BY_FORCE)
