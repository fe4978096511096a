"""The executions a child knows: stages, early cancels, exactly one end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from capsule_tasks.child.registry import _MAX_EARLY_CANCELS, Execution, Registry, Stage
from capsule_tasks.protocol.messages import Cancel, Checkpoint, Code, Execute
from tests.sessions import HANG_S


def execution(name: str = "e", on_busy: Any = "refuse") -> Execution:
    sink: Any = None
    work = Execute(execution_id=name, seq=1, payload=Code(source="1"), on_busy=on_busy)
    return Execution(name, work, sink)


def cancel(name: str = "e", seq: int = 1) -> Cancel:
    return Cancel(execution_id=name, seq=seq)


def test_an_execution_waits_runs_and_is_forgotten() -> None:
    registry, one = Registry(), execution()
    registry.add(one)
    assert registry.get("e") is registry.first_waiting() is one
    assert (one.stage, registry.running()) == (Stage.WAITING, [])
    assert registry.start(one)
    assert (one.stage, registry.running(), registry.waiting) == (Stage.RUNNING, [one], [])
    assert registry.end(one, Stage.RUNNING)
    assert one.stage is Stage.ENDED
    assert (registry.get("e"), registry.all(), registry.running()) == (None, [], [])


def test_executions_start_in_the_order_of_arrival() -> None:
    registry, names = Registry(), ["a", "b", "c"]
    for name in names:
        registry.add(execution(name))
    started = []
    while (first := registry.first_waiting()) is not None:
        assert registry.start(first)
        started.append(first.id)
    assert started == names


def test_an_execution_that_waits_may_end_at_once_and_never_starts() -> None:
    registry, one = Registry(), execution()
    registry.add(one)
    assert registry.end(one, Stage.WAITING)
    assert not registry.start(one)
    assert registry.first_waiting() is None


@pytest.mark.parametrize("expected", Stage)
def test_an_end_is_for_one_stage_and_comes_once(expected: Stage) -> None:
    registry, one = Registry(), execution()
    registry.add(one)
    registry.start(one)
    assert registry.end(one, expected) == (expected is Stage.RUNNING)
    assert not registry.end(one, Stage.WAITING)
    assert registry.end(one, Stage.RUNNING) == (expected is not Stage.RUNNING)
    assert not registry.end(one, Stage.RUNNING)


def test_nothing_starts_twice() -> None:
    registry, one = Registry(), execution()
    registry.add(one)
    assert registry.start(one)
    assert not registry.start(one)


def test_only_one_of_many_threads_ends_an_execution() -> None:
    registry = Registry()
    barrier = threading.Barrier(4)
    winners: list[str] = []
    executions = [execution(str(number)) for number in range(200)]
    for one in executions:
        registry.add(one)

    def race() -> None:
        barrier.wait(HANG_S)
        winners.extend(one.id for one in executions if registry.end(one, Stage.WAITING))

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert sorted(winners, key=int) == [one.id for one in executions]


def test_claiming_the_main_thread_returns_the_executions_that_will_not_wait() -> None:
    registry, runner = Registry(), execution("runner")
    patient, hasty = execution("patient", "wait"), execution("hasty", "refuse")
    sink: Any = None
    job = Execution("job", Checkpoint(id="job", max_bytes=1), sink)
    for one in (runner, patient, hasty, job):
        registry.add(one)
    registry.start(runner)
    assert registry.claim_main_thread(runner) == [hasty]
    assert registry.blocking is runner
    registry.end(runner, Stage.RUNNING)
    assert registry.blocking is None


def test_the_main_thread_stays_taken_when_another_execution_ends() -> None:
    registry, runner, other = Registry(), execution("runner"), execution("other")
    for one in (runner, other):
        registry.add(one)
        registry.start(one)
    registry.claim_main_thread(runner)
    registry.end(other, Stage.RUNNING)
    assert registry.blocking is runner


# --- cancels -----------------------------------------------------------------------------------


def test_cancels_that_overtook_their_execute_wait_for_it() -> None:
    registry, first, second = Registry(), cancel(seq=1), cancel(seq=1)
    assert registry.remember_early_cancel(first)
    assert registry.remember_early_cancel(second)
    assert registry.take_early_cancels(1) == [first, second]
    assert registry.take_early_cancels(1) == []


def test_a_cancel_for_an_ended_execution_is_not_remembered_for_a_later_one() -> None:
    registry = Registry()
    registry.take_early_cancels(3)
    for seq in (3, 1):
        assert not registry.remember_early_cancel(cancel(seq=seq))
        assert registry.take_early_cancels(seq) == []
    assert registry.remember_early_cancel(cancel(seq=4))


def test_a_later_number_is_not_taken_back() -> None:
    registry = Registry()
    registry.take_early_cancels(5)
    registry.take_early_cancels(2)
    assert not registry.remember_early_cancel(cancel(seq=5))


def test_early_cancels_are_bounded_and_the_oldest_goes() -> None:
    registry = Registry()
    for number in range(1, _MAX_EARLY_CANCELS + 11):
        assert registry.remember_early_cancel(cancel(seq=number))
    assert registry.take_early_cancels(10) == []
    assert len(registry.take_early_cancels(11)) == 1
    assert len(registry.take_early_cancels(_MAX_EARLY_CANCELS + 10)) == 1


def test_a_cancel_is_for_the_execution_of_its_number_and_not_for_a_namesake() -> None:
    registry, one = Registry(), execution()
    registry.add(one)
    assert registry.target_of(cancel(seq=1)) is one
    assert registry.target_of(cancel(seq=2)) is None
    assert registry.target_of(cancel("other", seq=1)) is None


def test_a_cancel_is_answered_with_the_end_or_at_once_if_that_has_been() -> None:
    registry, one, asked = Registry(), execution(), cancel()
    registry.add(one)
    assert registry.add_cancel(one, asked)
    registry.end(one, Stage.WAITING)
    assert not registry.add_cancel(one, asked)
    assert one.cancels == [asked]
