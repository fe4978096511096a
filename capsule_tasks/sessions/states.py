"""The states of a session and the moves between them."""

from __future__ import annotations

from enum import StrEnum


class SessionState(StrEnum):
    """The session itself moves on from each state, except where the docstring names a call."""

    CREATING = "creating"
    """Nothing has started yet. `start` moves on."""
    WARMING = "warming"
    """The child is starting, shaking hands or running its warmup."""
    READY = "ready"
    """Takes executions; it was busy, or started, less than `timeouts.idle_s` ago."""
    IDLE = "idle"
    """Takes executions, and has run none for `timeouts.idle_s`."""
    BUSY = "busy"
    """At least one execution is running."""
    SHUTTING_DOWN = "shutting_down"
    """`shutdown` lets the child finish its `finally` blocks, or `terminate` is killing it."""
    TERMINATED = "terminated"
    """The child was stopped. Only `restart` moves on."""
    ERROR = "error"
    """The child failed to start, or died. `restart` or `terminate` moves on."""


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
"""A session moves back to `CREATING` only by a restart."""

ACCEPTING = frozenset({_S.READY, _S.IDLE, _S.BUSY})
"""States in which an execution may start."""

EVERY = frozenset(SessionState)

OVER = frozenset({_S.TERMINATED, _S.ERROR})
"""States without a child."""

ALIVE = frozenset({_S.WARMING, _S.READY, _S.IDLE, _S.BUSY})
"""States in which a running child counts as healthy."""
