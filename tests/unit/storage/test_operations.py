"""Which calls are repeated, how often, and which are abandoned: decided without a server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from capsule_tasks.errors import (
    StorageClosed,
    StorageDenied,
    StorageError,
    StorageForgotten,
    StorageFull,
    StorageNotReady,
    StorageUnavailable,
)
from capsule_tasks.settings import RetrySettings
from capsule_tasks.storage.drivers import retry_while_unavailable
from capsule_tasks.storage.operations import Abandon, Pause, call_script, delay_s
from capsule_tasks.storage.scripts import Call, Code, Script

RETRY = RetrySettings(attempts=4, first_delay_s=0.1, max_delay_s=0.3)


def write() -> Call:
    return Call(WRITE, ("i", "b"), ["w:op", 0, b"x"])


def read() -> Call:
    return Call(READ, ("i",), [1])


WRITE = Script("w", ("items", "operations"), ("operation_id", "age_ms", "value"), "", "sha", write)
READ = Script("r", ("items",), ("count",), "", "sha", read)


def lost(*, was_sent: bool = True) -> StorageUnavailable:
    return StorageUnavailable("lost", may_have_written=was_sent)


def test_a_reply_is_handed_on() -> None:
    operation = call_script(write(), RETRY)
    assert next(operation).args == ["w:op", 0, b"x"]  # type: ignore[union-attr]
    with pytest.raises(StopIteration) as done:
        operation.send([Code.DONE, 7])
    assert done.value.value == [Code.DONE, 7]


@pytest.mark.parametrize("error", [lost(), StorageNotReady("loading")], ids=repr)
def test_a_repeat_is_the_same_operation_and_marked_as_a_repeat(error: Exception) -> None:
    operation = call_script(write(), RETRY)
    next(operation)
    pause = operation.throw(error)
    assert isinstance(pause, Pause)
    repeat = next(operation)
    assert isinstance(repeat, Call)
    name, age_ms, value = repeat.args
    assert (name, value) == ("w:op", b"x")
    assert isinstance(age_ms, int)
    assert age_ms > 0


def test_pauses_grow_to_a_bound_and_are_random() -> None:
    seen: list[set[float]] = [set(), set(), set()]
    for _ in range(50):
        operation = call_script(write(), RETRY)
        next(operation)
        for pauses in seen:
            pause = operation.throw(lost())
            assert isinstance(pause, Pause)
            pauses.add(pause.seconds)
            next(operation)
    for pauses, most in zip(seen, (0.1, 0.2, 0.3), strict=True):
        assert 0 < min(pauses) < max(pauses) <= most


@pytest.mark.parametrize("sent_at", [None, 0, 2])
def test_the_final_error_says_whether_any_attempt_may_have_written(sent_at: int | None) -> None:
    operation = call_script(write(), RETRY)
    next(operation)
    for attempt in range(RETRY.attempts - 1):
        assert isinstance(operation.throw(lost(was_sent=attempt == sent_at)), Pause)
        next(operation)
    with pytest.raises(StorageUnavailable) as failure:
        operation.throw(lost(was_sent=False))
    assert failure.value.may_have_written == (sent_at is not None)
    assert failure.value.operation_id == "op"


def test_a_lost_read_wrote_nothing() -> None:
    operation = call_script(read(), RetrySettings(attempts=1))
    next(operation)
    with pytest.raises(StorageUnavailable) as failure:
        operation.throw(lost())
    assert not failure.value.may_have_written
    assert failure.value.operation_id is None


@pytest.mark.parametrize("error", [StorageDenied("no"), StorageFull("no")], ids=repr)
def test_errors_for_an_operator_are_not_retried(error: Exception) -> None:
    operation = call_script(write(), RETRY)
    next(operation)
    with pytest.raises(type(error)):
        operation.throw(error)


def test_closing_in_the_middle_of_a_call_leaves_its_effect_unknown() -> None:
    operation = call_script(write(), RETRY)
    next(operation)
    assert isinstance(operation.throw(lost(was_sent=True)), Pause)
    next(operation)
    with pytest.raises(StorageUnavailable) as failure:
        operation.throw(StorageClosed("closed"))
    assert failure.value.may_have_written
    assert failure.value.operation_id == "op"


def test_a_forgotten_operation_may_have_written() -> None:
    operation = call_script(write(), RETRY)
    next(operation)
    with pytest.raises(StorageForgotten) as failure:
        operation.send([Code.FORGOTTEN])
    assert failure.value.may_have_written


@pytest.mark.parametrize("leaving", [asyncio.CancelledError, KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("in_pause", [False, True])
def test_a_write_is_abandoned_when_its_caller_leaves(
    leaving: type[BaseException], in_pause: bool
) -> None:
    operation = call_script(write(), RETRY)
    next(operation)
    if in_pause:
        operation.throw(lost())
    abandon = operation.throw(leaving())
    assert isinstance(abandon, Abandon)
    assert abandon.call.keys == ("b",)
    assert abandon.call.operation_id == "w:op"
    with pytest.raises(leaving):
        next(operation)


def test_a_read_is_not_abandoned() -> None:
    operation: Any = call_script(read(), RETRY)
    next(operation)
    with pytest.raises(asyncio.CancelledError):
        operation.throw(asyncio.CancelledError())


def test_an_abandoned_operation_is_done_under_the_next_id() -> None:
    """The name stays barred: what was sent under it may still lie in a socket."""
    operation = call_script(write(), RETRY)
    next(operation)
    again = operation.send([Code.ABANDONED])
    assert isinstance(again, Call)
    assert again.args == ["w~:op", 0, b"x"]
    with pytest.raises(StopIteration) as done:
        operation.send([Code.DONE])
    assert done.value.value == [Code.DONE]


def test_the_pauses_of_a_thousand_attempts_stay_bounded() -> None:
    assert delay_s(5000, RETRY) <= RETRY.max_delay_s


async def test_a_retry_reports_each_outage_and_returns_the_answer() -> None:
    faults = [lost(), StorageDenied("who are you")]
    heard: list[StorageError] = []

    async def ask() -> str:
        if faults:
            raise faults.pop(0)
        return "here"

    assert await retry_while_unavailable(ask, on_fault=heard.append) == "here"
    assert [type(fault) for fault in heard] == [StorageUnavailable, StorageDenied]


async def test_an_outage_that_is_too_long_is_raised() -> None:
    async def ask() -> str:
        raise lost()

    with pytest.raises(StorageUnavailable):
        await retry_while_unavailable(ask, -1)
