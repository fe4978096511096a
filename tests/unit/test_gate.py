"""Waiting in the child: gates between threads, timers of the control thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from capsule_tasks.child.control import Timers
from capsule_tasks.child.stopping.condition import Gate
from tests.sessions import HANG_S
from tests.unit.sinks import WatchedGate


class Cancelled(BaseException):
    """Stands for what a signal handler raises."""


def never() -> bool:
    return False


def test_who_finds_the_condition_true_does_not_wait() -> None:
    gate = Gate()
    assert gate.wait(lambda: True)
    assert gate.wait(lambda: True, timeout_s=0)


def test_opening_a_gate_at_which_nobody_waits_is_remembered_by_nobody() -> None:
    gate = Gate()
    gate.open()
    assert not gate.wait(never, timeout_s=0.001)


def test_a_waiter_goes_on_when_its_condition_holds() -> None:
    gate, ready = WatchedGate(), threading.Event()
    thread = threading.Thread(target=gate.wait, args=(ready.is_set,), daemon=True)
    thread.start()
    assert gate.blocked.wait(HANG_S)
    ready.set()
    gate.open()
    thread.join(HANG_S)
    assert not thread.is_alive()


def test_a_waiter_that_is_woken_for_nothing_waits_again() -> None:
    gate, ready = WatchedGate(), threading.Event()
    thread = threading.Thread(target=gate.wait, args=(ready.is_set,), daemon=True)
    thread.start()
    for _ in range(3):
        assert gate.blocked.wait(HANG_S)
        gate.blocked.clear()
        gate.open()
        assert gate.blocked.wait(HANG_S)
    assert thread.is_alive()
    ready.set()
    gate.open()
    thread.join(HANG_S)
    assert not thread.is_alive()


def test_all_waiters_are_woken() -> None:
    gate, ready, through = Gate(), threading.Event(), threading.Semaphore(0)

    def pass_through() -> None:
        gate.wait(ready.is_set)
        through.release()

    for _ in range(5):
        threading.Thread(target=pass_through, daemon=True).start()
    ready.set()
    gate.open()
    for _ in range(5):
        assert through.acquire(timeout=HANG_S)


def test_when_the_time_is_up_the_condition_decides() -> None:
    gate = Gate()
    assert not gate.wait(never, timeout_s=0)
    assert not gate.wait(never, timeout_s=0.01)
    looks = iter([False, True])
    assert gate.wait(lambda: next(looks), timeout_s=0.01)


def test_a_wake_up_between_the_look_and_the_wait_is_not_missed() -> None:
    """The condition comes true, and the gate is opened, while the condition is looked at."""
    gate, state = Gate(), [False]

    def looked_at_too_early() -> bool:
        was, state[0] = state[0], True
        gate.open()
        return was

    assert gate.wait(looked_at_too_early)


def test_one_who_leaves_by_an_exception_takes_nobody_along() -> None:
    gate, ready = WatchedGate(), threading.Event()

    def interrupted() -> bool:
        raise Cancelled

    with pytest.raises(Cancelled):
        gate.wait(interrupted)
    thread = threading.Thread(target=gate.wait, args=(ready.is_set,), daemon=True)
    thread.start()
    assert gate.blocked.wait(HANG_S)
    ready.set()
    gate.open()
    thread.join(HANG_S)
    assert not thread.is_alive()


def test_many_that_wait_and_give_up_leave_nothing_behind() -> None:
    gate = Gate()
    for _ in range(100):
        gate.wait(never, timeout_s=0)
    gate.open()
    assert not gate._waiters


class Clock:
    """Time that passes when a test says so."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(
        "capsule_tasks.child.control.time", SimpleNamespace(monotonic=clock.monotonic)
    )
    return clock


def noting(notes: list[str], name: str) -> Callable[[], None]:
    return lambda: notes.append(name)


def test_timers_without_calls_are_due_never() -> None:
    assert Timers().run_due() is None


def test_timers_call_what_is_due_in_order_and_tell_what_is_next(clock: Clock) -> None:
    timers, calls = Timers(), list[str]()
    for delay_s, name in ((3, "third"), (1, "first"), (2, "second"), (2, "second, too")):
        timers.after(delay_s, noting(calls, name))
    assert timers.run_due() == clock.now + 1
    assert calls == []
    clock.now += 2
    assert timers.run_due() == clock.now + 1
    assert calls == ["first", "second", "second, too"]
    clock.now += 100
    assert timers.run_due() is None
    assert calls[3:] == ["third"]


def test_a_call_may_plan_the_next_one(clock: Clock) -> None:
    timers, beats = Timers(), list[float]()

    def beat() -> None:
        beats.append(clock.now)
        timers.after(2, beat)

    timers.after(2, beat)
    for _ in range(3):
        clock.now += 2
        assert timers.run_due() == clock.now + 2
    assert beats == [1002, 1004, 1006]


def test_a_call_that_is_planned_for_now_is_made_in_the_same_turn(clock: Clock) -> None:
    timers, calls = Timers(), list[str]()
    timers.after(0, lambda: timers.after(0, noting(calls, "second")))
    assert timers.run_due() is None
    assert calls == ["second"]
