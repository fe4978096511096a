"""Any order of events of a pool, with Hypothesis."""

from __future__ import annotations

import itertools

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from capsule_tasks.sessions.pool.plan import (
    Action,
    Assign,
    Refuse,
    Retire,
    Slot,
    Stage,
    Start,
)
from tests.unit.sessions.pool.plans import make


class PoolMachine(RuleBasedStateMachine):
    """Any order of events: the maximum holds, no waiter is served twice, nothing is forgotten."""

    capacity = 1

    def __init__(self) -> None:
        super().__init__()
        self.plan = make(min_idle=1, max_sessions=3, max_uses=3, idle_timeout_s=5.0)
        self.plan.capacity = self.capacity
        self.work: list[Slot] = []
        """The sessions of all pieces of work that have not finished."""
        self.now = 0.0
        self.tickets = itertools.count(1)
        self.waiting: list[int] = []
        self.cancelled: set[int] = set()
        """Members of `waiting` that were cancelled and have not yet informed the plan."""
        self.borrowed_by: dict[int, int] = {}
        self.retiring: set[int] = set()
        self.starting: set[int] = set()
        self.names: dict[int, str | None] = {}
        self.slot_names: dict[int, str | None] = {}
        self.newly_named: set[int] = set()
        """Sessions that were without a name before their present borrower."""

    def act(self) -> None:
        while actions := self.plan.decide(self.now):
            for action in actions:
                self.carry_out(action)

    def carry_out(self, action: Action) -> None:
        match action:
            case Start(slot):
                self.starting.add(slot)
            case Retire(slot):
                assert slot not in self.borrowed_by.values()
                assert all(busy.number != slot for busy in self.work)
                assert slot not in self.retiring
                self.retiring.add(slot)
            case Assign(waiter, slot):
                assert waiter in self.waiting
                assert slot not in self.borrowed_by.values()
                assert all(busy.number != slot for busy in self.work)
                earlier = self.waiting[: self.waiting.index(waiter)]
                owner = self.slot_names.get(slot)
                assert all(self.names[other] != owner for other in earlier)
                self.waiting.remove(waiter)
                if waiter in self.cancelled:
                    self.cancelled.remove(waiter)
                    self.plan.released(slot, self.now, used=False)
                    return
                if self.slot_names.get(slot) is None:
                    self.newly_named.add(slot)
                self.slot_names[slot] = self.names[waiter]
                self.borrowed_by[waiter] = slot
            case Refuse(waiter):
                self.waiting.remove(waiter)
                self.cancelled.discard(waiter)

    @rule(name=st.sampled_from([None, None, "anna", "bert"]))
    def acquire(self, name: str | None) -> None:
        waiter = next(self.tickets)
        self.waiting.append(waiter)
        self.names[waiter] = name
        self.plan.wait(waiter, name)
        self.act()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel_wait(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(waiter)
        self.cancelled.discard(waiter)
        self.plan.cancel_wait(waiter)
        self.act()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def is_cancelled(self, data: st.DataObject) -> None:
        """The plan is informed only when the waiter runs; the waiter may be served before that."""
        self.cancelled.add(data.draw(st.sampled_from(self.waiting)))

    @precondition(lambda self: self.borrowed_by)
    @rule(data=st.data(), used=st.booleans())
    def release(self, data: st.DataObject, used: bool) -> None:
        waiter = data.draw(st.sampled_from(sorted(self.borrowed_by)))
        slot = self.borrowed_by.pop(waiter)
        if slot in self.newly_named and not used:
            self.slot_names[slot] = None  # the name was of a borrower who left nothing there
        self.newly_named.discard(slot)
        self.plan.released(slot, self.now, used=used)
        self.act()

    @precondition(lambda self: self.starting)
    @rule(data=st.data(), succeeds=st.booleans())
    def start_ends(self, data: st.DataObject, succeeds: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.starting)))
        self.starting.remove(slot)
        if succeeds:
            self.plan.started(slot, 100, self.now)
        elif slot in self.retiring:
            self.retiring.discard(slot)
            self.plan.stopped(slot)
        else:
            self.plan.start_failed(slot, "no", self.now)
        self.act()

    @precondition(lambda self: self.retiring - self.starting)
    @rule(data=st.data())
    def is_gone(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.retiring - self.starting)))
        self.retiring.remove(slot)
        self.plan.stopped(slot)
        self.act()

    @precondition(lambda self: self.plan.slots)
    @rule(data=st.data())
    def is_lost(self, data: st.DataObject) -> None:
        self.plan.lost(data.draw(st.sampled_from(sorted(self.plan.slots))), "killed", self.now)
        self.act()

    @rule()
    def assign(self) -> None:
        able = [slot for slot in self.plan.slots.values() if self.may_take_work(slot)]
        least = min((slot.load for slot in able), default=0)
        slot = self.plan.assign()
        assert (slot in able) if able else slot is None
        if slot is not None:
            assert slot.load == least + 1
            self.work.append(slot)
        self.act()

    def may_take_work(self, slot: Slot) -> bool:
        is_there = slot.stage in (Stage.IDLE, Stage.WORKING) and slot.name is None
        return is_there and not slot.retire_reason and self.work.count(slot) < self.capacity

    @precondition(lambda self: self.work)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.work) - 1))
        self.plan.finished(self.work.pop(place), self.now)
        self.act()

    @rule(size=st.integers(0, 3))
    def keep(self, size: int) -> None:
        self.plan.set_size(size, 3)
        self.act()

    @precondition(lambda self: self.plan.slots)
    @rule(data=st.data())
    def is_doomed(self, data: st.DataObject) -> None:
        self.plan.retire_when_idle(data.draw(st.sampled_from(sorted(self.plan.slots))), "it is old")
        self.act()

    @rule(seconds=st.sampled_from([0.1, 3.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.act()

    @invariant()
    def the_maximum_holds(self) -> None:
        assert len(self.plan.slots) <= 3

    @invariant()
    def plan_and_world_agree(self) -> None:
        assert list(self.plan.waiters) == self.waiting
        borrowed = [s.number for s in self.plan.slots.values() if s.stage is Stage.BORROWED]
        assert sorted(borrowed) == sorted(self.borrowed_by.values())

    @invariant()
    def work_is_where_the_plan_says(self) -> None:
        for slot in self.plan.slots.values():
            assert slot.load == self.work.count(slot) <= self.capacity
            assert (slot.stage is Stage.WORKING) == bool(slot.load)

    @invariant()
    def the_size_is_kept(self) -> None:
        plan = self.plan
        is_paused = plan.paused_until is not None and plan.paused_until > self.now
        if plan.size is None or plan.breaker.open_until is not None or is_paused:
            return
        staying = sum(
            slot.stage is not Stage.RETIRING and not slot.retire_reason
            for slot in plan.slots.values()
        )
        busy = sum(
            bool(slot.retire_reason) and slot.stage in (Stage.BORROWED, Stage.WORKING)
            for slot in plan.slots.values()
        )
        filled = staying + (busy if self.capacity == 1 else 0)
        assert filled >= min(plan.size, filled + 3 - len(plan.slots))

    @invariant()
    def what_is_due_now_has_been_done(self) -> None:
        look = self.plan.next_check_at(self.now)
        assert look is None or look > self.now

    @invariant()
    def no_waiter_beside_an_idle_session(self) -> None:
        free = [s for s in self.plan.slots.values() if s.stage is Stage.IDLE and s.name is None]
        assert not (free and any(self.names[waiter] is None for waiter in self.waiting))

    @invariant()
    def a_waiter_has_something_to_wait_for(self) -> None:
        if self.waiting and self.plan.breaker.open_until is None:
            assert self.plan.slots


class PoolOfMany(PoolMachine):
    """The same where each session takes several pieces of work at once."""

    capacity = 3


for machine in (PoolMachine, PoolOfMany):
    machine.TestCase.settings = hypothesis_settings(
        max_examples=60, stateful_step_count=40, deadline=None
    )
TestPool = PoolMachine.TestCase
TestPoolOfMany = PoolOfMany.TestCase
