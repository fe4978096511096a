"""The phases of a realtime session, and which of them follows which."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """What a session is doing. The values are what errors say of it."""

    NEW = "not open yet"
    """Nothing was acquired. Entering the session moves on."""
    OPENING = "opening"
    """`__aenter__` resolves the agent, reads the history and connects. It moves on, or a close."""
    OPEN = "open"
    """Commands are taken. A close, a failure or the end of the connection moves on."""
    CLOSING = "closing"
    """The cleanup runs in its own task, and moves on."""
    CLOSED = "closed"
    """Everything was released. Nothing moves on."""
    CLOSE_FAILED = "not closed, as a step of its cleanup failed"
    """The steps that failed are left. Another `close()` makes them again."""


_P = Phase

TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    _P.NEW: frozenset({_P.OPENING, _P.CLOSING}),
    _P.OPENING: frozenset({_P.OPEN, _P.CLOSING}),
    _P.OPEN: frozenset({_P.CLOSING}),
    _P.CLOSING: frozenset({_P.CLOSED, _P.CLOSE_FAILED}),
    _P.CLOSE_FAILED: frozenset({_P.CLOSING}),
    _P.CLOSED: frozenset(),
}

ACTIVE = frozenset({_P.OPENING, _P.OPEN})
"""Phases in which the model may be told something, and tasks may be started."""
