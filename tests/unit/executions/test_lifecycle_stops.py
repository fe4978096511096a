"""Executions that are stopped, or whose child or worker is lost, in short stories."""

from __future__ import annotations

import signal

import pytest

from capsule_tasks.executions import actions as do
from capsule_tasks.executions.actions import Timer
from capsule_tasks.executions.claims import Refusal
from capsule_tasks.executions.ends import End, EndKind, last_event
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.origin import Origin
from capsule_tasks.executions.states import Run
from capsule_tasks.protocol.events import (
    AttemptEnded,
    CancelCommand,
    Ended,
    InterruptCommand,
    Outcome,
    RespondCommand,
)
from capsule_tasks.protocol.messages import InputRequest
from tests.unit.executions.stories import (
    CLAIM_FIRST,
    CLAIM_LATER,
    CLAIMED,
    COMES_AGAIN,
    DIED,
    DIES,
    EARLY,
    ENDS_WELL,
    LATE,
    NO_STREAM,
    SOMEBODY,
    STARTED,
    STOP,
    claimed,
    fired,
    life_of,
    origin,
    running,
    start,
    terminated,
)

# --- stops -------------------------------------------------------------------------------------


def test_a_cancel_before_the_claim_ends_an_execution_that_never_began() -> None:
    """A command comes with the reply to the claim, before the claim itself."""
    life = life_of(LATE, CLAIM_FIRST)
    cancelled = last_event(terminated(), LATE)
    assert life.handle(Lifecycle.on_command_received, CancelCommand()) == [
        do.FreeSlot(),
        do.PublishEnd(cancelled),
    ]
    assert life.handle(*CLAIMED) == [do.Flush()]
    assert life.handle(Lifecycle.on_end_stored) == [
        do.RecordEnd(cancelled),
        do.ReportEnd(terminated(), frees_slot=False),
    ]


def test_a_claim_that_finds_the_execution_cancelled_ends_it() -> None:
    life = life_of(LATE, CLAIM_FIRST)
    assert life.handle(Lifecycle.on_claim_refused, Refusal.CANCELLED) == [
        do.CloseStream(),
        do.ReportEnd(terminated(), frees_slot=True),
    ]


def test_a_claim_that_finds_the_execution_over_runs_it_unseen() -> None:
    """Celery delivers an id again: an errback called twice, say."""
    life = life_of(LATE, CLAIM_FIRST)
    assert life.handle(Lifecycle.on_claim_refused, Refusal.CLOSED) == [
        do.CloseStream(),
        do.Send(),
    ]


def test_a_cancel_between_the_claim_and_the_start_takes_it_out_of_the_queue() -> None:
    life = life_of(LATE, CLAIM_FIRST, CLAIMED)
    assert life.handle(Lifecycle.on_command_received, CancelCommand(requested_by="me")) == [
        do.Unqueue(),
        do.FreeSlot(),
        do.PublishEnd(last_event(terminated(), LATE)),
    ]


def test_a_cancel_of_a_running_task_goes_to_the_child_and_names_the_requester() -> None:
    life = claimed(LATE)
    command = (Lifecycle.on_command_received, CancelCommand(grace_s=2.0, requested_by="me\n"))
    assert life.handle(*command) == [do.CancelInChild(2.0, "'me\\n' (Execution.cancel)")]


def is_killed_at_limit(
    origin: Origin, signum: int | None, status: int | None, *, is_over_limit: bool = True
) -> bool:
    life = running(origin, admitted=NO_STREAM)
    if signum is not None:
        life.handle(Lifecycle.on_stop_requested, signum, SOMEBODY)
    if is_over_limit:
        life.handle(*fired(Timer.HARD_LIMIT))
    (*_, reported) = life.handle(Lifecycle.on_finished, DIED, status, 2.0)
    assert isinstance(reported, do.ReportEnd)
    return reported.end.kind is EndKind.OVER_LIMIT


