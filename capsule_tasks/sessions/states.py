"""The states of a session and the only ways between them."""

from __future__ import annotations

from enum import StrEnum


class SessionState(StrEnum):
    """Who moves it on: the session itself, except where said."""

    CREATING = "creating"
    """Nothing started yet. `start` moves it on."""
    WARMING = "warming"
    """The child is starting, shaking hands or running its warmup."""
    READY = "ready"
    """Takes executions; it was busy, or started, a moment ago."""
    IDLE = "idle"
    """READY for longer than `timeouts.idle_s`; takes executions all the same."""
    BUSY = "busy"
    """At least one execution is running."""
    SHUTTING_DOWN = "shutting_down"
    """`shutdown` lets the child finish its `finally` blocks, or `terminate` is killing it."""
    TERMINATED = "terminated"
    """The child is gone as it should be. Only `restart` leads out."""
    ERROR = "error"
    """The child could not start, or died unasked. `restart` begins anew; `terminate` ends it."""


_S = SessionState

TRANSITIONS: dict[SessionState, frozenset[SessionState]] = {
    _S.CREATING: frozenset({_S.WARMING, _S.TERMINATED}),
    _S.WARMING: frozenset({_S.READY, _S.SHUTTING_DOWN, _S.TERMINATED, _S.ERROR}),
    _S.READY: frozenset({_S.BUSY, _S.IDLE, _S.SHUTTING_DOWN, _S.TERMINATED, _S.ERROR}),
    _S.IDLE: frozenset({_S.BUSY, _S.SHUTTING_DOWN, _S.TERMINATED, _S.ERROR}),
    _S.BUSY: frozenset({_S.READY, _S.SHUTTING_DOWN, _S.TERMINATED, _S.ERROR}),
    _S.SHUTTING_DOWN: frozenset({_S.TERMINATED}),
    _S.TERMINATED: frozenset({_S.CREATING}),
    _S.ERROR: frozenset({_S.CREATING, _S.TERMINATED}),
}
"""`CREATING` is entered again only by an explicit restart."""

ACCEPTING = frozenset({_S.READY, _S.IDLE, _S.BUSY})
"""States in which an execution may begin."""

EVERY = frozenset(SessionState)

OVER = frozenset({_S.TERMINATED, _S.ERROR})
"""States without a child."""

ALIVE = frozenset({_S.WARMING, _S.READY, _S.IDLE, _S.BUSY})
"""States in which a running child counts as healthy."""


def may_move(current: SessionState, target: SessionState) -> bool:
    return target in TRANSITIONS[current]
