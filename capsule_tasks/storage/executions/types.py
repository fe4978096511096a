"""Values that the store of executions takes and returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from capsule_tasks.protocol.events import Ended, EventMessage, UnknownEvent

State = Literal["unknown", "running", "waiting", "ended"]


@dataclass(frozen=True, slots=True)
class Event:
    """One event of an execution. `id` is where to resume after it; `at` is Redis's time."""

    id: str
    at: float
    message: EventMessage | UnknownEvent
    offset: int = 0

    @property
    def attempt(self) -> int:
        return int(self.id.partition("-")[0])

    @property
    def seq(self) -> int:
        return int(self.id.partition("-")[2])

    @property
    def is_last(self) -> bool:
        return isinstance(self.message, Ended)


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command in an execution's control stream."""

    id: str
    data: bytes


class Claimed(NamedTuple):
    """A claimed attempt, and the commands that waited for it."""

    attempt: int
    seq: int
    commands: tuple[CommandEntry, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """A page of events, and the state of the execution when they were read."""

    state: State
    outcome: str
    attempt: int
    seq: int
    first_kept_id: str
    """The first event that was not trimmed; empty if none was trimmed."""
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """The state of an execution. Times are in seconds of Redis's clock, None if not yet."""

    state: State
    attempt: int = 0
    owner: str = ""
    worker: str = ""
    task: str = ""
    ack: str = ""
    outcome: str = ""
    claimed_at: float | None = None
    ended_at: float | None = None
    group: str = ""
    index: int = -1
    has_stream_content: bool = False


@dataclass(frozen=True, slots=True)
class RecentEntry:
    """One execution in the index of recent ones."""

    execution_id: str
    recorded_at: float
    state: str
    """`running`, `waiting`, or an outcome."""
    task: str = ""
    worker: str = ""
    started_at: float | None = None


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """How many members of a group ended with each outcome."""

    counts: dict[str, int]
    failures: tuple[tuple[str, str, str], ...] = field(default=())
    """(id to resume after, execution id, failure)"""
    counted: bytes | None = None
    """A bit for each member, the first one the highest; None if it was not wanted."""

    @property
    def done(self) -> int:
        return sum(self.counts.values())
