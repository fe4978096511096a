"""What a host decides about its sessions."""

from __future__ import annotations

from typing import Any

import pytest

from capsule_tasks.errors import InternalError
from capsule_tasks.executions.hosting.plan import (
    EVICT_AFTER_IDLE_S,
    EVICT_AFTER_S,
    EVICT_AT_ONCE,
    TAKE_AT_ONCE,
    UNUSED_TIMEOUT_S,
    HostLimits,
    HostPlan,
    Leave,
    Save,
    Stage,
    Why,
    WorkerRoom,
)


def make(**limits: Any) -> HostPlan:
    return HostPlan(HostLimits(**({"max_live": 2, "idle_timeout_s": 100.0} | limits)))


def with_idle(plan: HostPlan, *names: str, executed: int = 1) -> HostPlan:
    """A plan with sessions that are idle since the times 0, 1, …"""
    for at, name in enumerate(names):
        plan.take(name, float(at))
        plan.taken(name, float(at))
        for _ in range(executed):
            plan.executed(name)
        plan.idle(name, float(at))
    return plan


def test_there_is_room_for_max_live_sessions() -> None:
    plan = make(max_live=2)
    assert plan.room() == 2
    plan.take("a", 0.0)
    plan.take("b", 0.0)
    assert plan.room() == 0
    assert plan.is_full
    plan.left("a")
    assert plan.room() == 1


def test_few_sessions_are_taken_at_once() -> None:
    plan = make(max_live=100)
    for number in range(TAKE_AT_ONCE):
        plan.take(str(number), 0.0)
    assert plan.room() == 0
    plan.taken("0", 0.0)
    assert plan.room() == 1


def test_a_profile_without_room_takes_nothing() -> None:
    assert make(max_live=0).room() == 0


def test_a_session_that_is_here_is_not_taken_again() -> None:
    plan = make()
    plan.take("a", 0.0)
    assert not plan.may_take("a", 0.0)
    with pytest.raises(InternalError, match="'a' is taken twice"):
        plan.take("a", 0.0)


def test_a_session_that_could_not_be_taken_is_left_alone_longer_each_time() -> None:
    plan = make()
    pauses = []
    now = 0.0
    for _ in range(8):
        plan.take("a", now)
        pauses.append(plan.failed("a", now))
        assert not plan.may_take("a", now + pauses[-1] - 0.01)
        now += pauses[-1]
        assert plan.may_take("a", now)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    plan.take("a", now)
    plan.taken("a", now)
    plan.left("a")
    plan.take("a", now)
    assert plan.failed("a", now) == 1.0


def test_only_attempts_without_a_child_count_as_failures() -> None:
    plan = make()
    counted = []
    for had_no_child in (False, True, False, True):
        plan.take("a", 0.0)
        plan.failed("a", 0.0, had_no_child=had_no_child)
        counted.append(plan.failures("a"))
    assert counted == [0, 1, 1, 2]


def test_an_idle_session_leaves_after_its_time() -> None:
    plan = with_idle(make(idle_timeout_s=10.0), "a")
    assert plan.decide(9.9) == []
    assert plan.next_check_at() == 10.0
    assert plan.decide(10.0) == [Leave("a", Why.IDLE)]
    assert plan.decide(11.0) == []
    assert plan.next_check_at() is None


def test_a_session_that_has_never_run_a_call_leaves_soon() -> None:
    plan = make(idle_timeout_s=2 * UNUSED_TIMEOUT_S)
    for name in ("a", "b"):
        plan.take(name, 0.0)
        plan.taken(name, 0.0, is_unused=True)
    plan.executed("b")
    for name in ("a", "b"):
        plan.idle(name, 0.0)
    assert plan.next_check_at() == UNUSED_TIMEOUT_S
    assert plan.decide(UNUSED_TIMEOUT_S - 0.1) == []
    assert plan.decide(UNUSED_TIMEOUT_S) == [Leave("a", Why.IDLE)]
    assert plan.next_check_at() == 2 * UNUSED_TIMEOUT_S


