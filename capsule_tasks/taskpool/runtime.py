"""The runtime thread: one asyncio loop inside a Celery worker, which owns every session."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

log = logging.getLogger("capsule_tasks.taskpool")

T = TypeVar("T")


class RuntimeThread:
    """Starts and stops the loop; both idempotent. `post` is the way in from other threads."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._inbox: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._rung = False

    def start(self) -> None:
        if self._thread is not None:
            return
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name="capsule-runtime", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def post(self, call: Callable[..., object], *arguments: Any) -> None:
        """Have a call made on the loop, in order; one wake-up for as many as are waiting."""
        self._inbox.append((call, arguments))
        self.flush()

    def post_lazily(self, call: Callable[..., object], *arguments: Any) -> None:
        """The same, once somebody calls `flush` or `post`."""
        self._inbox.append((call, arguments))

    def flush(self) -> None:
        """Wake the loop if calls are waiting."""
        loop = self._loop
        if self._inbox and not self._rung and loop is not None:
            self._rung = True
            try:
                loop.call_soon_threadsafe(self._take)
            except RuntimeError:
                log.debug("the runtime has stopped; %d calls are not made", len(self._inbox))

    def begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop; its outcome is in the future."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self, timeout_s: float) -> None:
        """End the loop. What still runs on it is cancelled; the thread is waited for."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self._loop = self._thread = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout_s)
        if thread.is_alive():
            log.warning("the runtime thread did not end within %s s", timeout_s)

    def _take(self) -> None:
        self._rung = False  # before looking: what is posted from now on rings again
        inbox = self._inbox
        while inbox:
            call, arguments = inbox.popleft()
            try:
                call(*arguments)
            except Exception:
                log.exception("the runtime could not do %r", call)

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # noqa: PLC0415 - it is optional
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
