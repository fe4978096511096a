"""The decisions of a pool: who gets a session, which sessions to start and to retire.

Plain state, no I/O, no clock of its own. Events change the state; `decide` then returns the actions
to carry out and has already booked them, so that two decisions never promise the same thing. Each
slot is in one stage, and only the event on an arrow moves it on:

    starting ──started──▶ idle ──decide──▶ borrowed ──released──▶ idle
        │                  │ ◀──assign/finished──▶ working
        └──start_failed──▶ (removed) ◀──stopped── retiring ◀──decide

A pool is used in one of two ways. It lends whole sessions to waiters (`wait`, `released`), and has
as many sessions as they need. Or it has a fixed size (`set_size`), and each session takes up to
`capacity` pieces of work (`assign`, `finished`); these two are called for each task, and scan
nothing.

A slot counts against the maximum until it is removed: a process that is being stopped still uses
memory. A slot with a `retire_reason` takes nothing new and is retired as soon as it is free.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from capsule_tasks.settings import PoolSettings

if TYPE_CHECKING:
    from capsule_tasks.sessions.session import Session

EARLY_EXITS = 3
"""Sessions in a row that may end before their first use until the next start is delayed."""
_MIN_PAUSE_S = 0.1
_MAX_PAUSE_S = 30.0
_USED = "it was used, and each borrower gets a fresh one"


Waiter = asyncio.Future["Slot"]


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
    session: Session | None = field(default=None, repr=False)
    """Set by the pool; the plan does not use it."""
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


class Assign(NamedTuple):
    """Hand the slot's session to the waiter."""

    waiter: Waiter
    slot: Slot


class Start(NamedTuple):
    """Start a session in the slot."""

    slot: Slot


class Retire(NamedTuple):
    """Stop the slot's session."""

    slot: Slot
    reason: str


class Refuse(NamedTuple):
    """Fail the waiter, with the reason why there is no session for it."""

    waiter: Waiter
    reason: str


Action = Assign | Start | Retire | Refuse


@dataclass
class Breaker:
    """Circuit breaker: no session is started for a while after repeated start failures."""

    failures: int = 0
    open_until: float | None = None
    last_error: str = ""


