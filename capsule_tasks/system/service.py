"""The contract of everything that runs in the background, and its usual form: a thread.

| call | promise |
| --- | --- |
| `start` | starts once; a second call, or one after `stop`, does nothing |
| `stop` | ends for good, and returns when no thread, task, descriptor or connection is left |

`stop` is safe before `start`, while `start` is under way, any number of times, and from several
callers at the same time, each of which waits. A service that may hang declares how long `stop`
waits for it. A service that users start may raise after `stop` instead of doing nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

DEFERRED_SIGNALS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals that an iteration of the runtime's loop defers until it is done."""
set_mask: Callable[[int, Any], Any] = getattr(signal, "_signal", signal).pthread_sigmask
"""The C function: its wrapper makes enum members of the old mask, which takes far longer."""


class SignalFreeThread(threading.Thread):
    """Blocks the deferred signals.

    The system gives a signal to any thread that does not block it, and Python then runs the handler
    on the main thread: in the middle of the iteration that defers the signal.
    """

    def start(self) -> None:
        old_mask = set_mask(signal.SIG_BLOCK, DEFERRED_SIGNALS)
        try:
            super().start()
        finally:
            set_mask(signal.SIG_SETMASK, old_mask)


class Service(Protocol):
    """Started and stopped by any thread."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


class AsyncService(Protocol):
    """Started and stopped by tasks of one event loop."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...


class ThreadService:
    """A service that is a thread. Its `run` returns soon after `stopping` is set."""

    thread_name: ClassVar[str]
    stop_limit_s: ClassVar[float | None] = 5.0
    """How long `stop` waits for a thread that hangs. None: for as long as it takes."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    @property
    def is_started(self) -> bool:
        """Whether `start` was called, and `stop` was not."""
        return self._thread is not None and not self.stopping.is_set()

    @property
    def is_hanging(self) -> bool:
        """Whether the thread still runs after `stop`."""
        thread = self._thread
        return self.stopping.is_set() and thread is not None and thread.is_alive()

    def start(self) -> None:
        with self._starting:
            if self._thread is None and not self.stopping.is_set():
                self.set_up()
                self._thread = SignalFreeThread(target=self.run, name=self.thread_name, daemon=True)
                self._thread.start()

    def stop(self) -> None:
        with self._starting:
            thread = self._thread
            if thread is not None and not self.stopping.is_set():
                self.stopping.set()
                self.wake()
            self.stopping.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(self.stop_limit_s)

    def run(self) -> None:
        raise NotImplementedError

    def set_up(self) -> None:
        """Make what the thread and its users share, just before the thread starts."""

    def wake(self) -> None:
        """Called once when `stopping` is set, for a `run` that waits for something else."""
