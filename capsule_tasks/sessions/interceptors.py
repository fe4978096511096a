"""Functions that are called with every message before it is routed, and must not delay it."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from capsule_tasks.sessions.info import Counters
from capsule_tasks.settings import RoutingSettings

log = logging.getLogger("capsule_tasks.sessions")

Interceptor = Callable[[Any], object]


class _Registered:
    __slots__ = ("call", "overruns")

    def __init__(self, call: Interceptor) -> None:
        self.call = call
        self.overruns = 0


class Interceptors:
    """Calls each interceptor on the event loop, and measures it.

    An interceptor that has overrun its budget too often is quarantined: from then on it is called
    on the thread of quarantined interceptors, where it delays no message.
    """

    def __init__(self, settings: RoutingSettings, counters: Counters) -> None:
        self._settings = settings
        self._counters = counters
        self._inline: list[_Registered] = []
        self._quarantined: list[Interceptor] = []
        self._quarantine_thread: QuarantineThread | None = None

    def add(self, call: Interceptor) -> None:
        if inspect.iscoroutinefunction(call):
            raise TypeError(f"{call!r} is a coroutine function; an interceptor must be plain")
        self._inline.append(_Registered(call))

    def remove(self, call: Interceptor) -> bool:
        """Remove an interceptor; False if it was not added."""
        for registered in self._inline:
            if registered.call == call:
                self._inline.remove(registered)
                return True
        if call not in self._quarantined:
            return False
        self._quarantined.remove(call)
        return True

    def count_into(self, counters: Counters) -> None:
        self._counters = counters

    def observe(self, message: Any) -> None:
        if self._quarantined:  # before the others: one that is quarantined below had its call
            if self._quarantine_thread is None:
                self._quarantine_thread = QuarantineThread(self._call_quarantined, self._settings)
            if not self._quarantine_thread.put(message):
                self._count_skipped(1)
        if not self._inline:
            return
        for registered in tuple(self._inline):
            started_at = time.perf_counter()
            self._call(registered.call, message)
            if time.perf_counter() - started_at > self._settings.interceptor_budget_s:
                self._overrun(registered)

    def finish(self) -> None:
        """End the thread after the calls that wait, for a child that has ended."""
        if self._quarantine_thread is not None:
            self._quarantine_thread.finish()

    def close(self) -> None:
        """End the thread and skip the calls that wait, for a session that ends.

        Interceptors stay registered, or quarantined, over a restart.
        """
        if self._quarantine_thread is not None:
            self._count_skipped(self._quarantine_thread.close())
            self._quarantine_thread = None

    def _count_skipped(self, messages: int) -> None:
        self._counters.interceptor_skipped_total += messages * len(self._quarantined)

    def _call(self, call: Interceptor, message: Any) -> None:
        try:
            call(message)
        except (Exception, asyncio.CancelledError):  # a cancel there is no reason to lose a message
            self._counters.interceptor_errors_total += 1
            log.exception("interceptor %r failed on a %s", call, type(message).__name__)

    def _overrun(self, registered: _Registered) -> None:
        registered.overruns += 1
        if registered.overruns < self._settings.interceptor_overruns:
            return
        if registered in self._inline:
            self._inline.remove(registered)
        self._counters.interceptor_quarantine_total += 1
        log.warning(
            "interceptor %r overran its budget of %.0f ms %d times; it is quarantined",
            registered.call,
            self._settings.interceptor_budget_s * 1000,
            registered.overruns,
        )
        self._quarantined.append(registered.call)

    def _call_quarantined(self, message: Any) -> None:
        for call in tuple(self._quarantined):
            self._call(call, message)


class QuarantineThread:
    """A daemon thread with a bounded queue; when that is full, the oldest message is skipped."""

    def __init__(self, call: Interceptor, settings: RoutingSettings) -> None:
        self._call = call
        self._queue: deque[Any] = deque(maxlen=settings.quarantine_queue)
        self._changed = threading.Condition()
        self._is_ending = False
        threading.Thread(target=self._run, name="capsule-quarantine", daemon=True).start()

    def put(self, message: Any) -> bool:
        """Queue a message; False if the oldest one was dropped for it."""
        with self._changed:
            has_room = len(self._queue) != self._queue.maxlen
            self._queue.append(message)
            self._changed.notify()
            return has_room

    def finish(self) -> None:
        """End the thread when the queue is empty."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def close(self) -> int:
        """End the thread after its present call; how many messages that skips."""
        with self._changed:
            skipped = len(self._queue)
            self._queue.clear()
        self.finish()
        return skipped

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_ending)
                if not self._queue:
                    return
                message = self._queue.popleft()
            self._call(message)
