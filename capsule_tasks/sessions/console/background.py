"""An event loop in a thread of its own, for a main thread that sits at the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """Runs what the main thread gives it, until `close`."""

    def __init__(self) -> None:
        self.bell = Bell()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="capsule-console", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `work` and do not wait. Safe in a signal handler."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns or raises. Ctrl-C cancels it."""
        future = self.start(work)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.bell.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.get_loop().run_forever()


class Bell:
    """A descriptor that becomes readable when rung, from any thread."""

    def __init__(self) -> None:
        self.descriptor, self._button = os.pipe()
        for descriptor in (self.descriptor, self._button):
            os.set_blocking(descriptor, False)

    def ring(self, _: object = None) -> None:
        with contextlib.suppress(BlockingIOError):  # it has been rung more than often enough
            os.write(self._button, b"!")

    def ring_on_signals(self) -> None:
        """Also for one that comes just before somebody begins to wait. From the main thread."""
        signal.set_wakeup_fd(self._button, warn_on_full_buffer=False)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 4096)

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        os.close(self.descriptor)
        os.close(self._button)