@pytest.mark.parametrize(
    ("signum", "status", "is_limit"),
    [
        (None, -signal.SIGKILL, True),
        (signal.SIGTERM, -signal.SIGKILL, True),
        (signal.SIGTERM, -signal.SIGTERM, False),
        (signal.SIGKILL, -signal.SIGKILL, False),
    ],
)
def test_a_signal_refused_until_the_hard_limit_is_not_the_reason(
    signum: int | None, status: int, is_limit: bool
) -> None:
    assert is_killed_at_limit(LATE, signum, status) is is_limit
    assert not is_killed_at_limit(LATE, signum, status, is_over_limit=False)


def test_a_coroutine_that_was_stopped_before_its_limit_has_refused_nothing() -> None:
    coroutine = origin(is_async=True)
    assert not is_killed_at_limit(coroutine, signal.SIGTERM, -signal.SIGKILL)
    assert is_killed_at_limit(coroutine, None, None)


def test_a_cancel_after_the_end_does_nothing() -> None:
    life = claimed(LATE, ENDS_WELL)
    for event in (
        (Lifecycle.on_command_received, CancelCommand()),
        STOP,
        (Lifecycle.on_kill_requested, SOMEBODY),
    ):
        assert life.handle(*event) == []
    life.handle(Lifecycle.on_end_stored)
    assert life.handle(Lifecycle.on_command_received, CancelCommand()) == []


def test_a_doorbell_before_the_claim_leads_to_a_claim_and_reads_its_commands() -> None:
    life = life_of(LATE, CLAIM_LATER, (Lifecycle.on_doorbell_rang,), (Lifecycle.on_sent,))
    assert do.ClaimWithEvents(takes_over=False) in life.handle(*STARTED)
    assert do.ReadCommands() in life.handle(*CLAIMED)
    assert life.handle(Lifecycle.on_doorbell_rang) == [do.ReadCommands()]


def test_only_a_cancel_is_meant_for_an_attempt_that_is_not_claimed() -> None:
    answer = RespondCommand(text="yes")
    life = running(
        LATE, (Lifecycle.on_input_requested, InputRequest(execution_id="id", id="question"))
    )
    assert life.handle(Lifecycle.on_command_received, answer) == []
    life.handle(*CLAIMED)
    assert life.handle(Lifecycle.on_command_received, answer) == [
        do.CommandChild(answer, "question")
    ]


def test_a_command_read_while_the_lease_is_renewed_is_not_lost() -> None:
    life = claimed(LATE, (Lifecycle.on_lease_begun, "new"))
    command = InterruptCommand()
    assert life.handle(Lifecycle.on_command_received, command) == [do.CommandChild(command, "")]


def test_a_hard_limit_after_a_refused_sigterm_kills_and_is_the_reason() -> None:
    life = running(origin(acks_late=True, hard_limit_s=3.0))
    assert life.handle(*STOP) == [do.Signal(signal.SIGTERM, SOMEBODY)]
    assert life.handle(*fired(Timer.HARD_LIMIT)) == [do.Signal(signal.SIGKILL, "")]
    life.handle(*DIES)
    (reported,) = [
        one for one in life.handle(Lifecycle.on_end_stored) if isinstance(one, do.ReportEnd)
    ]
    assert reported.end == End(EndKind.OVER_LIMIT, "TimeLimitExceeded(3.0,)")


def test_a_hard_limit_cancels_first_and_kills_a_task_that_does_not_stop() -> None:
    life = running(origin(hard_limit_s=3.0))
    assert life.handle(*fired(Timer.HARD_LIMIT)) == [
        do.Signal(signal.SIGTERM, ""),
        start(Timer.TIDY),
    ]
    assert life.handle(*fired(Timer.TIDY)) == [do.Signal(signal.SIGKILL, "")]


def test_limits_of_a_coroutine_spare_its_neighbours() -> None:
    life = running(origin(is_async=True, soft_limit_s=1.0, hard_limit_s=3.0))
    assert life.handle(*fired(Timer.SOFT_LIMIT)) == [do.RaiseSoftLimit()]
    assert life.handle(*fired(Timer.HARD_LIMIT)) == [do.CancelInChild(5.0, "")]
    assert life.handle(*STOP) == [do.CancelInChild(5.0, SOMEBODY)]


