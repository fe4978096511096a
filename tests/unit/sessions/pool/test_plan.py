"""The pool's decisions, without I/O and with a clock of their own."""

from __future__ import annotations

import pytest

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
from tests.unit.sessions.pool.plans import make


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


def test_a_fresh_pool_retires_a_used_session_and_starts_another() -> None:
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
def test_a_session_past_its_limits_is_retired_and_replaced(
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


def test_idle_sessions_beyond_the_minimum_retire_after_the_timeout() -> None:
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


def test_a_breaker_that_may_close_plans_no_more_wake_ups() -> None:
    """Not while its one attempt runs, and not while no borrower waits: no busy loop."""
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


def test_a_shrinking_pool_does_not_count_retiring_sessions() -> None:
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


def test_a_session_that_was_used_or_retired_is_no_early_exit() -> None:
    plan = kept(3, 4)
    slot = assigned(plan)
    plan.lost(slot.number, "killed", 0.0)
    plan.retire_when_idle(2, "the pool was restarted")
    assert not plan.lost(2, "killed", 0.0)
    assert plan.early_exits == 0
