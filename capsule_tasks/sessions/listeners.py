"""Listeners of a session: states, health, heartbeats, output, and every message."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from capsule_tasks.protocol.messages import Heartbeat, Output
from capsule_tasks.sessions.arguments import check_callable
from capsule_tasks.sessions.health import Health
from capsule_tasks.sessions.info import Counters
from capsule_tasks.sessions.interceptors import Interceptor, Interceptors
from capsule_tasks.sessions.states import EVERY, SessionState
from capsule_tasks.settings import RoutingSettings

log = logging.getLogger("capsule_tasks.sessions")

HealthListener = Callable[[Health], object]
HeartbeatListener = Callable[[Heartbeat], object]
OutputListener = Callable[[Output], object]
StateListener = Callable[[SessionState, SessionState], object]


class SessionListeners:
    """The listeners of a session. They are called on its event loop, which waits for them.

    A listener that raises is logged and called again the next time.
    """

    def __init__(self, routing: RoutingSettings) -> None:
        self._counters = Counters()
        self._interceptors = Interceptors(routing, self._counters)
        self._state_listeners: list[tuple[StateListener, frozenset[SessionState]]] = []
        self._health_listeners: list[HealthListener] = []
        self._heartbeat_listeners: list[HeartbeatListener] = []
        self._output_listeners: list[OutputListener] = []

    def add_state_listener(
        self, listener: StateListener, states: frozenset[SessionState] = EVERY
    ) -> None:
        """Have `listener(old, new)` called on every change to one of `states`."""
        check_callable("listener", listener)
        self._state_listeners.append((listener, states))

    def remove_state_listener(self, listener: StateListener) -> None:
        """Remove a listener; ValueError if it was not added."""
        position = [known for known, _ in self._state_listeners].index(listener)
        del self._state_listeners[position]

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

    def _notify_state(self, old: SessionState, new: SessionState) -> None:
        _notify([call for call, states in self._state_listeners if new in states], old, new)

    def _on_health(self, health: Health) -> None:
        _notify(self._health_listeners, health)

    def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        _notify(self._heartbeat_listeners, heartbeat)

    def _on_session_output(self, output: Output) -> None:
        _notify(self._output_listeners, output)


def _notify(listeners: Iterable[Callable[..., object]], *details: object) -> None:
    for listener in tuple(listeners):  # a listener may remove itself
        try:
            listener(*details)
        except Exception:
            log.exception("session listener %r failed", listener)
