"""Timers of the control thread."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from capsule_tasks.child.timers import Timers


class Clock:
    """Time that passes when a test says so."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(
        "capsule_tasks.child.timers.time", SimpleNamespace(monotonic=clock.monotonic)
    )
    return clock


def recording(calls: list[str], name: str) -> Callable[[], None]:
    return lambda: calls.append(name)


def test_timers_without_calls_are_never_due() -> None:
    assert Timers().run_due() is None


def test_due_calls_are_made_in_order_and_the_next_time_is_returned(clock: Clock) -> None:
    timers, calls = Timers(), list[str]()
    for delay_s, name in ((3, "third"), (1, "first"), (2, "second"), (2, "second, too")):
        timers.after(delay_s, recording(calls, name))
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


def test_a_call_that_is_planned_for_now_is_made_in_the_same_pass(clock: Clock) -> None:
    timers, calls = Timers(), list[str]()
    timers.after(0, lambda: timers.after(0, recording(calls, "second")))
    assert timers.run_due() is None
    assert calls == ["second"]
