"""The life of an execution in short stories: an event comes in, these actions come out."""

from __future__ import annotations

import pytest

from capsule_tasks.executions import actions as do
from capsule_tasks.executions.actions import Timer
from capsule_tasks.executions.claims import Refusal, Streaming
from capsule_tasks.executions.ends import End, EndKind, end_of_traced
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.origin import Origin
from capsule_tasks.executions.states import Ack, Claim
from capsule_tasks.protocol.events import AttemptEnded, Ended, Outcome
from capsule_tasks.protocol.messages import InputRequest
from tests.unit.executions.stories import (
    CLAIM_FIRST,
    CLAIM_LATER,
    CLAIMED,
    DIES,
    EARLY,
    ENDS_WELL,
    LATE,
    NO_STREAM,
    OURS,
    REPLACED,
    RETRY,
    STARTED,
    SUCCESS,
    THEIRS,
    WELL,
    Event,
    claimed,
    fired,
    life_of,
    origin,
    running,
    start,
)

# --- new tasks ---------------------------------------------------------------------------------


def test_an_acknowledgement_of_a_child_that_was_assumed_to_have_started_changes_nothing() -> None:
    assert running().handle(Lifecycle.on_child_started, 1.5) == []


def test_an_early_acknowledged_task_that_prints_after_5_ms_and_ends_after_8() -> None:
    life = Lifecycle(EARLY)
    assert life.handle(*CLAIM_LATER) == [do.Send()]
    assert life.handle(Lifecycle.on_sent) == []
    assert life.handle(*STARTED) == [
        do.ReportAccepted(1.0, defers_ack=True),
        do.PublishStart(),
    ]
    assert life.handle(Lifecycle.on_first_output) == [do.ClaimWithEvents(takes_over=False)]
    assert life.handle(*ENDS_WELL) == [  # Redis has not answered
        do.FreeSlot(),
        do.PublishEnd(SUCCESS),
    ]
    assert life.handle(Lifecycle.on_hold_recorded, OURS) == []
    assert life.handle(*CLAIMED) == [do.Flush()]
    assert life.handle(Lifecycle.on_end_stored) == [
        do.RecordEnd(SUCCESS),
        do.Acknowledge(),
        do.ReportEnd(end_of_traced(WELL), frees_slot=False),
    ]


def test_a_short_task_is_claimed_with_its_end() -> None:
    life = running(LATE)
    assert life.handle(*ENDS_WELL)[-2:] == [
        do.PublishEnd(SUCCESS),
        do.ClaimWithEvents(takes_over=False),
    ]
    reported = do.ReportEnd(end_of_traced(WELL), frees_slot=False)
    assert life.handle(Lifecycle.on_end_stored) == [do.RecordEnd(SUCCESS), reported]
    assert life.claim is Claim.CLOSED


def test_a_silent_early_acknowledged_task_is_acknowledged_when_its_claim_is_sure() -> None:
    life = running(EARLY)
    assert life.handle(Lifecycle.on_claim_due) == [
        do.ClaimWithEvents(takes_over=False),
        start(Timer.CLAIM_WAIT),
    ]
    assert life.handle(*CLAIMED) == [do.RecordRunning(), do.Flush()]
    assert life.handle(Lifecycle.on_hold_recorded, OURS) == [
        start(Timer.CLAIM_WAIT),
        do.ConfirmLease(OURS),
    ]
    assert life.handle(Lifecycle.on_lease_confirmed, OURS) == [do.Acknowledge()]
    assert life.handle(*fired(Timer.CLAIM_WAIT)) == []


@pytest.mark.parametrize(
    "news",
    [
        [CLAIMED, (Lifecycle.on_lease_confirmed, OURS)],
        [CLAIMED, (Lifecycle.on_hold_recorded, THEIRS), (Lifecycle.on_lease_confirmed, OURS)],
        [CLAIMED, (Lifecycle.on_hold_recorded, OURS), (Lifecycle.on_lease_confirmed, THEIRS)],
        [(Lifecycle.on_hold_recorded, OURS), (Lifecycle.on_lease_confirmed, OURS)],
        [
            (Lifecycle.on_claim_stored, THEIRS, OURS),
            (Lifecycle.on_hold_recorded, THEIRS),
            (Lifecycle.on_lease_confirmed, THEIRS),
        ],
    ],
    ids=["not noted", "noted under another", "another confirmed", "not stored", "lease lost"],
)
def test_a_claim_that_is_not_sure_acknowledges_nothing_until_redis_had_its_time(
    news: list[Event],
) -> None:
    life = running(EARLY, (Lifecycle.on_claim_due,), *news)
    assert life.ack is Ack.DEFERRED
    assert life.handle(*fired(Timer.CLAIM_WAIT)) == [do.Acknowledge()]


