"""The states of an execution on four axes, and the moves that each axis allows."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NoReturn, Self

from capsule_tasks.errors import InternalError


class _State(Enum):
    """Declared with the names of the states that it may become.

    Hashed by identity, in C: `Enum.__hash__` is Python code, and tables are looked up often.
    """

    __hash__ = object.__hash__

    targets: tuple[str, ...]
    to: Mapping[Self, Self]
    """`state.to[target]` is the target; InternalError for a move that is not allowed."""

    def __new__(cls, *targets: str) -> Self:
        state = object.__new__(cls)
        state._value_ = len(cls.__members__)  # states with the same targets are no aliases
        state.targets = targets
        return state


class _Targets(dict[_State, _State]):
    """Each state that a move may lead to, by itself: a lookup checks the move without a call."""

    def __init__(self, state: _State) -> None:
        super().__init__({type(state)[name]: type(state)[name] for name in state.targets})
        self._state = state

    def __missing__(self, to: _State) -> NoReturn:
        axis, before = type(self._state).__name__, self._state.name
        raise InternalError(f"an execution whose {axis} is {before} cannot become {to.name}")


class Run(_State):
    NEW = "AWAITING_CLAIM", "AWAITING_JUDGEMENT", "QUEUED", "OVER"
    AWAITING_CLAIM = "AWAITING_JUDGEMENT", "QUEUED", "OVER"
    AWAITING_JUDGEMENT = "QUEUED", "OVER"
    """The message was delivered before, and may have cost too many child processes."""
    QUEUED = "SENT", "OVER"
    SENT = "QUEUED", "RUNNING", "OVER"
    RUNNING = "LOST", "OVER"
    LOST = "OVER"
    """The child is lost; whether the message may cost another one is being judged."""
    OVER = ()


class Claim(_State):
    UNCLAIMED = "CLAIMING", "AWAITING_PREVIOUS", "CLOSED"
    CLAIMING = "AWAITING_PREVIOUS", "CLAIMED", "CLOSED"
    AWAITING_PREVIOUS = "CLAIMING", "CLOSED"
    """The previous attempt is about to end: of a retry, or of a task that replaced itself."""
    CLAIMED = "RECLAIMING", "CLOSED"
    RECLAIMING = "CLAIMING", "CLOSED"
    """The lease was lost; the calls on their way to Redis still name the old one."""
    CLOSED = ()
    """Nothing more of this attempt is stored."""


class Report(_State):
    NONE = "ACCEPTED", "ENDED"
    ACCEPTED = "ENDED"
    ENDED = ()


class Ack(_State):
    CELERY = "DEFERRED"
    """Celery acknowledges by itself: at the end, or when the task is reported as accepted."""
    DEFERRED = "DONE"
    DONE = ()


# Reading a member from its class runs the metaclass's `__getattr__` (Python 3.11): 60 ns, not 2.
NEW, AWAITING_CLAIM, AWAITING_JUDGEMENT, QUEUED, SENT, RUNNING, LOST, OVER = Run
UNCLAIMED, CLAIMING, AWAITING_PREVIOUS, CLAIMED, RECLAIMING, CLOSED = Claim
NONE, ACCEPTED, ENDED = Report
CELERY, DEFERRED, DONE = Ack

for _state in (*Run, *Claim, *Report, *Ack):
    _state.to = _Targets(_state)
