"""Listeners of a session: states, health, heartbeats, output, and every message.

An interceptor is called with every message before it is routed, and must not delay it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from capsule_tasks.protocol.messages import Heartbeat, Output
from capsule_tasks.sessions.arguments import check_callable
from capsule_tasks.sessions.info import Counters, Health
from capsule_tasks.sessions.states import EVERY, SessionState
from capsule_tasks.settings import RoutingSettings

log = logging.getLogger("capsule_tasks.sessions")

HealthListener = Callable[[Health], object]
HeartbeatListener = Callable[[Heartbeat], object]
OutputListener = Callable[[Output], object]
StateListener = Callable[[SessionState, SessionState], object]
Interceptor = Callable[[Any], object]


@dataclass(eq=False, slots=True)
class _Registered:
    call: Interceptor
    overruns: int = 0
    is_quarantined: bool = False


class Interceptors:
    """Calls each interceptor on the event loop, and measures it.

    An interceptor that has overrun its budget too often is quarantined: from then on it is called
    on the thread of quarantined interceptors, where it delays no message.
    """

    def __init__(self, settings: RoutingSettings, counters: Counters) -> None:
        self.registered: list[_Registered] = []
        self.counters = counters
        self._settings = settings
        self._quarantine_thread: QuarantineThread | None = None

    def add(self, call: Interceptor) -> None:
        if inspect.iscoroutinefunction(call):
            raise TypeError(f"{call!r} is a coroutine function; an interceptor must be plain")
        self.registered.append(_Registered(call))

    def remove(self, call: Interceptor) -> bool:
        """Remove an interceptor; False if it was not added."""
        for registered in self.registered:
            if registered.call == call:
                self.registered.remove(registered)
                return True
        return False

    def observe(self, message: Any) -> None:
        if self._quarantined:  # before the others: one that is quarantined below had its call
            if self._quarantine_thread is None:
                self._quarantine_thread = QuarantineThread(self._call_quarantined, self._settings)
            if not self._quarantine_thread.put(message):
                self._count_skipped(1)
        for registered in self.registered.copy():
            if registered.is_quarantined:
                continue
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

    @property
    def _quarantined(self) -> list[Interceptor]:
        return [registered.call for registered in self.registered if registered.is_quarantined]

    def _count_skipped(self, messages: int) -> None:
        self.counters.interceptor_skipped_total += messages * len(self._quarantined)

    def _call(self, call: Interceptor, message: Any) -> None:
        try:
            call(message)
        except (Exception, asyncio.CancelledError):  # a cancel there is no reason to lose a message
            self.counters.interceptor_errors_total += 1
            log.exception("interceptor %r failed on a %s", call, type(message).__name__)

    def _overrun(self, registered: _Registered) -> None:
        registered.overruns += 1
        if registered.overruns < self._settings.interceptor_overruns:
            return
        self.counters.interceptor_quarantine_total += 1
        log.warning(
            "interceptor %r overran its budget of %.0f ms %d times; it is quarantined",
            registered.call,
            self._settings.interceptor_budget_s * 1000,
            registered.overruns,
        )
        registered.is_quarantined = True

    def _call_quarantined(self, message: Any) -> None:
        for call in self._quarantined:
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


class SessionListeners:
    """The listeners of a session. They are called on its event loop, which waits for them.

    A listener that raises is logged and called again the next time.
    """

    def __init__(self, routing: RoutingSettings) -> None:
        self._counters = Counters()
        self._interceptors = Interceptors(routing, self._counters)
        self._state_listeners: defaultdict[SessionState, list[StateListener]] = defaultdict(list)
        self._health_listeners: list[HealthListener] = []
        self._heartbeat_listeners: list[HeartbeatListener] = []
        self._output_listeners: list[OutputListener] = []

    def add_state_listener(
        self, listener: StateListener, states: frozenset[SessionState] = EVERY
    ) -> None:
        """Have `listener(old, new)` called on every change to one of `states`."""
        check_callable("listener", listener)
        for state in states:
            self._state_listeners[state].append(listener)

    def remove_state_listener(self, listener: StateListener) -> None:
        """Remove a listener; ValueError if it was not added."""
        listening = [known for known in self._state_listeners.values() if listener in known]
        if not listening:
            raise ValueError(f"{listener!r} is no listener of this session")
        for known in listening:
            known.remove(listener)

    def add_health_listener(self, listener: HealthListener) -> None:
        """Have `listener(health)` called when heartbeats are missing and when they come again."""
        check_callable("listener", listener)
        self._health_listeners.append(listener)

    def add_heartbeat_listener(self, listener: HeartbeatListener) -> None:
        """Have `listener(heartbeat)` called for every heartbeat of the child."""
        check_callable("listener", listener)
        self._heartbeat_listeners.append(listener)

    def add_output_listener(self, listener: OutputListener) -> None:
        """Have `listener(output)` called for output of no execution, or of one that has ended."""
        check_callable("listener", listener)
        self._output_listeners.append(listener)

    def add_message_interceptor(self, interceptor: Interceptor) -> None:
        """Have `interceptor(message)` called for every message before it is routed.

        An interceptor has 10 ms on the event loop. After three overruns it is called on a thread
        of its own, where it delays nothing.
        """
        check_callable("interceptor", interceptor)
        self._interceptors.add(interceptor)

    def remove_message_interceptor(self, interceptor: Interceptor) -> bool:
        """Remove an interceptor; False if it was not added."""
        return self._interceptors.remove(interceptor)


def notify(listeners: Iterable[Callable[..., object]], *details: object) -> None:
    for listener in tuple(listeners):  # a listener may remove itself
        try:
            listener(*details)
        except Exception:
            log.exception("session listener %r failed", listener)
