"""Interceptors see everything and hold up nothing."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from capsule_tasks.sessions.info import Counters
from capsule_tasks.sessions.listeners import Interceptors
from capsule_tasks.settings import RoutingSettings
from tests.sessions import HANG_S

PATIENT = RoutingSettings(interceptor_budget_s=1000.0)
STRICT = RoutingSettings(interceptor_budget_s=0.0001, interceptor_overruns=3, quarantine_queue=4)


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def make(counters: Counters) -> Iterator[Callable[[RoutingSettings], Interceptors]]:
    made: list[Interceptors] = []

    def make(settings: RoutingSettings) -> Interceptors:
        made.append(Interceptors(settings, counters))
        return made[-1]

    yield make
    for interceptors in made:
        interceptors.close()


class Slow:
    """Overruns any budget, and can be watched."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, int]] = []
        self._changed = threading.Condition()

    def __call__(self, message: Any) -> None:
        time.sleep(0.001)
        with self._changed:
            self.seen.append((message, threading.get_ident()))
            self._changed.notify_all()

    @property
    def messages(self) -> list[Any]:
        return [message for message, _ in self.seen]

    def wait_for(self, message: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: message in self.messages, HANG_S)


class Blocking:
    """Return only when told to."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.seen: list[Any] = []

    def __call__(self, message: Any) -> None:
        self.entered.release()
        assert self.gate.acquire(timeout=HANG_S)
        self.seen.append(message)


def quarantined(interceptors: Interceptors, call: Callable[[Any], None]) -> None:
    """Have `call` overrun until it is in quarantine, without being called for that."""
    slow = True

    def stand_in(message: Any) -> None:
        if slow:
            time.sleep(0.001)
        else:
            call(message)

    interceptors.add(stand_in)
    for _ in range(3):
        interceptors.observe("overrun")
    slow = False


def test_each_sees_every_message_in_the_order_they_were_added(make: Any) -> None:
    interceptors, seen = make(PATIENT), []
    interceptors.add(lambda message: seen.append(("first", message)))
    interceptors.add(lambda message: seen.append(("second", message)))
    interceptors.observe(1)
    interceptors.observe(2)
    assert seen == [("first", 1), ("second", 1), ("first", 2), ("second", 2)]


def test_a_coroutine_function_is_refused(make: Any) -> None:
    async def interceptor(_message: Any) -> None: ...

    with pytest.raises(TypeError, match="must be plain"):
        make(PATIENT).add(interceptor)


@pytest.mark.parametrize("fault", [ValueError("odd"), asyncio.CancelledError()], ids=repr)
def test_a_listener_that_fails_is_logged_and_counted_and_the_others_are_called(
    make: Any, counters: Counters, caplog: pytest.LogCaptureFixture, fault: BaseException
) -> None:
    interceptors, seen = make(PATIENT), []

    def failing(_message: Any) -> None:
        raise fault

    interceptors.add(failing)
    interceptors.add(seen.append)
    with caplog.at_level(logging.ERROR):
        interceptors.observe("m")
        interceptors.observe("n")
    assert seen == ["m", "n"]
    assert counters.interceptor_errors_total == 2
    assert "failing" in caplog.text
    assert "on a str" in caplog.text


def test_a_ctrl_c_is_not_held_up(make: Any) -> None:
    interceptors = make(PATIENT)

    def interrupted(_message: Any) -> None:
        raise KeyboardInterrupt

    interceptors.add(interrupted)
    with pytest.raises(KeyboardInterrupt):
        interceptors.observe("m")


def test_within_its_budget_one_is_never_quarantined(make: Any, counters: Counters) -> None:
    interceptors, slow = make(PATIENT), Slow()
    interceptors.add(slow)
    for number in range(20):
        interceptors.observe(number)
    assert slow.seen == [(number, threading.get_ident()) for number in range(20)]
    assert counters.interceptor_quarantine_total == 0


def test_after_three_overruns_one_is_called_on_another_thread(
    make: Any, counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    interceptors, slow = make(STRICT), Slow()
    interceptors.add(slow)
    for number in range(2):
        interceptors.observe(number)
    assert counters.interceptor_quarantine_total == 0
    interceptors.observe(2)
    assert counters.interceptor_quarantine_total == 1
    assert "overran its budget of 0 ms 3 times" in caplog.text
    interceptors.observe("later")
    slow.wait_for("later")
    own = threading.get_ident()
    assert [thread == own for _, thread in slow.seen] == [True, True, True, False]
    assert slow.messages == [0, 1, 2, "later"]


def test_a_fast_one_beside_a_slow_one_stays_where_it_was(make: Any, counters: Counters) -> None:
    settings = RoutingSettings(interceptor_budget_s=0.05, interceptor_overruns=1)
    interceptors, fast = make(settings), []

    def slow(_message: Any) -> None:
        time.sleep(0.06)

    interceptors.add(slow)
    interceptors.add(lambda message: fast.append((message, threading.get_ident())))
    interceptors.observe(1)
    assert counters.interceptor_quarantine_total >= 1
    assert fast[0] == (1, threading.get_ident())


def test_a_listener_in_quarantine_delays_no_other(make: Any) -> None:
    interceptors, blocking = make(STRICT), Blocking()
    quarantined(interceptors, blocking)
    interceptors.observe("a")
    assert blocking.entered.acquire(timeout=HANG_S)
    interceptors.observe("b")  # would never return if it waited
    blocking.gate.release(2)
    assert blocking.entered.acquire(timeout=HANG_S)


def test_the_queue_of_the_quarantine_is_bounded_and_the_oldest_message_goes(
    make: Any, counters: Counters
) -> None:
    interceptors, blocking = make(STRICT), Blocking()
    quarantined(interceptors, blocking)
    interceptors.observe("held")
    assert blocking.entered.acquire(timeout=HANG_S)
    for number in range(10):
        interceptors.observe(number)
    assert counters.interceptor_skipped_total == 10 - STRICT.quarantine_queue
    blocking.gate.release(100)
    for _ in range(STRICT.quarantine_queue):
        assert blocking.entered.acquire(timeout=HANG_S)
    interceptors.observe("last")
    assert blocking.entered.acquire(timeout=HANG_S)
    assert blocking.seen[:5] == ["held", 6, 7, 8, 9]


def test_each_call_that_is_skipped_is_counted_also_at_the_end(
    make: Any, counters: Counters
) -> None:
    interceptors, blocking = make(STRICT), Blocking()
    interceptors.add(lambda _message: time.sleep(0.001))
    quarantined(interceptors, blocking)  # and the one before it in the same call
    assert counters.interceptor_quarantine_total == 2
    interceptors.observe("held")
    assert blocking.entered.acquire(timeout=HANG_S)
    interceptors.observe("waits")
    assert counters.interceptor_skipped_total == 0
    interceptors.close()
    assert counters.interceptor_skipped_total == 2
    blocking.gate.release(100)


def test_a_failure_in_quarantine_is_counted_and_ends_nothing(make: Any, counters: Counters) -> None:
    interceptors, slow = make(STRICT), Slow()

    def failing(_message: Any) -> None:
        raise ValueError

    quarantined(interceptors, failing)
    quarantined(interceptors, slow)
    before = counters.interceptor_errors_total
    interceptors.observe("m")
    slow.wait_for("m")
    assert counters.interceptor_errors_total > before


def test_removing_returns_whether_the_item_was_there_at_any_place(make: Any) -> None:
    interceptors, slow = make(STRICT), Slow()
    assert not interceptors.remove(slow)
    interceptors.add(slow)
    assert interceptors.remove(slow)
    assert not interceptors.remove(slow)
    interceptors.add(slow)
    for number in range(3):
        interceptors.observe(number)
    assert interceptors.remove(slow)
    assert not interceptors.remove(slow)
    interceptors.observe("gone")
    assert slow.messages == [0, 1, 2]


def test_a_listener_may_remove_itself_while_it_is_called(make: Any) -> None:
    interceptors, seen = make(PATIENT), []

    def once(message: Any) -> None:
        seen.append(message)
        assert interceptors.remove(once)

    interceptors.add(once)
    interceptors.add(seen.append)
    interceptors.observe(1)
    interceptors.observe(2)
    assert seen == [1, 1, 2]


def lanes() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "capsule-quarantine"}


def test_there_is_no_thread_before_there_is_a_quarantine_and_none_after_it(make: Any) -> None:
    before, interceptors, slow = lanes(), make(STRICT), Slow()
    interceptors.add(slow)
    for number in range(3):
        interceptors.observe(number)
    assert lanes() == before
    interceptors.observe("m")
    (lane,) = lanes() - before
    interceptors.close()
    interceptors.close()
    lane.join(HANG_S)
    assert not lane.is_alive()


def test_a_quarantine_outlives_a_restart_of_the_session(make: Any, counters: Counters) -> None:
    interceptors, slow = make(STRICT), Slow()
    interceptors.add(slow)
    for number in range(3):
        interceptors.observe(number)
    interceptors.close()
    fresh = Counters()
    interceptors.counters = fresh
    interceptors.observe("of the new child")
    slow.wait_for("of the new child")
    assert slow.seen[-1][1] != threading.get_ident()
    assert (counters.interceptor_quarantine_total, fresh.interceptor_quarantine_total) == (1, 0)
