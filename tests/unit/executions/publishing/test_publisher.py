"""The publisher and its stream writers, over a link whose replies the test gives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any
from unittest.mock import Mock

import pytest

from capsule_tasks.errors import StorageUnavailable
from capsule_tasks.executions import background
from capsule_tasks.executions.execution import Execution
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.publishing.stream_writer import StreamWriter
from capsule_tasks.executions.states import Claim
from capsule_tasks.protocol.events import (
    RUN_ELSEWHERE,
    Accepted,
    AttemptClaimed,
    AttemptEnded,
    Ended,
    decode_event,
)
from capsule_tasks.protocol.messages import (
    Error,
    ErrorKind,
    Failure,
    Output,
    RunEvent,
    TaskResult,
)
from capsule_tasks.storage.executions.store import UNCLAIMED
from capsule_tasks.storage.scripts import Call, Code
from tests.streaming import Ground, eventually, new_execution, reporter_of

OWNER = "incarnation"
CLAIM_OF, APPEND_OF = "executions/claim", "executions/append"


class Link:
    """Takes calls in place of a connection; the test answers them, oldest first."""

    def __init__(self) -> None:
        self.calls: list[tuple[Call, Callable[[Any], object]]] = []
        self.held: list[str] = []

    def send_nowait(
        self, call: Call, answer: Callable[[Any], object], *, may_batch: bool = False
    ) -> None:
        del may_batch
        self.calls.append((call, answer))

    def sent(self) -> list[str]:
        return [call.script.name for call, _ in self.calls]

    def answer(self, *reply: Any) -> Call:
        call, answer = self.calls.pop(0)
        answer(list(reply))
        return call

    def fail(self) -> None:
        _, answer = self.calls.pop(0)
        answer(StorageUnavailable("Redis: it is away"))


@pytest.fixture
async def ground() -> AsyncIterator[Ground]:
    """A supervisor under a lease; nothing runs in the background."""
    ground = Ground("redis://nowhere.invalid")
    lease = ground.publisher.lease
    lease.incarnation = OWNER
    lease.is_held.set()
    yield ground
    await ground.publisher.background.stop()


@pytest.fixture
def link(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> Link:
    link = Link()
    monkeypatch.setattr(ground.publisher.connection, "send_nowait", link.send_nowait)
    monkeypatch.setattr(ground.publisher.lease, "hold_soon", lambda writers: hold(link, writers))
    return link


def hold(link: Link, writers: Iterable[StreamWriter]) -> None:
    for writer in writers:
        link.held.append(writer.execution_id)
        writer.is_held = True


def output(text: str) -> Output:
    return Output(execution_id="e", stream="stdout", data=text)


def started(ground: Ground, task_id: str = "e", **origin: Any) -> Execution:
    execution = ground.admitted(new_execution(task_id, **origin))
    ground.begin(execution)
    return execution


def events_of(call: Call) -> list[Any]:
    """The events that a call carries: they are its last arguments."""
    first = 9 if call.script.name == CLAIM_OF else 7
    return [decode_event(data)[0] for data in call.args[first:] if isinstance(data, bytes)]


async def test_a_task_that_ends_in_silence_is_one_call_and_never_held(
    ground: Ground, link: Link
) -> None:
    execution = started(ground)
    ground.finish(execution)
    assert link.sent() == [CLAIM_OF]
    assert not link.held
    call = link.answer(Code.DONE, b"7", b"3")
    assert [type(event) for event in events_of(call)] == [AttemptClaimed, Accepted, Ended]
    assert call.args[2] == UNCLAIMED
    assert reporter_of(execution).heard == ["accepted", "free slot", "ended"]
    assert execution.life.claim is Claim.CLOSED


async def test_the_first_output_claims_and_later_output_waits_for_the_reply(
    ground: Ground, link: Link
) -> None:
    execution = started(ground)
    for text in ("a", "b", "c"):
        assert ground.supervisor.on_message(execution, output(text))
    assert link.sent() == [CLAIM_OF]
    assert link.held == ["e"]
    call = link.answer(Code.DONE, b"7", b"3")
    assert [event.data for event in events_of(call)[2:]] == ["a"]
    assert link.sent() == [APPEND_OF]
    call = link.calls[0][0]
    assert call.args[:2] == [7, 4]
    assert [event.data for event in events_of(call)] == ["bc"]
    assert execution.life.claim is Claim.CLAIMED


async def test_the_end_goes_behind_the_output_that_waits(ground: Ground, link: Link) -> None:
    execution = started(ground)
    ground.supervisor.on_message(execution, output("first"))
    ground.supervisor.on_message(execution, output("last"))
    ground.finish(execution)
    link.answer(Code.DONE, b"7", b"3")
    assert "ended" not in reporter_of(execution).heard
    call = link.answer(Code.DONE, b"5")
    assert [type(event).__name__ for event in events_of(call)] == ["Output", "Ended"]
    assert reporter_of(execution).heard[-1] == "ended"
    assert ground.publisher.budget.waiting_bytes == 0


async def test_events_of_a_refused_claim_are_sent_again_after_the_previous_end(
    ground: Ground, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Execution] = []
    monkeypatch.setattr(
        ground.publisher.claimer,
        "await_previous_end",
        lambda writer: looked.append(writer.execution),
    )
    execution = started(ground)
    ground.supervisor.on_message(execution, output("kept"))
    refused = link.answer(Code.STALE, b"6", b"another-claim")
    assert looked == [execution]
    assert not link.calls
    ground.supervisor.feed(execution, Lifecycle.on_previous_ended)
    again = link.answer(Code.DONE, b"7", b"3")
    assert again.args[9:] == refused.args[9:]
    assert again.args[2] == ""  # from any owner
    assert execution.life.claim is Claim.CLAIMED


async def test_a_stale_attempt_publishes_nothing_more(ground: Ground, link: Link) -> None:
    execution = started(ground)
    ground.supervisor.on_message(execution, output("mine"))
    link.answer(Code.DONE, b"7", b"3")
    ground.supervisor.on_message(execution, output("late"))
    link.answer(Code.STALE, b"8", b"again-another")
    assert execution.life.claim is Claim.CLOSED
    assert ground.supervisor.on_message(execution, output("later")) is None
    ground.finish(execution)
    assert not link.calls
    assert ground.publisher.budget.waiting_bytes == 0
    assert reporter_of(execution).heard == ["accepted", "ended"]


async def test_a_call_whose_reply_is_lost_is_made_again_until_redis_answers(
    ground: Ground, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "RETRY_DELAY_S", 0.0)
    made: list[Call] = []

    async def make(call: Call) -> list[Any]:
        made.append(call)
        if len(made) < 3:
            raise StorageUnavailable("Redis: it is away")
        return [Code.DONE, b"7", b"3"]

    monkeypatch.setattr(ground.publisher.store, "call", make)
    execution = started(ground)
    ground.supervisor.on_message(execution, output("a"))
    call = link.calls[0][0]
    link.fail()
    await eventually(lambda: execution.life.claim is Claim.CLAIMED)
    assert made == [call] * 3


async def test_nothing_is_sent_under_a_lost_lease_and_the_claim_is_repeated(
    ground: Ground, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Call] = []

    async def make(call: Call) -> list[Any]:
        made.append(call)
        return [Code.DONE, b"9", b"1"]

    monkeypatch.setattr(ground.publisher.store, "call", make)
    execution = started(ground)
    ground.supervisor.on_message(execution, output("under the old lease"))
    link.answer(Code.DONE, b"7", b"3")
    ground.supervisor.on_message(execution, output("on its way"))
    ground.publisher.lease.incarnation = "new"
    ground.supervisor.feed(execution, Lifecycle.on_lease_begun, "new")
    assert not made  # the call on its way belongs to the attempt before
    ground.supervisor.on_message(execution, output("waits"))
    link.answer(Code.DONE, b"4")
    await eventually(lambda: execution.life.claim is Claim.CLAIMED)
    assert [call.args[1:3] for call in made] == [["new", OWNER]]
    assert made[0].args[0] != ""
    call = link.answer(Code.DONE, b"2")
    assert call.args[:2] == [9, 2]
    assert [event.data for event in events_of(call)] == ["waits"]


async def test_an_execution_that_a_reaper_ended_while_it_runs_is_not_taken_for_a_repeated_one(
    ground: Ground, link: Link, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def make(_: Call) -> list[Any]:
        return [Code.ENDED, b"lost"]

    monkeypatch.setattr(ground.publisher.store, "call", make)
    execution = started(ground)
    ground.supervisor.on_message(execution, output("under the old lease"))
    link.answer(Code.DONE, b"7", b"3")
    ground.publisher.lease.incarnation = "new"
    ground.supervisor.feed(execution, Lifecycle.on_lease_begun, "new")
    await eventually(lambda: execution.life.claim is Claim.CLOSED)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "another attempt owns the stream" in record.message


async def test_a_full_window_stops_the_reading_until_redis_has_taken_some(link: Link) -> None:
    ground = Ground("redis://nowhere.invalid", may_drop=False, window_bytes=1024)
    ground.publisher.lease.incarnation = OWNER
    ground.publisher.lease.is_held.set()
    ground.publisher.connection.send_nowait = link.send_nowait  # type: ignore[method-assign]
    ground.publisher.lease.hold_soon = lambda writers: hold(link, writers)  # type: ignore[method-assign]
    execution = started(ground)
    execution.child = child = Mock()
    execution.child_execution_id = "e"
    assert ground.supervisor.on_message(execution, output("x" * 2048)) is False
    child.session.resume_output.assert_not_called()
    link.answer(Code.DONE, b"7", b"3")
    child.session.resume_output.assert_called_once_with("e")
    await ground.publisher.background.stop()


async def test_a_redelivered_attempt_that_was_never_seen_leaves_no_trace(
    ground: Ground, link: Link
) -> None:
    execution = ground.admitted(new_execution("e"))
    ground.supervisor.requeue_waiting()
    assert not link.calls
    assert execution.life.is_over
    assert reporter_of(execution).heard == ["ended"]


async def test_a_successor_has_the_attempt_before_claimed_first(ground: Ground, link: Link) -> None:
    before = started(ground)
    ground.admitted(new_execution("e", is_retry=True))
    assert link.sent() == [CLAIM_OF]
    assert before.life.claim is Claim.CLAIMING


async def test_a_task_that_its_worker_lets_go_of_ends_its_attempt_only(
    ground: Ground, link: Link
) -> None:
    execution = started(ground, acks_late=True)
    ground.supervisor.feed(execution, Lifecycle.on_stop_requested, 15, "the worker", True)
    lost = Error(execution_id="e", kind=ErrorKind.LOST, type="SessionLost", message="")
    ground.supervisor.finished(execution, lost, -15)
    call = link.answer(Code.DONE, b"7", b"3")
    assert isinstance(events_of(call)[-1], AttemptEnded)


# --- durable runs ------------------------------------------------------------------------------

RUN = {"is_async": True, "claims_with_output": True, "acks_late": True}


def said(kind: str) -> RunEvent:
    return RunEvent(execution_id="e", kind=kind, json=b"null")


async def test_a_run_is_claimed_with_its_first_event_and_not_with_output(
    ground: Ground, link: Link
) -> None:
    """A library that prints, or a line of the log, does not say that this attempt has the run."""
    execution = started(ground, **RUN)
    assert ground.supervisor.on_message(execution, output("a warning"))
    ground.publisher.claimer._on_doorbell(b"e")
    ground.publisher.claimer._on_doorbell(None)
    assert link.sent() == link.held == []

    ground.supervisor.on_message(execution, said("run_claimed"))
    assert (link.sent(), link.held) == ([CLAIM_OF], ["e"])
    call = link.answer(Code.DONE, b"7", b"3")
    kinds = [type(event).__name__ for event in events_of(call)]
    assert kinds == ["AttemptClaimed", "Accepted", "Output", "RunEvent"]
    assert ground.publisher.writers["e"] is execution.stream


async def test_a_run_that_another_worker_has_leaves_nothing_behind(
    ground: Ground, link: Link
) -> None:
    execution = started(ground, **RUN)
    ground.supervisor.on_message(execution, output("the run is left to others"))
    ignored = Failure(module="celery.exceptions", name="Ignore", message=RUN_ELSEWHERE)
    ground.supervisor.finished(execution, TaskResult(execution_id="e", failure=ignored), None)
    assert link.sent() == link.held == []
    assert reporter_of(execution).heard == ["accepted", "ended"]
    assert "e" not in ground.publisher.writers


async def test_a_second_delivery_takes_no_commands_of_the_first(ground: Ground, link: Link) -> None:
    """Both are in one worker; the first one drives the run."""
    first = started(ground, **RUN)
    ground.supervisor.on_message(first, said("run_claimed"))
    link.answer(Code.DONE, b"7", b"3")
    second = started(ground, is_redelivered=True, **RUN)
    assert ground.publisher.writers["e"] is first.stream
    ignored = Failure(module="celery.exceptions", name="Ignore", message=RUN_ELSEWHERE)
    ground.supervisor.finished(second, TaskResult(execution_id="e", failure=ignored), None)
    assert ground.publisher.writers["e"] is first.stream
    ground.supervisor.on_message(first, said("turn"))
    assert link.sent() == [APPEND_OF]
