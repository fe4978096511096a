"""The decisions of a host: which sessions to take, to checkpoint, and to leave.

Plain state, no I/O, no clock of its own; one plan for each profile. Events change the state.
`decide` returns what to do with sessions that are idle and has already booked it; `between_calls`
is asked for a session that has more calls. Only the event on an arrow moves a session on:

    taking ──taken──▶ busy ──idle──▶ idle ──decide──▶ saving ──saved──▶ idle
       │                ▲              │ ▲               └──saved, rung──▶ busy
       │                └─────busy─────┘ │
       └──failed──▶ (removed) ◀──left── leaving ◀──decide, between_calls

A session counts against `max_live` until it has left: its child uses memory until then. The plans
of a worker share a `WorkerRoom`, which has a maximum of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from capsule_tasks.errors import InternalError

TAKE_AT_ONCE = 8
"""Sessions that are being taken at any moment: each of them starts a process."""
EVICT_AT_ONCE = 4
"""Sessions that leave at any moment because others are wanted: each of them is checkpointed."""
EVICT_AFTER_IDLE_S = 0.05
"""A caller that sends one call after the other keeps its session..."""
EVICT_AFTER_S = 2.0
"""... for so long, if others are wanted."""
UNUSED_TIMEOUT_S = 10.0
"""How long a session is idle that has never run a call: the producer that had it listed is gone."""
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 60.0
_MAX_FAILED = 10_000
"""Sessions whose failures are remembered."""


class Stage(Enum):
    TAKING = auto()
    """The session is being claimed, and its child started."""
    BUSY = auto()
    """A call runs, or the next one is being asked for."""
    IDLE = auto()
    """No call waits."""
    SAVING = auto()
    """A checkpoint is being made while no call runs."""
    LEAVING = auto()
    """The session is being checkpointed and released, and its child ended."""


class Why(Enum):
    """Why a session leaves its worker."""

    IDLE = "it was idle"
    OLD = "it reached its maximum age"
    EVICTED = "other sessions are wanted"
    STOPPING = "the worker stops"


FIRM = (Why.OLD, Why.STOPPING)
"""Reasons to leave also with calls that wait, which another worker runs."""
NEEDS_CHECKPOINT = (Why.OLD, Why.EVICTED)
"""Reasons to leave that give way if there is no checkpoint. A session that was idle for very long,
and for all that time could not be saved, is left without."""


class Save(msgspec.Struct, frozen=True):
    """Make a checkpoint of the session."""

    session_id: str


class Leave(msgspec.Struct, frozen=True):
    """Make a checkpoint of the session, release it, and end its child."""

    session_id: str
    why: Why


Decision = Save | Leave


class HostLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a profile that the plan goes by."""

    max_live: int
    idle_timeout_s: float
    max_age_s: float | None = None
    checkpoint_every: int = 0
    """Executions between two checkpoints; 0 for none while calls wait."""
    checkpoint_idle_s: float = 30.0


@dataclass(slots=True)
class Seat:
    """One session that this worker holds, or is about to."""

    session_id: str
    stage: Stage
    taken_at: float
    idle_since: float = 0.0
    is_unused: bool = False
    """Whether the session has never run a call."""
    unsaved: int = 0
    """Executions since the last checkpoint."""
    save_after: float = 0.0
    """No checkpoint before that, because the last one failed."""
    save_pause_s: float = 0.0


@dataclass(slots=True)
class _Failed:
    again_at: float
    pause_s: float
    count: int


@dataclass(slots=True, eq=False)
class WorkerRoom:
    """The room of a worker for sessions of all profiles together.

    In a worker that is full the sessions of a profile give way to those of another one, too.
    """

    max_live: int | None = None
    """Sessions of all profiles together; None for as many as the profiles may have."""
    plans: dict[str, HostPlan] = field(default_factory=dict)
    """By name of the profile."""

    def add_profile(self, name: str, limits: HostLimits) -> HostPlan:
        """The plan of a profile, whose sessions count from now on."""
        plan = self.plans[name] = HostPlan(limits, self)
        return plan

    def left(self) -> float:
        """How many more sessions the worker may hold."""
        if self.max_live is None:
            return math.inf
        return self.max_live - sum(len(plan.seats) for plan in self.plans.values())

    def decide(self, now: float) -> list[tuple[str, Leave]]:
        """Sessions of any profile that give way now, with their profiles; longest idle first."""
        decisions: list[tuple[str, Leave]] = []
        evictions = self._evictions()
        for profile, plan, seat in self._idle():
            if len(decisions) < evictions and now >= _evictable_at(seat):
                decisions.append((profile, plan.evict(seat)))
        return decisions

    def next_check_at(self) -> float | None:
        """When `decide` has something to do by time alone; None if it has not."""
        if self._evictions() <= 0:
            return None
        return min((_evictable_at(seat) for _, _, seat in self._idle()), default=None)

    def _evictions(self) -> int:
        """How many sessions may be evicted now."""
        plans = self.plans.values()
        kept_out = sum(plan.kept_out for plan in plans) if self.left() <= 0 else 0
        return _evictions((seat for plan in plans for seat in plan.seats.values()), kept_out)

    def _idle(self) -> list[tuple[str, HostPlan, Seat]]:
        found = [
            (profile, plan, seat)
            for profile, plan in self.plans.items()
            for seat in plan.seats.values()
            if seat.stage is Stage.IDLE
        ]
        return sorted(found, key=lambda each: each[2].idle_since)


