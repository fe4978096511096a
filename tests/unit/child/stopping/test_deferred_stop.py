"""Waiting in the child, which an exception from a signal handler may interrupt."""

from __future__ import annotations

import threading

import pytest

from capsule_tasks.child.stopping.deferred_stop import InterruptibleCondition
from tests.sessions import HANG_S
from tests.unit.child.io.sinks import WatchedCondition


class Cancelled(BaseException):
    """Stands for an exception that a signal handler raises."""


def never() -> bool:
    return False


def test_a_thread_that_finds_the_predicate_true_does_not_wait() -> None:
    condition = InterruptibleCondition()
    assert condition.wait(lambda: True)
    assert condition.wait(lambda: True, timeout_s=0)


def test_a_notification_without_waiters_is_not_remembered() -> None:
    condition = InterruptibleCondition()
    condition.notify_all()
    assert not condition.wait(never, timeout_s=0.001)


def test_a_waiter_returns_when_its_predicate_holds() -> None:
    condition, ready = WatchedCondition(), threading.Event()
    thread = threading.Thread(target=condition.wait, args=(ready.is_set,), daemon=True)
    thread.start()
    assert condition.blocked.wait(HANG_S)
    ready.set()
    condition.notify_all()
    thread.join(HANG_S)
    assert not thread.is_alive()


def test_a_waiter_whose_predicate_is_still_false_waits_again() -> None:
    condition, ready = WatchedCondition(), threading.Event()
    thread = threading.Thread(target=condition.wait, args=(ready.is_set,), daemon=True)
    thread.start()
    for _ in range(3):
        assert condition.blocked.wait(HANG_S)
        condition.blocked.clear()
        condition.notify_all()
        assert condition.blocked.wait(HANG_S)
    assert thread.is_alive()
    ready.set()
    condition.notify_all()
    thread.join(HANG_S)
    assert not thread.is_alive()


def test_all_waiters_are_woken() -> None:
    condition, ready, through = InterruptibleCondition(), threading.Event(), threading.Semaphore(0)

    def pass_through() -> None:
        condition.wait(ready.is_set)
        through.release()

    for _ in range(5):
        threading.Thread(target=pass_through, daemon=True).start()
    ready.set()
    condition.notify_all()
    for _ in range(5):
        assert through.acquire(timeout=HANG_S)


def test_when_the_time_is_up_the_predicate_decides() -> None:
    condition = InterruptibleCondition()
    assert not condition.wait(never, timeout_s=0)
    assert not condition.wait(never, timeout_s=0.01)
    checks = iter([False, True])
    assert condition.wait(lambda: next(checks), timeout_s=0.01)


def test_a_wake_up_between_the_check_and_the_wait_is_not_missed() -> None:
    """The predicate becomes true, and waiters are notified, while it is being checked."""
    condition, state = InterruptibleCondition(), [False]

    def checked_too_early() -> bool:
        was, state[0] = state[0], True
        condition.notify_all()
        return was

    assert condition.wait(checked_too_early)


def test_a_waiter_that_leaves_by_an_exception_takes_no_other_waiter_along() -> None:
    condition, ready = WatchedCondition(), threading.Event()

    def interrupted() -> bool:
        raise Cancelled

    with pytest.raises(Cancelled):
        condition.wait(interrupted)
    thread = threading.Thread(target=condition.wait, args=(ready.is_set,), daemon=True)
    thread.start()
    assert condition.blocked.wait(HANG_S)
    ready.set()
    condition.notify_all()
    thread.join(HANG_S)
    assert not thread.is_alive()


def test_waiters_that_time_out_leave_nothing_behind() -> None:
    condition = InterruptibleCondition()
    for _ in range(100):
        condition.wait(never, timeout_s=0)
    condition.notify_all()
    assert not condition.waiters