def test_a_changed_session_is_saved_once_it_has_been_idle() -> None:
    plan = with_idle(make(checkpoint_idle_s=5.0), "a")
    assert plan.decide(4.9) == []
    assert plan.next_check_at() == 5.0
    assert plan.decide(5.0) == [Save("a")]
    assert plan.seats["a"].stage is Stage.SAVING
    plan.saved("a", 5.1, is_saved=True)
    assert plan.decide(50.0) == []


def test_a_session_that_ran_nothing_is_not_saved() -> None:
    plan = with_idle(make(checkpoint_idle_s=5.0), "a", executed=0)
    assert plan.decide(50.0) == []


def test_a_checkpoint_that_failed_is_put_off() -> None:
    plan = with_idle(make(checkpoint_idle_s=5.0), "a")
    plan.decide(5.0)
    plan.saved("a", 5.0, is_saved=False)
    assert plan.decide(5.9) == []
    assert plan.decide(6.0) == [Save("a")]
    plan.saved("a", 6.0, is_saved=False)
    assert plan.next_check_at() == 8.0


def test_a_session_with_many_calls_is_saved_between_them() -> None:
    plan = make(checkpoint_every=2)
    plan.take("a", 0.0)
    plan.taken("a", 0.0)
    plan.executed("a")
    assert plan.between_calls("a", 0.0) is None
    plan.executed("a")
    assert plan.between_calls("a", 0.0) == Save("a")
    plan.saved("a", 0.0, is_saved=False)
    assert plan.between_calls("a", 0.5) is None
    plan.saved("a", 1.0, is_saved=True)
    assert plan.between_calls("a", 9.0) is None


def test_a_session_whose_child_was_lost_has_nothing_to_save() -> None:
    plan = with_idle(make(checkpoint_idle_s=5.0), "a")
    plan.lost_state("a")
    assert plan.decide(50.0) == []


def test_an_old_session_leaves_also_between_calls() -> None:
    plan = make(max_age_s=10.0)
    for name in ("a", "b"):
        plan.take(name, 0.0)
        plan.taken(name, 0.0)
    plan.idle("b", 1.0)
    assert plan.between_calls("a", 9.9) is None
    assert plan.between_calls("a", 10.0) == Leave("a", Why.OLD)
    assert plan.next_check_at() == 10.0
    assert plan.decide(10.0) == [Leave("b", Why.OLD)]


def test_the_longest_idle_session_gives_way() -> None:
    plan = with_idle(make(), "a", "b")
    assert plan.decide(10.0) == []
    plan.want_room(9)
    later = with_idle(make(max_live=3), "a", "b")
    later.want_room(9)
    assert later.decide(10.0) == []  # there is room
    plan.busy("a")
    assert plan.decide(10.0) == [Leave("b", Why.EVICTED)]


def test_few_sessions_are_evicted_at_once() -> None:
    names = [str(number) for number in range(10)]
    plan = with_idle(make(max_live=10), *names)
    plan.want_room(9)
    assert plan.decide(20.0) == [Leave(name, Why.EVICTED) for name in names[:EVICT_AT_ONCE]]
    assert plan.decide(20.0) == []


def test_a_caller_that_goes_on_keeps_its_session_for_a_while() -> None:
    plan = with_idle(make(max_live=1), "a")
    plan.want_room(9)
    assert plan.decide(0.0) == []
    assert plan.next_check_at() == EVICT_AFTER_IDLE_S
    assert plan.decide(EVICT_AFTER_IDLE_S) == [Leave("a", Why.EVICTED)]
    used = with_idle(make(max_live=1), "a")
    used.want_room(9)
    used.busy("a")
    used.idle("a", EVICT_AFTER_S)
    assert used.decide(EVICT_AFTER_S) == [Leave("a", Why.EVICTED)]


def in_one_worker(together: int, **limits: Any) -> tuple[WorkerRoom, HostPlan, HostPlan]:
    """Two profiles of a worker, of five sessions each."""
    room = WorkerRoom(together)
    kind = HostLimits(**({"max_live": 5, "idle_timeout_s": 100.0} | limits))
    return room, room.add_profile("p", kind), room.add_profile("q", kind)