def test_a_claim_that_redis_refuses_acknowledges_at_once() -> None:
    life = running(EARLY, (Lifecycle.on_claim_due,))
    assert life.handle(Lifecycle.on_claim_refused, Refusal.CLOSED) == [
        do.CloseStream(),
        do.Acknowledge(),
    ]
    assert life.handle(*ENDS_WELL) == [
        do.ReportEnd(end_of_traced(WELL), frees_slot=True),
    ]


def test_a_task_without_a_stream_is_acknowledged_by_celery_and_reported_at_once() -> None:
    life = life_of(EARLY, NO_STREAM, (Lifecycle.on_sent,))
    assert life.handle(*STARTED) == [do.ReportAccepted(1.0, defers_ack=False)]
    assert life.handle(*ENDS_WELL) == [
        do.ReportEnd(end_of_traced(WELL), frees_slot=True),
    ]


def test_a_question_claims_at_once_and_is_closed_when_it_cannot_be_published() -> None:
    life = running()
    question = InputRequest(execution_id="id", id="question")
    assert life.handle(Lifecycle.on_input_requested, question) == [
        do.Publish(question),
        do.ClaimWithEvents(takes_over=False),
    ]
    assert life.handle(Lifecycle.on_claim_refused, Refusal.CLOSED) == [
        do.CloseStream(),
        do.EndInput("question"),
    ]
    assert life.handle(Lifecycle.on_input_requested, question) == [do.EndInput("question")]


# --- retries, redeliveries, replacements -------------------------------------------------------


def test_a_retry_waits_until_its_previous_attempt_has_ended() -> None:
    life = Lifecycle(origin(acks_late=True, is_retry=True))
    assert life.handle(*CLAIM_FIRST) == [start(Timer.START_WAIT), do.AwaitPrevious()]
    assert life.handle(Lifecycle.on_previous_ended) == [do.ClaimFirst()]
    assert life.handle(*CLAIMED) == [do.RecordRunning(), do.Send(), do.Flush()]


def test_a_retry_begins_when_redis_had_its_time_and_is_claimed_when_redis_is_back() -> None:
    life = life_of(origin(ack_waits_for_claim=True, is_retry=True), CLAIM_FIRST)
    assert life.handle(*fired(Timer.START_WAIT)) == [do.Send()]
    life.handle(Lifecycle.on_sent)
    assert do.Acknowledge() in life.handle(*STARTED), "Redis had its time before the beginning"
    assert life.handle(Lifecycle.on_previous_ended) == [do.ClaimFirst()]
    assert life.handle(*CLAIMED) == [do.RecordRunning(), do.Flush()]


def test_the_wait_for_a_claim_that_came_does_not_shorten_that_for_the_acknowledgement() -> None:
    life = life_of(
        origin(ack_waits_for_claim=True, is_retry=True), CLAIM_FIRST, (Lifecycle.on_previous_ended,)
    )
    life.handle(*CLAIMED)
    life.handle(Lifecycle.on_sent)
    assert do.Acknowledge() not in life.handle(*STARTED)
    assert life.handle(*fired(Timer.START_WAIT)) == []
    assert life.handle(*fired(Timer.CLAIM_WAIT)) == [do.Acknowledge()]


def test_a_late_claim_that_is_repeated_does_not_count_as_the_awaited_one() -> None:
    life = life_of(
        EARLY, CLAIM_FIRST, fired(Timer.START_WAIT), CLAIMED, (Lifecycle.on_lease_begun, "new")
    )
    life.handle(Lifecycle.on_sent)
    assert do.Acknowledge() not in life.handle(*STARTED)


def test_a_redelivered_message_is_judged_and_its_stale_owner_is_ignored() -> None:
    """The worker that had the message stood still, and its child still runs the task."""
    stale = claimed(LATE)
    again = Lifecycle(origin(acks_late=True, is_redelivered=True))
    assert again.handle(*CLAIM_FIRST) == [start(Timer.START_WAIT), do.ClaimFirst()]
    assert do.JudgeLoss(None) in again.handle(*CLAIMED)
    assert again.handle(Lifecycle.on_loss_judged, None) == [do.Send()]

    assert stale.handle(Lifecycle.on_append_refused) == [do.CloseStream()]
    assert stale.handle(Lifecycle.on_input_requested, InputRequest(execution_id="id", id="q")) == [
        do.EndInput("q")
    ]
    assert stale.handle(*ENDS_WELL) == [
        do.ReportEnd(end_of_traced(WELL), frees_slot=True),
    ]