@dataclass(slots=True)
class HostPlan:
    """The sessions of one profile in one worker."""

    limits: HostLimits
    worker: WorkerRoom = field(default_factory=WorkerRoom)
    seats: dict[str, Seat] = field(default_factory=dict)
    is_stopping: bool = False
    _wanted: int = 0
    """Sessions that wait for a worker with room, while this one has none."""
    _failed: dict[str, _Failed] = field(default_factory=dict)

    # --- taking --------------------------------------------------------------------------------

    def room(self) -> int:
        """How many more sessions may be taken now."""
        if self.is_stopping:
            return 0
        taking = sum(seat.stage is Stage.TAKING for seat in self.seats.values())
        room = min(self.limits.max_live - len(self.seats), self.worker.left())
        return max(0, int(min(room, TAKE_AT_ONCE - taking)))

    @property
    def is_full(self) -> bool:
        """Whether no session can be taken before another one leaves."""
        return self._has_its_maximum or self.worker.left() <= 0

    @property
    def kept_out(self) -> int:
        """How many sessions wait although the profile could have more, if the worker had room."""
        return 0 if self._has_its_maximum else self._wanted

    @property
    def _has_its_maximum(self) -> bool:
        return len(self.seats) >= self.limits.max_live

    def may_take(self, session_id: str, now: float) -> bool:
        """False for a session that is here, or that could not be taken a short while ago."""
        failed = self._failed.get(session_id)
        is_waited_for = failed is not None and now < failed.again_at
        return session_id not in self.seats and not is_waited_for and self.room() > 0

    def take(self, session_id: str, now: float) -> None:
        if session_id in self.seats:
            raise InternalError(f"session {session_id!r} is taken twice")
        self.seats[session_id] = Seat(session_id, Stage.TAKING, now)

    def taken(self, session_id: str, now: float, *, is_unused: bool = False) -> None:
        """The session is owned and its child is ready; `is_unused`: it has never run a call."""
        seat = self._moved(session_id, Stage.BUSY, Stage.TAKING)
        seat.taken_at, seat.is_unused = now, is_unused
        self._failed.pop(session_id, None)

    def failed(self, session_id: str, now: float, *, had_no_child: bool = False) -> float:
        """The session was not taken, or had no child: seconds until this worker may try again."""
        self.seats.pop(session_id, None)
        before = self._failed.pop(session_id, None)
        pause_s = min(before.pause_s * 2, _MAX_PAUSE_S) if before else _FIRST_PAUSE_S
        count = (before.count if before else 0) + had_no_child
        self._failed[session_id] = _Failed(now + pause_s, pause_s, count)
        if len(self._failed) > _MAX_FAILED:
            del self._failed[next(iter(self._failed))]
        return pause_s

    def want_room(self, sessions: int) -> None:
        """So many sessions wait for a worker with room, while this one has none."""
        self._wanted = sessions

    # --- what sessions do ----------------------------------------------------------------------

    def busy(self, session_id: str) -> None:
        """The session is asked for its next call."""
        self._moved(session_id, Stage.BUSY, Stage.IDLE, Stage.SAVING)

    def executed(self, session_id: str) -> None:
        """A call has ended in the session."""
        seat = self.seats[session_id]
        seat.unsaved += 1
        seat.is_unused = False

    def idle(self, session_id: str, now: float) -> None:
        """No call waits."""
        seat = self._moved(session_id, Stage.IDLE, Stage.BUSY)
        seat.idle_since = now

    def saved(self, session_id: str, now: float, *, is_saved: bool) -> None:
        """A checkpoint was made, or failed: then the next one is put off, longer each time."""
        seat = self.seats[session_id]
        if seat.stage is Stage.SAVING:
            seat.stage = Stage.IDLE
        if is_saved:
            seat.unsaved = 0
            seat.save_after = seat.save_pause_s = 0.0
        else:
            seat.save_pause_s = min(seat.save_pause_s * 2, _MAX_PAUSE_S) or _FIRST_PAUSE_S
            seat.save_after = now + seat.save_pause_s

    def failures(self, session_id: str) -> int:
        """How often in a row this worker had no child for the session."""
        failed = self._failed.get(session_id)
        return failed.count if failed is not None else 0

    def is_unsaved(self, session_id: str) -> bool:
        """Whether calls have run since the last checkpoint."""
        return self.seats[session_id].unsaved > 0

    def lost_state(self, session_id: str) -> None:
        """The child was lost: nothing is left that a checkpoint could save."""
        self.seats[session_id].unsaved = 0

    def gives_back(self, session_id: str) -> None:
        """The session ends here, for whatever reason: it may be listed for other workers."""
        if (seat := self.seats.get(session_id)) is not None:
            seat.stage = Stage.LEAVING

    def is_leaving(self, session_id: str) -> bool:
        """Whether the session may be listed since because it ends here."""
        seat = self.seats.get(session_id)
        return seat is None or seat.stage is Stage.LEAVING

    def stays(self, session_id: str) -> None:
        """The session is not left: a call came first, or there is no checkpoint of it."""
        self._moved(session_id, Stage.BUSY, Stage.LEAVING)

    def left(self, session_id: str) -> None:
        """The session is not held here any more, for whatever reason."""
        self.seats.pop(session_id, None)

    # --- decisions -----------------------------------------------------------------------------

    def between_calls(self, session_id: str, now: float) -> Decision | None:
        """Decide what comes before the next call of a session that may have more of them."""
        seat = self.seats[session_id]
        if self.is_stopping:
            return self._leave(seat, Why.STOPPING)
        if self._is_old(seat, now) and now >= seat.save_after:
            return self._leave(seat, Why.OLD)
        if self._has_many_unsaved(seat, now):
            return Save(session_id)
        return None

    def decide(self, now: float) -> list[Decision]:
        """Decide what to do with idle sessions now; longest idle first."""
        decisions: list[Decision] = []
        idle = [seat for seat in self.seats.values() if seat.stage is Stage.IDLE]
        idle.sort(key=lambda seat: seat.idle_since)
        evictions = self._evictions()
        for seat in idle:
            why = self._why_leave(seat, now)
            may_evict = evictions > 0 and now >= _evictable_at(seat)
            if why is None and may_evict:
                why, evictions = Why.EVICTED, evictions - 1
            if why is not None:
                decisions.append(self._leave(seat, why))
            elif self._is_save_due(seat, now):
                seat.stage = Stage.SAVING
                decisions.append(Save(seat.session_id))
        return decisions

    def evict(self, seat: Seat) -> Leave:
        """Have a session that is idle give way."""
        return self._leave(seat, Why.EVICTED)

    def next_check_at(self) -> float | None:
        """When `decide` has something to do by time alone; None if it has not."""
        times: list[float] = []
        evicts = self._evictions() > 0
        for seat in self.seats.values():
            if seat.stage is not Stage.IDLE:
                continue
            times.append(self._idle_until(seat))
            if self.limits.max_age_s is not None:
                times.append(max(seat.taken_at + self.limits.max_age_s, seat.save_after))
            if seat.unsaved:
                times.append(self._save_due_at(seat))
            if evicts:
                times.append(_evictable_at(seat))
        return min(times, default=None)

    def _evictions(self) -> int:
        """How many sessions may be evicted now."""
        return _evictions(self.seats.values(), self._wanted if self._has_its_maximum else 0)

    def _why_leave(self, seat: Seat, now: float) -> Why | None:
        if self.is_stopping:
            return Why.STOPPING
        if self._is_old(seat, now) and now >= seat.save_after:
            return Why.OLD
        if now >= self._idle_until(seat):
            return Why.IDLE
        return None

    def _idle_until(self, seat: Seat) -> float:
        idle_s = self.limits.idle_timeout_s
        return seat.idle_since + (min(idle_s, UNUSED_TIMEOUT_S) if seat.is_unused else idle_s)

    def _is_old(self, seat: Seat, now: float) -> bool:
        max_age_s = self.limits.max_age_s
        return max_age_s is not None and now >= seat.taken_at + max_age_s

    def _is_save_due(self, seat: Seat, now: float) -> bool:
        return bool(seat.unsaved) and now >= self._save_due_at(seat)

    def _save_due_at(self, seat: Seat) -> float:
        every = self.limits.checkpoint_every
        at = seat.idle_since
        if not every or seat.unsaved < every:
            at += self.limits.checkpoint_idle_s
        return max(at, seat.save_after)

    def _has_many_unsaved(self, seat: Seat, now: float) -> bool:
        every = self.limits.checkpoint_every
        return bool(every) and seat.unsaved >= every and now >= seat.save_after

    def _leave(self, seat: Seat, why: Why) -> Leave:
        seat.stage = Stage.LEAVING
        return Leave(seat.session_id, why)

    def _moved(self, session_id: str, to: Stage, *allowed: Stage) -> Seat:
        seat = self.seats[session_id]
        if seat.stage is not to and seat.stage not in allowed:
            raise InternalError(
                f"session {session_id!r} that is {seat.stage.name} cannot become {to.name}"
            )
        seat.stage = to
        return seat


def _evictions(seats: Iterable[Seat], wanted: int) -> int:
    """How many more of these sessions may be evicted for those that are wanted."""
    return min(wanted, EVICT_AT_ONCE) - sum(seat.stage is Stage.LEAVING for seat in seats)


def _evictable_at(seat: Seat) -> float:
    """When an idle session may be evicted: not right after a call or a failed checkpoint."""
    after_call = min(
        seat.idle_since + EVICT_AFTER_IDLE_S,
        max(seat.idle_since, seat.taken_at + EVICT_AFTER_S),
    )
    return max(after_call, seat.save_after)