@dataclass
class PoolPlan:
    """The state of one sub-pool."""

    settings: PoolSettings
    slots: dict[int, Slot] = field(default_factory=dict)
    waiters: OrderedDict[Waiter, str | None] = field(default_factory=OrderedDict)
    breaker: Breaker = field(default_factory=Breaker)
    stopping: bool = False
    capacity: int = 1
    """Pieces of work that a session takes at the same time."""
    size: int | None = None
    """The fixed number of sessions, busy or not; None for a pool that lends sessions."""
    early_exits: int = 0
    """Sessions in a row that ended before their first use."""
    paused_until: float | None = None
    """No session is started before, unless a borrower waits for one."""
    _available: OrderedDict[int, Slot] = field(default_factory=OrderedDict)
    """Slots that would take a piece of work; the one that has been free for longest is first."""
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    # --- events --------------------------------------------------------------------------------

    def wait(self, waiter: Waiter, name: str | None = None) -> None:
        """A borrower waits for a session: any without a name, or the one of a name."""
        self.waiters[waiter] = name

    def cancel_wait(self, waiter: Waiter) -> None:
        """The borrower no longer waits; nothing happens if it has a session already."""
        self.waiters.pop(waiter, None)

    def started(self, slot: Slot, rss: int, now: float) -> None:
        self.breaker = Breaker()
        slot.born_at = slot.idle_since = now
        slot.first_rss = slot.rss = rss
        if slot.stage is Stage.STARTING:
            slot.stage = Stage.IDLE
            self._make_available(slot)

    def start_failed(self, slot: Slot, error: str, now: float) -> None:
        self.stopped(slot)
        breaker = self.breaker
        breaker.failures += 1
        breaker.last_error = error
        if breaker.failures >= self.settings.breaker_failures:
            breaker.open_until = now + self.settings.breaker_reset_s

    def released(self, slot: Slot, now: float, *, used: bool = True, executions: int = 0) -> None:
        """The borrower gave the session back, after `executions` executions in all."""
        if slot.stage is not Stage.BORROWED:
            return
        slot.stage = Stage.IDLE
        slot.idle_since = now
        slot.uses = max(slot.uses + used, executions)
        if slot.is_name_new and not used:
            slot.name = None
        if used and self.settings.fresh and slot.name is None:
            slot.retire_reason = _USED
        self._make_available(slot)

    def set_size(self, size: int, max_sessions: int) -> None:
        """Have so many sessions from now on, `max_sessions` with those that are being retired.

        Of too many sessions those with the least work are retired, once that has finished.
        """
        self.size = size
        self.settings = msgspec.structs.replace(self.settings, max_sessions=max_sessions)
        staying = [slot for slot in self.slots.values() if self._stays(slot)]
        staying.sort(key=lambda slot: (slot.stage is not Stage.STARTING, slot.load))
        for slot in staying[: max(0, len(staying) - size)]:
            self.retire_when_idle(slot, "the pool has shrunk")

    def assign(self) -> Slot | None:
        """Assign a piece of work to the session that has the least; None if none has room."""
        available = self._available
        if not available:
            return None
        if self.capacity == 1:
            _, slot = available.popitem(last=False)
        else:
            slot = min(available.values(), key=attrgetter("load"))
            if slot.load + 1 == self.capacity:
                del available[slot.number]
        slot.stage = Stage.WORKING
        slot.load += 1
        slot.uses += 1
        max_uses = self.settings.max_uses
        if max_uses is not None and slot.uses >= max_uses:
            self.retire_when_idle(slot, f"it was used {max_uses} times or more")
        elif self.settings.fresh:
            self.retire_when_idle(slot, _USED)
        return slot

    def finished(self, slot: Slot, now: float) -> None:
        """A piece of work has ended, in whatever way, or was refused."""
        slot.load -= 1
        self.early_exits = 0
        self.paused_until = None
        if slot.stage is not Stage.WORKING:
            return
        if not slot.load:
            slot.stage = Stage.IDLE
            slot.idle_since = now
        if not slot.retire_reason:
            self._available[slot.number] = slot

    def reported(self, slot: Slot, rss: int) -> bool:
        """A heartbeat came, with the child's memory; whether the slot is to be retired for that."""
        slot.rss = rss
        slot.is_unresponsive = False
        max_rss = self.settings.max_rss_bytes
        if max_rss is None or rss <= max_rss or not self._stays(slot):
            return False
        self.retire_when_idle(slot, f"it uses {rss} bytes of memory, and may use {max_rss}")
        return True

    def heartbeat_missed(self, slot: Slot) -> None:
        slot.is_unresponsive = True

    def retire_when_idle(self, slot: Slot, reason: str) -> None:
        """Give the slot nothing new from now on; a borrower keeps it until the release."""
        slot.retire_reason = slot.retire_reason or reason
        self._available.pop(slot.number, None)

    def lost(self, slot: Slot, reason: str, now: float) -> bool:
        """The child died; whether the pool counted on it: it was ready and not to be retired."""
        if slot.stage is Stage.STARTING or not self._stays(slot):
            return False
        self.retire_when_idle(slot, reason)
        if slot.stage is Stage.IDLE and not slot.uses:
            self.early_exits += 1
            if self.early_exits > EARLY_EXITS:
                pause_s = _MIN_PAUSE_S * 2 ** min(self.early_exits - EARLY_EXITS, 10)
                self.paused_until = now + min(pause_s, _MAX_PAUSE_S)
        return True

    def stopped(self, slot: Slot) -> None:
        """Nothing of the session is left; later events of the slot change nothing."""
        self.slots.pop(slot.number, None)
        slot.stage = Stage.RETIRING

    # --- decisions -----------------------------------------------------------------------------

    def decide(self, now: float) -> list[Action]:
        """The actions to carry out now; they are booked as done."""
        actions: list[Action] = []
        if self.stopping:
            actions += [Refuse(waiter, "the pool is stopping") for waiter in self.waiters]
            self.waiters.clear()
            for slot in list(self.slots.values()):
                if slot.stage is not Stage.RETIRING:
                    actions.append(self._retire(slot, "the pool is stopping"))
            return actions
        actions += self._retire_due(now)
        actions += self._assign_waiters()
        actions += self._retire_for_others()
        actions += self._start(now)
        actions += self._refuse(now)
        return actions

    def next_check_at(self, now: float) -> float | None:
        """When `decide` may have something to do without an event; None if never."""
        due: list[float] = []
        open_until = self.breaker.open_until
        if open_until is not None and open_until > now:  # afterwards, events of the next start come
            due.append(open_until)
        if self.size is not None and self.paused_until is not None and self.paused_until > now:
            due.append(self.paused_until)
        for slot in self._in(Stage.IDLE):
            if self.settings.max_age_s is not None:
                due.append(slot.born_at + self.settings.max_age_s)
            if self._spare_idle() > 0 or slot.name is not None:
                due.append(slot.idle_since + self.settings.idle_timeout_s)
        return max(now, min(due)) if due else None

    def _retire_due(self, now: float) -> list[Action]:
        return [
            self._retire(slot, reason)
            for slot in self._in(Stage.IDLE)
            if (reason := self._retire_reason(slot, now))
        ]

    def _retire_reason(self, slot: Slot, now: float) -> str:
        """Why the slot's session should not be used again; empty if it may be used."""
        settings = self.settings
        grown = slot.rss - slot.first_rss
        if slot.retire_reason:
            return slot.retire_reason
        if slot.is_unresponsive and self.size is None:  # else its start costs the imports of an app
            return "its heartbeat is missing"
        if settings.max_uses is not None and slot.uses >= settings.max_uses:
            return f"it was used {settings.max_uses} times or more"
        if settings.max_age_s is not None and now - slot.born_at >= settings.max_age_s:
            return f"it is older than {settings.max_age_s} s"
        if settings.max_growth_bytes is not None and grown >= settings.max_growth_bytes:
            return f"its memory has grown by {settings.max_growth_bytes} bytes or more"
        if now - slot.idle_since >= settings.idle_timeout_s and (
            slot.name is not None or self._spare_idle() > 0
        ):
            return f"it was idle for {settings.idle_timeout_s} s"
        return ""

    def _assign_waiters(self) -> list[Action]:
        """First come, first served; a busy name holds up only waiters for that name."""
        actions: list[Action] = []
        for waiter, name in list(self.waiters.items()):
            slot = self._named(name) if name is not None else None
            if slot is not None and slot.stage is not Stage.IDLE:
                continue  # the name's session is busy, starting or stopping
            slot = slot or self._free_idle()
            if slot is None:
                continue
            slot.is_name_new = slot.name is None
            slot.stage, slot.name = Stage.BORROWED, name
            self._available.pop(slot.number, None)
            del self.waiters[waiter]
            actions.append(Assign(waiter, slot))
        return actions

    def _retire_for_others(self) -> list[Action]:
        """Retire idle sessions of other names when the pool is full."""
        room = self.settings.max_sessions - len(self.slots)
        wanted = self._unserved() - len(self._in(Stage.STARTING)) - max(0, room)
        wanted -= len(self._in(Stage.RETIRING))
        named = sorted(
            (slot for slot in self._in(Stage.IDLE) if slot.name is not None),
            key=lambda slot: slot.idle_since,
        )
        return [self._retire(slot, "another borrower needs its place") for slot in named[:wanted]]

    def _start(self, now: float) -> list[Action]:
        open_until, starting = self.breaker.open_until, len(self._in(Stage.STARTING))
        if open_until is not None and (now < open_until or starting):
            return []
        wanted = self._unserved() + self.settings.min_idle - len(self._unnamed_idle()) - starting
        if self.size is not None and (self.paused_until is None or now >= self.paused_until):
            filled = sum(map(self._counts_for_size, self.slots.values()))
            wanted = max(wanted, self.size - filled)
        wanted = min(wanted, self.settings.max_sessions - len(self.slots))
        if open_until is not None:  # half open: one attempt decides
            wanted = min(wanted, 1)
        new = [Slot(number) for number in itertools.islice(self._numbers, max(0, wanted))]
        self.slots.update((slot.number, slot) for slot in new)
        return [Start(slot) for slot in new]

    def _refuse(self, now: float) -> list[Action]:
        """Fail the waiters while the breaker is open and no session can become free."""
        open_until = self.breaker.open_until
        if (
            open_until is None
            or now >= open_until
            or any(map(self._may_be_assigned, self.slots.values()))
        ):
            return []
        reason = (
            f"{self.breaker.failures} starts in a row failed, the last with: "
            f"{self.breaker.last_error}; the next attempt is in {open_until - now:.1f} s"
        )
        refused: list[Action] = [Refuse(waiter, reason) for waiter in self.waiters]
        self.waiters.clear()
        return refused

    def _retire(self, slot: Slot, reason: str) -> Action:
        slot.stage = Stage.RETIRING
        self._available.pop(slot.number, None)
        return Retire(slot, reason)

    def _make_available(self, slot: Slot) -> None:
        if not slot.retire_reason and slot.name is None:
            self._available[slot.number] = slot

    # --- questions -----------------------------------------------------------------------------

    def _in(self, stage: Stage) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.stage is stage]

    def _named(self, name: str) -> Slot | None:
        return next((slot for slot in self.slots.values() if slot.name == name), None)

    def _unnamed_idle(self) -> list[Slot]:
        return [slot for slot in self._in(Stage.IDLE) if slot.name is None]

    def _free_idle(self) -> Slot | None:
        """The idle slot that was used last: the others may reach the idle timeout."""
        return max(self._unnamed_idle(), key=lambda slot: slot.idle_since, default=None)

    def _spare_idle(self) -> int:
        """How many idle sessions may be retired when they have been idle for long."""
        return 0 if self.size is not None else len(self._unnamed_idle()) - self.settings.min_idle

    def _stays(self, slot: Slot) -> bool:
        return not slot.retire_reason and slot.stage is not Stage.RETIRING

    def _counts_for_size(self, slot: Slot) -> bool:
        """Whether the pool has its size with this session, so that it needs no successor yet.

        The successor of a session that takes one piece of work at a time starts when that has
        finished, so that no more pieces run than the pool has sessions. With a larger capacity the
        pieces of a retiring session may go on for hours, and its successor starts before.
        """
        is_busy = slot.stage in (Stage.BORROWED, Stage.WORKING)
        return self._stays(slot) or (is_busy and self.capacity == 1)

    def _may_be_assigned(self, slot: Slot) -> bool:
        """Whether a waiter may still get this session."""
        if slot.stage in (Stage.BORROWED, Stage.WORKING):
            return not self.settings.fresh
        return slot.stage is not Stage.RETIRING

    def _unserved(self) -> int:
        """Waiters for whom a session has to be started, not merely returned."""
        return sum(name is None or self._named(name) is None for name in self.waiters.values())
