"""The pool's decisions, without I/O and with a clock of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from capsule_tasks.sessions.pool.plan import (
    EARLY_EXITS,
    Action,
    Assign,
    PoolPlan,
    Refuse,
    Retire,
    Slot,
    Stage,
    Start,
)
from capsule_tasks.settings import PoolSettings


class Plan(PoolPlan):
    """Tests name slots by their numbers, in events and in actions."""

    def decide(self, now: float) -> list[Any]:
        return [
            action._replace(slot=action.slot.number) if hasattr(action, "slot") else action
            for action in super().decide(now)
        ]


def by_number(event: Callable[..., Any]) -> Callable[..., Any]:
    def told(plan: PoolPlan, slot: Any, *details: Any, **named: Any) -> Any:
        slot = plan.slots[slot] if isinstance(slot, int) else slot
        return event(plan, slot, *details, **named)

    return told


EVENTS = (
    PoolPlan.started,
    PoolPlan.start_failed,
    PoolPlan.released,
    PoolPlan.reported,
    PoolPlan.heartbeat_missed,
    PoolPlan.retire_when_idle,
    PoolPlan.lost,
    PoolPlan.stopped,
)
for event in EVENTS:
    setattr(Plan, event.__name__, by_number(event))


def make(**changes: object) -> Any:
    changes.setdefault("fresh", False)
    return Plan(PoolSettings(**changes))  # type: ignore[arg-type]


def started(plan: PoolPlan, actions: list[Action], now: float = 0.0) -> list[Action]:
    """Every start succeeds; what is decided then."""
    for action in actions:
        if isinstance(action, Start):
            plan.started(action.slot, 100, now)
    return plan.decide(now)


def test_the_idle_minimum_is_started_at_once_and_not_twice() -> None:
    plan = make(min_idle=2, max_sessions=4)
    assert plan.decide(0.0) == [Start(1), Start(2)]
    assert plan.decide(0.0) == []


def test_waiters_are_served_in_the_order_they_came() -> None:
    plan = make(min_idle=0, max_sessions=1)
    for waiter in (11, 12, 13):
        plan.wait(waiter)
    assert started(plan, plan.decide(0.0)) == [Assign(11, 1)]
    plan.released(1, 0.0)
    assert plan.decide(0.0) == [Assign(12, 1)]
    plan.released(1, 0.0)
    assert plan.decide(0.0) == [Assign(13, 1)]


def test_a_waiter_that_gave_up_is_passed_over() -> None:
    plan = make(min_idle=0, max_sessions=1)
    plan.wait(1)
    plan.wait(2)
    starts = plan.decide(0.0)
    plan.cancel_wait(1)
    assert started(plan, starts) == [Assign(2, 1)]


def test_a_fresh_pool_retires_what_was_used_and_starts_another() -> None:
    plan = make(min_idle=1, max_sessions=2, fresh=True)
    starts = plan.decide(0.0)
    plan.wait(1)
    assert started(plan, starts) == [Assign(1, 1), Start(2)]
    plan.released(1, 0.0)
    assert plan.decide(0.0) == [Retire(1, "it was used, and each borrower gets a fresh one")]


def test_a_session_given_back_unused_is_still_fresh() -> None:
    plan = make(min_idle=1, max_sessions=1, fresh=True)
    starts = plan.decide(0.0)
    plan.wait(1)
    started(plan, starts)
    plan.released(1, 0.0, used=False)
    plan.wait(2)
    assert plan.decide(0.0) == [Assign(2, 1)]


@pytest.mark.parametrize(
    ("changes", "wear", "reason"),
    [
        ({"max_uses": 1}, "use", "it was used 1 times or more"),
        ({"max_age_s": 5.0}, "age", "it is older than 5.0 s"),
        ({"max_growth_bytes": 50}, "growth", "its memory has grown by 50 bytes or more"),
        ({"max_rss_bytes": 150}, "growth", "it uses 160 bytes of memory, and may use 150"),
        ({}, "silence", "its heartbeat is missing"),
        ({}, "loss", "killed"),
    ],
)
def test_a_worn_session_is_retired_and_replaced(
    changes: dict[str, object], wear: str, reason: str
) -> None:
    plan = make(min_idle=1, max_sessions=2, **changes)
    started(plan, plan.decide(0.0))
    now = 0.0
    if wear == "use":
        plan.wait(1)
        plan.decide(now)
        plan.released(1, now)
    elif wear == "age":
        now = 5.0
    elif wear == "growth":
        plan.reported(1, 160)
    elif wear == "silence":
        plan.heartbeat_missed(1)
    else:
        plan.lost(1, "killed", now)
    assert plan.decide(now)[0] == Retire(1, reason)
    assert [slot.number for slot in plan.slots.values() if slot.stage is Stage.STARTING] == [2]


def test_the_count_of_uses_belongs_to_the_session_not_to_its_successor() -> None:
    plan = make(min_idle=1, max_sessions=1, max_uses=2)
    starts = plan.decide(0.0)
    retired = []
    for waiter in range(6):
        plan.wait(waiter)
        actions = started(plan, starts)
        (give,) = [action for action in actions if isinstance(action, Assign)]
        plan.released(give.slot, 0.0)
        starts = plan.decide(0.0)
        for action in starts:
            if isinstance(action, Retire):
                retired.append(action.slot)
                plan.stopped(action.slot)
        starts += plan.decide(0.0)
    assert retired == [1, 2, 3]


def test_idle_sessions_beyond_the_minimum_leave_after_the_timeout() -> None:
    plan = make(min_idle=1, max_sessions=3, idle_timeout_s=10.0)
    actions = plan.decide(0.0)
    for waiter in (1, 2, 3):
        plan.wait(waiter)
    gives = started(plan, actions + plan.decide(0.0))
    for give in gives:
        assert isinstance(give, Assign)
        plan.released(give.slot, 0.0)
    assert plan.decide(0.0) == []
    assert plan.next_check_at(0.0) == 10.0
    assert len(plan.decide(10.0)) == 2
    assert plan.next_check_at(10.0) is None


def test_a_named_session_keeps_its_name_and_is_waited_for() -> None:
    plan = make(min_idle=0, max_sessions=2, fresh=True)
    plan.wait(1, "anna")
    assert started(plan, plan.decide(0.0)) == [Assign(1, 1)]
    plan.wait(2, "anna")
    assert plan.decide(0.0) == []
    plan.released(1, 0.0)
    assert plan.decide(0.0) == [Assign(2, 1)]


def test_a_session_given_back_unused_does_not_keep_the_name_it_was_lent_under() -> None:
    plan = make(min_idle=0, max_sessions=1)
    plan.wait(1, "anna")
    started(plan, plan.decide(0.0))
    plan.released(1, 0.0, used=False)
    plan.wait(2, "bert")
    assert plan.decide(0.0) == [Assign(2, 1)]
    plan.released(1, 0.0)
    plan.wait(3, "bert")
    assert plan.decide(0.0) == [Assign(3, 1)]
    plan.released(1, 0.0, used=False)  # the name is bert's since he used it
    assert plan.slots[1].name == "bert"


def test_an_idle_named_session_gives_way_when_the_pool_is_full() -> None:
    plan = make(min_idle=0, max_sessions=1)
    plan.wait(1, "anna")
    started(plan, plan.decide(0.0))
    plan.released(1, 0.0)
    plan.wait(2, "bert")
    assert plan.decide(0.0) == [Retire(1, "another borrower needs its place")]
    plan.stopped(1)
    assert started(plan, plan.decide(0.0)) == [Assign(2, 2)]


def test_repeated_failures_open_the_breaker_and_tell_the_waiters() -> None:
    plan = make(min_idle=0, max_sessions=1, breaker_failures=2, breaker_reset_s=5.0)
    plan.wait(1)
    for _ in range(2):
        (start,) = plan.decide(0.0)
        assert isinstance(start, Start)
        plan.start_failed(start.slot, "no memory", 0.0)
    (refusal,) = plan.decide(0.0)
    assert isinstance(refusal, Refuse)
    assert "2 starts in a row failed, the last with: no memory" in refusal.reason
    assert plan.next_check_at(0.0) == 5.0


def test_the_half_open_breaker_tries_one_start_and_closes_when_it_succeeds() -> None:
    plan = make(min_idle=3, max_sessions=3, breaker_failures=1, breaker_reset_s=5.0)
    for start in plan.decide(0.0):
        assert isinstance(start, Start)
        plan.start_failed(start.slot, "no", 0.0)
    assert plan.decide(4.9) == []
    (only,) = plan.decide(5.0)
    assert isinstance(only, Start)
    assert len(started(plan, [only], 5.0)) == 2


def test_a_breaker_whose_time_is_over_asks_for_no_more_looks() -> None:
    """Neither while its one attempt runs, nor while nobody wants a session: that was a spin."""
    for min_idle in (0, 1):
        plan = make(min_idle=min_idle, max_sessions=1, breaker_failures=1, breaker_reset_s=5.0)
        plan.wait(1)
        (start,) = plan.decide(0.0)
        assert isinstance(start, Start)
        plan.start_failed(start.slot, "no", 0.0)
        plan.decide(0.0)
        assert plan.next_check_at(0.0) == 5.0
        assert len(plan.decide(5.0)) == min_idle
        assert plan.next_check_at(5.0) is None
        assert plan.next_check_at(60.0) is None


def test_stopping_refuses_the_waiters_and_retires_everything_once() -> None:
    plan = make(min_idle=2, max_sessions=2)
    started(plan, plan.decide(0.0))
    for waiter in (1, 2, 3):
        plan.wait(waiter)
    plan.decide(0.0)
    plan.stopping = True
    kinds = [type(action) for action in plan.decide(0.0)]
    assert kinds == [Refuse, Retire, Retire]
    assert plan.decide(0.0) == []


# --- a pool that is kept at a size, and whose sessions take work -------------------------------


def kept(size: int, most: int, capacity: int = 1, **changes: object) -> PoolPlan:
    """A pool whose sessions are ready."""
    plan = make(min_idle=0, **changes)
    plan.capacity = capacity
    plan.set_size(size, most)
    assert started(plan, plan.decide(0.0)) == []
    return plan


def assigned(plan: PoolPlan) -> Slot:
    slot = plan.assign()
    assert slot is not None
    return slot


def test_work_goes_to_the_session_that_has_been_free_for_longest() -> None:
    plan = kept(3, 4)
    first, second = assigned(plan), assigned(plan)
    plan.finished(second, 0.0)
    plan.finished(first, 0.0)
    assert [assigned(plan).number for _ in range(3)] == [3, second.number, first.number]
    assert plan.assign() is None


def test_work_goes_to_the_session_that_has_the_least() -> None:
    plan = kept(2, 11, capacity=2)
    slots = [assigned(plan) for _ in range(4)]
    assert [slot.number for slot in slots] == [1, 2, 1, 2]
    assert plan.assign() is None
    plan.finished(slots[3], 0.0)
    assert assigned(plan) is slots[3]


def test_the_successor_of_a_session_that_takes_one_thing_at_a_time_starts_when_that_is_done() -> (
    None
):
    plan = kept(1, 2, max_uses=1)
    slot = assigned(plan)
    assert plan.decide(0.0) == []
    plan.finished(slot, 0.0)
    assert plan.decide(0.0) == [Retire(1, "it was used 1 times or more"), Start(2)]


def test_the_successor_of_a_session_that_takes_many_starts_beside_it() -> None:
    plan = kept(1, 3, capacity=5, max_uses=2)
    first, last = assigned(plan), assigned(plan)
    assert first is last
    assert plan.decide(0.0) == [Start(2)]
    plan.finished(first, 0.0)
    assert plan.decide(0.0) == []
    plan.finished(last, 0.0)
    assert plan.decide(0.0) == [Retire(1, "it was used 2 times or more")]


def test_a_session_that_grows_too_large_at_its_work_takes_nothing_new() -> None:
    plan = kept(1, 2, capacity=5, max_rss_bytes=150)
    assigned(plan)
    assert not plan.reported(1, 150)
    assert plan.reported(1, 151)
    assert not plan.reported(1, 152)  # once is enough
    assert plan.assign() is None
    assert plan.decide(0.0) == [Start(2)]


def test_a_fresh_pool_has_one_session_for_each_piece_of_work() -> None:
    plan = kept(1, 2, fresh=True)
    slot = assigned(plan)
    assert plan.assign() is None
    plan.finished(slot, 0.0)
    assert [type(action) for action in plan.decide(0.0)] == [Retire, Start]


def test_a_kept_session_stays_however_long_it_is_idle_or_silent() -> None:
    plan = kept(2, 3, idle_timeout_s=1.0)
    plan.heartbeat_missed(1)
    assert plan.decide(100.0) == []
    assert plan.next_check_at(100.0) is None


def test_a_pool_that_shrinks_lets_the_least_busy_go_when_they_have_finished() -> None:
    plan = kept(3, 12, capacity=2)
    slots = [assigned(plan) for _ in range(4)]
    plan.finished(slots[1], 0.0)
    plan.set_size(1, 10)
    assert plan.decide(0.0) == [Retire(2, "the pool has shrunk")]
    plan.finished(slots[2], 0.0)
    assert plan.slots[3].retire_reason or plan.slots[1].retire_reason
    assert sum(not slot.retire_reason for slot in plan.slots.values()) == 1


def test_a_pool_that_shrinks_counts_on_no_session_that_leaves_anyway() -> None:
    plan = kept(2, 3)
    slot = assigned(plan)
    plan.retire_when_idle(slot.number, "a task met its hard limit")
    plan.set_size(1, 2)
    assert plan.decide(0.0) == []
    plan.finished(slot, 0.0)
    assert plan.decide(0.0) == [Retire(1, "a task met its hard limit")]


def test_sessions_that_end_before_their_first_use_are_replaced_ever_more_slowly() -> None:
    plan = kept(1, 2)
    now = 0.0
    pauses = []
    for number in range(1, EARLY_EXITS + 4):
        assert plan.lost(number, "killed", now)
        assert not plan.lost(number, "killed", now)
        assert plan.decide(now)[0] == Retire(number, "killed")
        plan.stopped(number)
        due = plan.next_check_at(now)
        pauses.append(0.0 if due is None else due - now)
        now = due or now
        plan.decide(now)
        plan.started(number + 1, 100, now)
    assert pauses == pytest.approx([0.0] * EARLY_EXITS + [0.2, 0.4, 0.8])
    plan.finished(assigned(plan), now)
    assert plan.early_exits == 0


def test_a_session_that_was_used_or_was_to_leave_is_no_early_exit() -> None:
    plan = kept(3, 4)
    slot = assigned(plan)
    plan.lost(slot.number, "killed", 0.0)
    plan.retire_when_idle(2, "the pool was restarted")
    assert not plan.lost(2, "killed", 0.0)
    assert plan.early_exits == 0


class PoolMachine(RuleBasedStateMachine):
    """Any order of events: the maximum holds, nobody is served twice, nothing is forgotten."""

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
        """Those of `waiting` that were cancelled, and have not yet told the plan."""
        self.borrowed_by: dict[int, int] = {}
        self.retiring: set[int] = set()
        self.starting: set[int] = set()
        self.names: dict[int, str | None] = {}
        self.slot_names: dict[int, str | None] = {}

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
        """The plan hears of it only when the waiter runs; it may be served before that."""
        self.cancelled.add(data.draw(st.sampled_from(self.waiting)))

    @precondition(lambda self: self.borrowed_by)
    @rule(data=st.data(), used=st.booleans())
    def release(self, data: st.DataObject, used: bool) -> None:
        waiter = data.draw(st.sampled_from(sorted(self.borrowed_by)))
        self.plan.released(self.borrowed_by.pop(waiter), self.now, used=used)
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
    def nobody_waits_beside_an_idle_session(self) -> None:
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