def test_a_message_that_cost_too_many_processes_ends_before_it_begins() -> None:
    life = life_of(origin(acks_late=True, is_redelivered=True), NO_STREAM)
    end = End(EndKind.TOO_MANY_LOSSES, "it has cost 5 processes")
    assert life.handle(Lifecycle.on_loss_judged, end) == [
        do.ReportEnd(end, frees_slot=True),
    ]


def test_a_task_that_replaces_itself_is_claimed_before_its_successor() -> None:
    first, second = running(LATE), running(LATE)
    assert first.handle(Lifecycle.on_successor_admitted) == [do.ClaimWithEvents(takes_over=False)]
    first.handle(*CLAIMED)

    assert second.handle(Lifecycle.on_first_output) == [do.ClaimWithEvents(takes_over=False)]
    assert second.handle(Lifecycle.on_claim_refused, Refusal.RUNS_ELSEWHERE) == [do.AwaitPrevious()]

    ended = do.PublishEnd(AttemptEnded(outcome="replaced", detail="Replaced by new task"))
    assert ended in first.handle(Lifecycle.on_finished, REPLACED, None, 2.0)
    first.handle(Lifecycle.on_end_stored)

    assert second.handle(Lifecycle.on_previous_ended) == [do.ClaimWithEvents(takes_over=True)]
    assert second.handle(*CLAIMED) == [do.RecordRunning(), do.Flush()]


def test_a_takeover_that_is_refused_again_closes_the_stream() -> None:
    life = running(
        LATE, (Lifecycle.on_first_output,), (Lifecycle.on_claim_refused, Refusal.RUNS_ELSEWHERE)
    )
    life.handle(Lifecycle.on_previous_ended)
    assert life.handle(Lifecycle.on_claim_refused, Refusal.RUNS_ELSEWHERE) == [
        do.CloseStream(),
    ]


def test_an_attempt_that_is_to_be_retried_takes_nothing_over() -> None:
    """The attempt that follows has the execution by then."""
    life = running(
        LATE, (Lifecycle.on_first_output,), (Lifecycle.on_claim_refused, Refusal.RUNS_ELSEWHERE)
    )
    life.handle(Lifecycle.on_finished, RETRY, None, 2.0)
    assert life.handle(Lifecycle.on_previous_ended) == [
        do.CloseStream(),
        do.ReportEnd(end_of_traced(RETRY), frees_slot=False),
    ]


# --- other ends -----------------------------------------------------------------------


def test_a_task_that_celery_discarded_ends_in_the_stream_and_is_not_reported() -> None:
    life = Lifecycle(LATE)
    end = Ended(outcome=Outcome.CANCELLED, type="TaskRevokedError", message="revoked")
    assert life.handle(Lifecycle.on_discarded, Streaming.CLAIM_LATER, "revoked") == [
        do.PublishEnd(end),
        do.ClaimWithEvents(takes_over=False),
    ]
    assert life.handle(Lifecycle.on_end_stored) == [do.RecordEnd(end)]


@pytest.mark.parametrize(
    ("origin", "is_certain", "event"),
    [
        (LATE, False, AttemptEnded(outcome="requeued", detail="its worker was stopped")),
        (EARLY, False, AttemptEnded(outcome="requeued", detail="its worker was stopped")),
        (
            EARLY,
            True,
            Ended(outcome=Outcome.LOST, type="WorkerLostError", message="its worker was stopped"),
        ),
    ],
    ids=["late", "early, not acknowledged", "early, acknowledged"],
)
def test_a_stopping_worker_leaves_running_tasks_to_others_unless_their_messages_are_gone(
    origin: Origin, is_certain: bool, event: AttemptEnded | Ended
) -> None:
    life = claimed(origin, (Lifecycle.on_hold_recorded, OURS))
    if is_certain:
        life.handle(Lifecycle.on_lease_confirmed, OURS)
    assert life.handle(Lifecycle.on_worker_stopping) == [do.PublishEnd(event)]
    assert life.handle(Lifecycle.on_end_stored) == [do.RecordEnd(event)]
    assert life.handle(*DIES) == []


def test_a_stopping_worker_leaves_no_trace_of_tasks_that_have_not_begun() -> None:
    life = life_of(LATE, CLAIM_LATER)
    assert life.handle(Lifecycle.on_worker_stopping) == [
        do.Unqueue(),  # else a child that becomes free meanwhile would run it
        do.CloseStream(),
    ]