def test_a_coroutine_whose_child_is_condemned_goes_to_another_one() -> None:
    life = life_of(origin(is_async=True), CLAIM_LATER)
    for _ in range(2):
        life.handle(Lifecycle.on_sent)
        assert life.is_with_child
        assert life.handle(Lifecycle.on_send_refused) == [], (
            "the dispatcher has it in its queue again"
        )
        assert not life.is_with_child
    life.handle(Lifecycle.on_sent)
    assert life.handle(*STARTED)[0] == do.ReportAccepted(1.0, defers_ack=False)


def test_the_requester_of_a_kill_is_named_once() -> None:
    """A cold shutdown asks again and again until the child is gone."""
    life = running(LATE)
    assert life.handle(Lifecycle.on_kill_requested, SOMEBODY) == [
        do.Signal(signal.SIGKILL, SOMEBODY)
    ]
    assert life.handle(Lifecycle.on_kill_requested, SOMEBODY) == [do.Signal(signal.SIGKILL, "")]
    assert running(LATE, STOP).handle(Lifecycle.on_kill_requested, "another") == [
        do.Signal(signal.SIGKILL, "")
    ]


def test_a_stopping_worker_requeues_and_a_terminate_ends_the_task() -> None:
    for is_worker_stopping, event in (
        (True, AttemptEnded(outcome="requeued", detail="its worker was stopped")),
        (False, last_event(terminated(), LATE)),
    ):
        life = claimed(
            LATE, (Lifecycle.on_stop_requested, signal.SIGTERM, SOMEBODY, is_worker_stopping)
        )
        actions = life.handle(Lifecycle.on_finished, DIED, -signal.SIGTERM, 2.0)
        assert do.PublishEnd(event) in actions


# --- losses ------------------------------------------------------------------------------------


def test_a_lost_child_is_judged_before_its_message_is_redelivered() -> None:
    life = claimed(COMES_AGAIN)
    why = End(EndKind.LOST, "Worker exited prematurely: signal 9 (SIGKILL).")
    assert life.handle(*DIES) == [do.JudgeLoss(why)]
    assert life.handle(*DIES) == []
    assert life.handle(Lifecycle.on_loss_judged, None) == [
        do.FreeSlot(),
        do.PublishEnd(AttemptEnded(outcome="requeued", detail=why.message)),
    ]


def test_a_lost_child_is_sent_nothing_while_its_loss_is_judged() -> None:
    question = InputRequest(execution_id="id", id="open")
    life = claimed(COMES_AGAIN, (Lifecycle.on_input_requested, question), DIES)
    assert life.handle(Lifecycle.on_append_refused) == [do.CloseStream()]


def test_a_lost_child_that_is_one_too_many_ends_the_execution() -> None:
    life = claimed(COMES_AGAIN, DIES)
    end = End(EndKind.TOO_MANY_LOSSES, "it has cost 5 processes")
    event = Ended(outcome=Outcome.FAILED, type="TooManyLosses", message=end.message)
    assert do.PublishEnd(event) in life.handle(Lifecycle.on_loss_judged, end)


def test_a_task_stopped_while_its_loss_is_judged_was_terminated() -> None:
    life = claimed(COMES_AGAIN, DIES)
    assert do.PublishEnd(last_event(terminated(), COMES_AGAIN)) in life.handle(*STOP)
    assert life.handle(Lifecycle.on_loss_judged, None) == []


def test_a_child_that_dies_silently_had_begun() -> None:
    """A message that is acknowledged early must not be delivered again."""
    life = life_of(EARLY, CLAIM_LATER, (Lifecycle.on_sent,))
    assert life.handle(*DIES)[0] == do.ReportAccepted(2.0, defers_ack=True)
    assert life.run is Run.OVER


def test_when_the_broker_is_lost_only_tasks_that_have_not_begun_are_requeued() -> None:
    given_back = End(EndKind.REQUEUED, "the connection to the broker was lost")
    waiting = life_of(LATE, CLAIM_LATER)
    assert waiting.handle(Lifecycle.on_broker_lost) == [
        do.Unqueue(),
        do.CloseStream(),
        do.ReportEnd(given_back, frees_slot=True),
    ]
    for life in (running(LATE), claimed(COMES_AGAIN, DIES)):
        assert life.handle(Lifecycle.on_broker_lost) == []
