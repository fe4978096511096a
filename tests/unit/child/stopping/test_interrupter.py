"""Where an exception may be raised, when it is tried again, and when it is dropped."""

from __future__ import annotations

import sched
import sys
from collections.abc import Callable, Iterator
from types import CodeType, SimpleNamespace
from typing import Any

import pytest

from capsule_tasks.child.checkpoints import restoring, saving
from capsule_tasks.child.executors import code, outcomes
from capsule_tasks.child.io.capture import CapturedStream, progress
from capsule_tasks.child.io.sink import OutputSink
from capsule_tasks.child.registry import Execution, Registry, Stage
from capsule_tasks.child.stopping import interrupter as interrupter_module
from capsule_tasks.child.stopping.deferred_stop import InterruptibleCondition, deferred_stop
from capsule_tasks.child.stopping.interrupter import Interrupter
from capsule_tasks.errors import ExecutionCancelled

CHILD = "capsule_tasks.child."
USER = compile("1", "<cell 1>", "exec")


class Clock:
    """A clock that a test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timers(clock: Clock) -> sched.scheduler:
    return sched.scheduler(clock)


@pytest.fixture
def interrupter(timers: sched.scheduler, monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupter]:
    """An interrupter whose signals are counted instead of sent."""
    made: Any = Interrupter(timers)
    made.signals_sent = 0

    def count() -> None:
        made.signals_sent += 1

    monkeypatch.setattr(made, "_send_signal", count)
    yield made
    deferred_stop.is_pending = False


def stack(*functions: CodeType | Callable[..., Any], module: str = "__main__") -> Any:
    """Frames, the outermost first. Code is the user's; functions are this package's own."""
    frame = None
    for function in functions:
        if isinstance(function, CodeType):
            frame = SimpleNamespace(f_code=function, f_globals={"__name__": module}, f_back=frame)
        else:
            frame = SimpleNamespace(
                f_code=function.__code__,
                f_globals={"__name__": function.__module__},
                f_back=frame,
            )
    return frame


LOOP = interrupter_module.Interrupter.request_stop
"""Stands for any function of this package that holds something."""
IN_USER_CODE = (code.enter_blocking, USER)
WAIT = InterruptibleCondition.wait
MAY_BE_STOPPED = {
    "user code": (LOOP, code.enter_blocking, USER),
    "user code that called user code": (LOOP, code.enter_blocking, USER, USER, USER),
    "the entry itself": (LOOP, code.enter_blocking),
    "a coroutine": (LOOP, code.enter_coroutine, USER),
    "a print that waits for credit": (
        LOOP,
        code.enter_blocking,
        USER,
        OutputSink.flush_if_due,
        OutputSink.flush,
        InterruptibleCondition.wait,
    ),
    "progress": (LOOP, code.enter_blocking, USER, progress),
    "a __repr__ of the result": (LOOP, outcomes.enter_result, outcomes.type_name, USER),
    "a __str__ of the error": (LOOP, outcomes.enter_error, outcomes.type_name, USER),
    "a __reduce__ in a checkpoint": (LOOP, saving.enter_save, USER),
}
MUST_NOT = {
    "nothing": (),
    "code of this package before any user code": (LOOP,),
    "user code outside of an execution": (USER,),
    "a callback of this package": (LOOP, USER),
    "code of this package called by user code": (LOOP, code.enter_blocking, USER, LOOP),
    "user code called by code of this package": (LOOP, code.enter_blocking, USER, LOOP, USER),
    "output while it is sent": (
        LOOP,
        code.enter_blocking,
        USER,
        OutputSink.flush_if_due,
        OutputSink._send_ready,
    ),
    "the look at a condition": (
        LOOP,
        code.enter_blocking,
        USER,
        OutputSink.flush,
        InterruptibleCondition.wait,
        LOOP,
    ),
    "a wait outside of an execution": (LOOP, OutputSink.finish, InterruptibleCondition.wait),
}


@pytest.mark.parametrize("functions", MAY_BE_STOPPED.values(), ids=MAY_BE_STOPPED)
def test_an_execution_is_stopped_inside(interrupter: Interrupter, functions: Any) -> None:
    assert interrupter.is_inside(stack(*functions))


@pytest.mark.parametrize("functions", MUST_NOT.values(), ids=MUST_NOT)
def test_nothing_is_stopped_inside(interrupter: Interrupter, functions: Any) -> None:
    assert not interrupter.is_inside(stack(*functions))


def test_a_write_may_be_interrupted_but_not_the_functions_it_calls(
    interrupter: Interrupter,
) -> None:
    sink: Any = None
    write = CapturedStream(1, lambda: None, lambda: sink).write
    write.__module__ = CapturedStream.__module__
    assert interrupter.is_inside(stack(LOOP, code.enter_blocking, USER, write))
    assert not interrupter.is_inside(
        stack(LOOP, code.enter_blocking, USER, write, OutputSink.flush_if_due)
    )


def test_a_module_of_the_user_is_not_taken_for_ours(interrupter: Interrupter) -> None:
    for name in ("capsule_tasks.childish", "capsule_tasks", "enter_here", 5, None):
        user = stack(LOOP, code.enter_blocking)
        user = SimpleNamespace(f_code=USER, f_globals={"__name__": name}, f_back=user)
        assert interrupter.is_inside(user)


def test_a_critical_function_is_left_when_a_function_it_calls_is_interrupted(
    interrupter: Interrupter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupter_module, "_uninterruptible", set())
    interrupter_module.uninterruptible(restoring.enter_restore)
    assert not interrupter.is_inside(stack(LOOP, restoring.enter_restore))
    assert interrupter.is_inside(stack(LOOP, restoring.enter_restore, USER))


# --- requests ----------------------------------------------------------------------------------


def running(name: str = "e") -> Execution:
    nothing: Any = None
    one = Execution(name, nothing, nothing)
    registry = Registry()
    registry.add(one)
    registry.start(one)
    return one


def user_frame() -> Any:
    frame = stack(LOOP, code.enter_blocking, USER)
    frame.f_lasti = 0
    return frame


def passes(interrupter: Any, frame: Any) -> None:
    """A signal changes nothing here. A stray KeyboardInterrupt would end the whole test run."""
    try:
        interrupter._raise_in(frame)
    except BaseException as error:  # noqa: BLE001 - see above
        pytest.fail(f"{error!r} was raised")


def test_a_stop_is_raised_once_and_only_in_its_own_execution(interrupter: Any) -> None:
    one, other = running("one"), running("other")
    interrupter.request_stop(one, lambda: ExecutionCancelled("for one"))
    assert interrupter.signals_sent == 1
    for current in (None, other):
        interrupter._current = lambda current=current: current
        passes(interrupter, user_frame())
    interrupter._current = lambda: one
    with pytest.raises(ExecutionCancelled, match="for one"):
        interrupter._raise_in(user_frame())
    passes(interrupter, user_frame())


def test_a_stop_is_deferred_where_nothing_may_be_raised(interrupter: Any) -> None:
    one = running()
    interrupter._current = lambda: one
    interrupter.request_stop(one, ExecutionCancelled)
    passes(interrupter, stack(LOOP, code.enter_blocking, USER, LOOP))
    assert deferred_stop.is_pending
    with pytest.raises(ExecutionCancelled):
        interrupter._raise_in(user_frame())


def test_a_request_for_an_execution_that_has_ended_is_not_kept(
    interrupter: Any, timers: sched.scheduler
) -> None:
    one = running()
    one.stage = Stage.ENDED
    interrupter.request_stop(one, ExecutionCancelled)
    interrupter._current = lambda: one
    passes(interrupter, user_frame())
    assert timers.empty()
    assert interrupter.signals_sent == 0


def test_a_forgotten_stop_is_not_raised(
    interrupter: Any, clock: Clock, timers: sched.scheduler
) -> None:
    one = running()
    interrupter._current = lambda: one
    interrupter.request_stop(one, ExecutionCancelled)
    interrupter.forget(one)
    interrupter.forget(one)
    passes(interrupter, user_frame())
    clock.now += 1
    timers.run(blocking=False)
    assert timers.empty()
    assert interrupter.signals_sent == 1


def test_a_request_without_an_exception_counts_as_delivered(interrupter: Any) -> None:
    one = running()
    interrupter._current = lambda: one
    request = interrupter.request_stop(one, lambda: None)
    passes(interrupter, user_frame())
    assert request.is_delivered


def test_a_second_request_replaces_the_first(interrupter: Any) -> None:
    one = running()
    interrupter._current = lambda: one
    interrupter.request_stop(one, KeyboardInterrupt)
    interrupter.request_stop(one, ExecutionCancelled)
    with pytest.raises(ExecutionCancelled):
        interrupter._raise_in(user_frame())
    passes(interrupter, user_frame())


def test_until_it_is_delivered_the_signal_is_sent_again_a_little_later_each_time(
    interrupter: Any, clock: Clock, timers: sched.scheduler
) -> None:
    one = running()
    interrupter._current = lambda: one
    interrupter.request_stop(one, ExecutionCancelled)
    waits = []
    for sent in range(1, 12):
        assert interrupter.signals_sent == sent
        wait_s = timers.run(blocking=False)
        assert wait_s is not None
        assert interrupter.signals_sent == sent
        waits.append(wait_s)
        clock.now += wait_s
        timers.run(blocking=False)
    assert waits == sorted(waits)
    assert waits[0] < 0.01
    assert waits[-1] == pytest.approx(0.05)
    with pytest.raises(ExecutionCancelled):
        interrupter._raise_in(user_frame())
    clock.now += 1
    assert timers.run(blocking=False) is None


def test_a_request_that_was_replaced_sends_no_more_signals(
    interrupter: Any, clock: Clock, timers: sched.scheduler
) -> None:
    one = running()
    interrupter.request_stop(one, KeyboardInterrupt)
    interrupter.request_stop(one, ExecutionCancelled)
    clock.now += 0.001
    timers.run(blocking=False)
    assert interrupter.signals_sent == 3
    assert len(timers.queue) == 1


def test_an_exception_that_python_swallowed_is_raised_again(
    interrupter: Any, timers: sched.scheduler
) -> None:
    one = running()
    interrupter._current = lambda: one
    interrupter.request_stop(one, ExecutionCancelled)
    with pytest.raises(ExecutionCancelled) as first:
        interrupter._raise_in(user_frame())
    before = interrupter.signals_sent
    interrupter._on_unraisable(SimpleNamespace(exc_value=first.value))
    assert interrupter.signals_sent == before + 1
    assert not timers.empty()
    with pytest.raises(ExecutionCancelled):
        interrupter._raise_in(user_frame())


def test_another_swallowed_exception_changes_nothing_and_is_reported(interrupter: Any) -> None:
    one, reported = running(), []
    interrupter._current = lambda: one
    interrupter._report_unraisable = reported.append
    interrupter.request_stop(one, ExecutionCancelled)
    with pytest.raises(ExecutionCancelled):
        interrupter._raise_in(user_frame())
    strange = SimpleNamespace(exc_value=ValueError("in __del__"))
    interrupter._on_unraisable(strange)
    interrupter._on_unraisable(SimpleNamespace(exc_value=ExecutionCancelled("not this one")))
    passes(interrupter, user_frame())
    assert reported == [strange]


def test_making_an_interrupter_changes_nothing_in_the_process(timers: sched.scheduler) -> None:
    before = sys.unraisablehook
    Interrupter(timers)
    assert sys.unraisablehook is before
