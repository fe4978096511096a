"""The sessions of a pool as its plan sees them, and what the plan has done with them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Stage(Enum):
    STARTING = auto()
    IDLE = auto()
    BORROWED = auto()
    """Lent as a whole."""
    WORKING = auto()
    """Has one piece of work or more."""
    RETIRING = auto()


@dataclass(eq=False, slots=True)
class Slot:
    """One session of the pool, by number."""

    number: int
    stage: Stage = Stage.STARTING
    name: str | None = None
    is_name_new: bool = False
    """Its borrower is the first of its name; it is anybody's again if that one does not use it."""
    load: int = 0
    """Pieces of work that were assigned to it and have not finished."""
    uses: int = 0
    born_at: float = 0.0
    idle_since: float = 0.0
    first_rss: int = 0
    rss: int = 0
    is_unresponsive: bool = False
    retire_reason: str = ""
    """Why it is retired as soon as it is free."""


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
    """End the slot's session."""

    slot: int
    reason: str


@dataclass(frozen=True)
class Refuse:
    """Tell the waiter why there is no session for it."""

    waiter: int
    reason: str


Action = Assign | Start | Retire | Refuse


@dataclass
class Breaker:
    """Stops starting after repeated failures, tries one again after a while."""

    failures: int = 0
    open_until: float | None = None
    last_error: str = ""
