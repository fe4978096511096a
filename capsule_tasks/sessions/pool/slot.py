"""The sessions of a pool as its plan sees them, and the actions that the plan decides."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Stage(Enum):
    STARTING = auto()
    IDLE = auto()
    BORROWED = auto()
    """One borrower has the whole session."""
    WORKING = auto()
    """The session has one piece of work or more."""
    RETIRING = auto()


@dataclass(eq=False, slots=True)
class Slot:
    """One session of the pool, by number."""

    number: int
    stage: Stage = Stage.STARTING
    name: str | None = None
    is_name_new: bool = False
    """The name is of the present borrower. If that one does not use the session, it has no name."""
    load: int = 0
    """Pieces of work that were assigned to the session and have not finished."""
    uses: int = 0
    born_at: float = 0.0
    idle_since: float = 0.0
    first_rss: int = 0
    rss: int = 0
    is_unresponsive: bool = False
    retire_reason: str = ""
    """Why the session takes nothing new and is retired as soon as it is free; empty otherwise."""


@dataclass(frozen=True)
class Assign:
    """Hand the slot's session to the waiter."""

    waiter: int
    slot: int


@dataclass(frozen=True)
class Start:
    """Start a session in the slot."""

    slot: int


@dataclass(frozen=True)
class Retire:
    """Stop the slot's session."""

    slot: int
    reason: str


@dataclass(frozen=True)
class Refuse:
    """Fail the waiter, with the reason why there is no session for it."""

    waiter: int
    reason: str


Action = Assign | Start | Retire | Refuse


@dataclass
class Breaker:
    """Circuit breaker: no session is started for a while after repeated start failures."""

    failures: int = 0
    open_until: float | None = None
    last_error: str = ""
