"""The phases of a realtime session, and the moves between them."""

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


class Move(StrEnum):
    """What happens to a session."""

    ENTER = "enter"
    CONNECTED = "connected"
    CLOSE = "close"
    RELEASED = "released"
    RELEASE_FAILED = "release_failed"


_P = Phase

TRANSITIONS: dict[tuple[Phase, Move], Phase] = {
    (_P.NEW, Move.ENTER): _P.OPENING,
    (_P.NEW, Move.CLOSE): _P.CLOSING,
    (_P.OPENING, Move.CONNECTED): _P.OPEN,
    (_P.OPENING, Move.CLOSE): _P.CLOSING,
    (_P.OPEN, Move.CLOSE): _P.CLOSING,
    (_P.CLOSE_FAILED, Move.CLOSE): _P.CLOSING,
    (_P.CLOSING, Move.RELEASED): _P.CLOSED,
    (_P.CLOSING, Move.RELEASE_FAILED): _P.CLOSE_FAILED,
}
"""Every other move is refused."""

ACTIVE = frozenset({_P.OPENING, _P.OPEN})
"""Phases in which the model may be told something, and tasks may be started."""


def moved(phase: Phase, move: Move) -> Phase | None:
    """The phase after a move; None for a move that the phase does not allow."""
    return TRANSITIONS.get((phase, move))
