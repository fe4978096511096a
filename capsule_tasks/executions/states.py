"""The states of an execution on four axes, and the moves that each axis allows."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final, NoReturn, Self

from capsule_tasks.errors import InternalError


class _State(Enum):
    """Hashed by identity, in C: `Enum.__hash__` is Python code, and tables are looked up often."""

    __hash__ = object.__hash__

    to: Mapping[Self, Self]
    """`state.to[target]` is the target; InternalError for a move that MOVES does not allow."""


class Run(_State):
    NEW = auto()
    AWAITING_CLAIM = auto()
    AWAITING_JUDGEMENT = auto()
    """The message was delivered before, and may have cost too many child processes."""
    QUEUED = auto()
    SENT = auto()
    RUNNING = auto()
    LOST = auto()
    """The child is lost; whether the message may cost another one is being judged."""
    OVER = auto()


class Claim(_State):
    UNCLAIMED = auto()
    CLAIMING = auto()
    AWAITING_PREVIOUS = auto()
    """The previous attempt is about to end: of a retry, or of a task that replaced itself."""
    CLAIMED = auto()
    RECLAIMING = auto()
    """The lease was lost; the calls on their way to Redis still name the old one."""
    CLOSED = auto()
    """Nothing more of this attempt is stored."""


class Report(_State):
    NONE = auto()
    ACCEPTED = auto()
    ENDED = auto()


class Ack(_State):
    CELERY = auto()
    """Celery acknowledges by itself: at the end, or when the task is reported as accepted."""
    DEFERRED = auto()
    DONE = auto()


# Reading a member from its class runs the metaclass's `__getattr__` (Python 3.11): 60 ns, not 2.
NEW, AWAITING_CLAIM, AWAITING_JUDGEMENT, QUEUED, SENT, RUNNING, LOST, OVER = Run
UNCLAIMED, CLAIMING, AWAITING_PREVIOUS, CLAIMED, RECLAIMING, CLOSED = Claim
NONE, ACCEPTED, ENDED = Report
CELERY, DEFERRED, DONE = Ack

MOVES: Final[Mapping[_State, frozenset[_State]]] = {
    NEW: frozenset({AWAITING_CLAIM, AWAITING_JUDGEMENT, QUEUED, OVER}),
    AWAITING_CLAIM: frozenset({AWAITING_JUDGEMENT, QUEUED, OVER}),
    AWAITING_JUDGEMENT: frozenset({QUEUED, OVER}),
    QUEUED: frozenset({SENT, OVER}),
    SENT: frozenset({QUEUED, RUNNING, OVER}),
    RUNNING: frozenset({LOST, OVER}),
    LOST: frozenset({OVER}),
    OVER: frozenset(),
    UNCLAIMED: frozenset({CLAIMING, AWAITING_PREVIOUS, CLOSED}),
    CLAIMING: frozenset({AWAITING_PREVIOUS, CLAIMED, CLOSED}),
    AWAITING_PREVIOUS: frozenset({CLAIMING, CLOSED}),
    CLAIMED: frozenset({RECLAIMING, CLOSED}),
    RECLAIMING: frozenset({CLAIMING, CLOSED}),
    CLOSED: frozenset(),
    NONE: frozenset({ACCEPTED, ENDED}),
    ACCEPTED: frozenset({ENDED}),
    ENDED: frozenset(),
    CELERY: frozenset({DEFERRED}),
    DEFERRED: frozenset({DONE}),
    DONE: frozenset(),
}


class _Targets(dict[_State, _State]):
    """Each state that a move may lead to, by itself: a lookup checks the move without a call."""

    def __init__(self, state: _State) -> None:
        super().__init__({to: to for to in MOVES[state]})
        self._state = state

    def __missing__(self, to: _State) -> NoReturn:
        axis, before = type(self._state).__name__, self._state.name
        raise InternalError(f"an execution whose {axis} is {before} cannot become {to.name}")


for _state in MOVES:
    _state.to = _Targets(_state)