def test_a_worker_has_room_for_its_maximum_over_all_profiles() -> None:
    room, p, q = in_one_worker(3)
    p.take("a", 0.0)
    q.take("b", 0.0)
    assert (p.room(), q.room(), p.is_full) == (1, 1, False)
    q.take("c", 0.0)
    assert (p.room(), q.room(), p.is_full, q.is_full) == (0, 0, True, True)
    assert not p.may_take("d", 0.0)
    q.left("c")
    assert p.may_take("d", 0.0)
    p.take("d", 0.0)
    assert room.left() == 0


def test_a_full_worker_evicts_its_longest_idle_sessions_of_all_profiles() -> None:
    room, p, q = in_one_worker(4)
    with_idle(p, "p0", "p1")
    with_idle(q, "q0", "q1")
    q.busy("q0")
    q.idle("q0", 9.0)
    assert room.decide(10.0) == []
    p.want_room(9)
    assert room.next_check_at() == EVICT_AFTER_IDLE_S
    assert room.decide(EVICT_AFTER_IDLE_S) == [("p", Leave("p0", Why.EVICTED))]
    assert room.decide(5.0) == [("p", Leave("p1", Why.EVICTED)), ("q", Leave("q1", Why.EVICTED))]
    p.left("p0")
    assert room.decide(10.0) == []
    assert room.next_check_at() is None


def test_no_more_sessions_are_evicted_than_are_wanted() -> None:
    room, p, q = in_one_worker(4)
    with_idle(p, "p0", "p1")
    with_idle(q, "q0", "q1")
    q.want_room(1)
    assert room.decide(10.0) == [("p", Leave("p0", Why.EVICTED))]
    assert room.decide(10.0) == []
    alone = with_idle(make(), "a", "b")
    alone.want_room(1)
    assert alone.decide(10.0) == [Leave("a", Why.EVICTED)]
    assert alone.decide(10.0) == []


def test_few_sessions_of_a_worker_are_evicted_at_once() -> None:
    room, p, q = in_one_worker(8)
    with_idle(p, *(f"p{number}" for number in range(4)))
    with_idle(q, *(f"q{number}" for number in range(4)))
    q.want_room(9)
    assert len(room.decide(20.0)) == EVICT_AT_ONCE
    assert room.next_check_at() is None


def test_a_profile_that_has_its_own_maximum_evicts_none_of_another() -> None:
    room, p, q = in_one_worker(4, max_live=2)
    with_idle(p, "p0", "p1")
    with_idle(q, "q0", "q1")
    q.want_room(9)
    assert room.decide(10.0) == []
    assert q.decide(10.0) == [Leave("q0", Why.EVICTED), Leave("q1", Why.EVICTED)]


def test_a_session_without_a_checkpoint_does_not_give_way_to_another_profile() -> None:
    room, p, q = in_one_worker(2)
    with_idle(p, "p0")
    with_idle(q, "q0")
    q.want_room(9)
    p.evict(p.seats["p0"])
    p.saved("p0", 10.0, is_saved=False)
    p.stays("p0")
    p.idle("p0", 10.0)
    assert room.decide(10.0) == [("q", Leave("q0", Why.EVICTED))]
    assert room.next_check_at() == 11.0


def test_a_call_that_comes_first_keeps_the_session() -> None:
    plan = with_idle(make(idle_timeout_s=1.0), "a")
    plan.decide(1.0)
    plan.stays("a")
    assert plan.seats["a"].stage is Stage.BUSY


def test_a_worker_that_stops_leaves_everything_and_takes_nothing() -> None:
    plan = with_idle(make(max_live=5), "a")
    plan.take("b", 0.0)
    plan.taken("b", 0.0)
    plan.is_stopping = True
    assert plan.room() == 0
    assert plan.decide(0.0) == [Leave("a", Why.STOPPING)]
    assert plan.between_calls("b", 0.0) == Leave("b", Why.STOPPING)


def test_a_wrong_move_names_the_session() -> None:
    plan = make()
    plan.take("a", 0.0)
    with pytest.raises(InternalError, match="session 'a' that is TAKING cannot become IDLE"):
        plan.idle("a", 0.0)


def test_a_session_that_ends_here_may_have_been_listed_since() -> None:
    plan = with_idle(make(), "a")
    assert not plan.is_leaving("a")
    plan.gives_back("a")
    assert plan.is_leaving("a")
    plan.left("a")
    plan.gives_back("a")
    assert plan.is_leaving("a")
    assert plan.room() == 2
