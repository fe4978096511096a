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

import threading
from typing import ClassVar, Protocol

from capsule_tasks.system.threads import SignalFreeThread


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
