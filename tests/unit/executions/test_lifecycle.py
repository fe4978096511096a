"""The life of an execution in short stories: an event comes in, these actions come out."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from capsule_tasks.errors import InternalError
from capsule_tasks.executions import actions as do
from capsule_tasks.executions.actions import Action, Timer
from capsule_tasks.executions.claims import Refusal, Streaming
from capsule_tasks.executions.ends import End, EndKind, end_of_traced, last_event
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.origin import Origin
from capsule_tasks.executions.states import (
    Ack,
    Claim,
    Report,
    Run,
)
from capsule_tasks.protocol.events import (
    AttemptEnded,
    CancelCommand,
    Ended,
    InterruptCommand,
    Outcome,
    RespondCommand,
)
from capsule_tasks.protocol.messages import (
    Error,
    ErrorKind,
    Failure,
    InputClosed,
    InputRequest,
    TaskResult,
)

Event = tuple[Any, ...]
"""A method of the lifecycle, and its arguments."""

OURS, THEIRS = "our lease", "our lease before"
SOMEBODY = "somebody"

WELL = TaskResult(execution_id="id", text="4", stdout_bytes=5)
SUCCESS = Ended(outcome=Outcome.SUCCEEDED, result_text="4", stdout_bytes=5)
RETRY = TaskResult(
    execution_id="id", failure=Failure(module="celery.exceptions", name="Retry", message="in 1s")
)
REPLACED = TaskResult(
    execution_id="id",
    failure=Failure(module="celery.exceptions", name="Ignore", message="Replaced by new task"),
)
DIED = Error(execution_id="id", kind=ErrorKind.LOST, type="SessionLost", message="it is gone")

CLAIM_LATER = (Lifecycle.on_admitted, Streaming.CLAIM_LATER)
CLAIM_FIRST = (Lifecycle.on_admitted, Streaming.CLAIM_FIRST)
NO_STREAM = (Lifecycle.on_admitted, Streaming.NONE)
STARTED = (Lifecycle.on_child_started, 1.0)
ENDS_WELL = (Lifecycle.on_finished, WELL, None, 2.0)
DIES = (Lifecycle.on_finished, DIED, -signal.SIGKILL, 2.0)
CLAIMED = (Lifecycle.on_claim_stored, OURS, OURS)
STOP = (Lifecycle.on_stop_requested, signal.SIGTERM, SOMEBODY)


def origin(**changes: object) -> Origin:
    return Origin(execution_id="id", task="app.task", **changes)  # type: ignore[arg-type]


LATE = origin(acks_late=True)
EARLY = origin(ack_waits_for_claim=True)
COMES_AGAIN = origin(acks_late=True, redelivers_when_lost=True, continues_after_loss=True)


def life_of(origin: Origin, *events: Event) -> Lifecycle:
    """An execution to which all that has happened."""
    life = Lifecycle(origin)
    for event in events:
        life.handle(*event)
    return life


def running(origin: Origin = LATE, *events: Event, admitted: Event = CLAIM_LATER) -> Lifecycle:
    return life_of(origin, admitted, (Lifecycle.on_sent,), STARTED, *events)


def claimed(origin: Origin = LATE, *events: Event) -> Lifecycle:
    """A lifecycle that runs and has published output."""
    return running(origin, (Lifecycle.on_first_output,), CLAIMED, *events)


def fired(timer: Timer) -> Event:
    return (Lifecycle.on_timer, timer)


def start(timer: Timer) -> do.StartTimer:
    return do.StartTimer(timer)


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


# --- stops -------------------------------------------------------------------------------------


def terminated() -> End:
    return End(EndKind.STOPPED, signum=signal.SIGTERM)


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


def test_when_the_broker_is_lost_only_what_has_not_begun_is_given_back() -> None:
    given_back = End(EndKind.REQUEUED, "the connection to the broker was lost")
    waiting = life_of(LATE, CLAIM_LATER)
    assert waiting.handle(Lifecycle.on_broker_lost) == [
        do.Unqueue(),
        do.CloseStream(),
        do.ReportEnd(given_back, frees_slot=True),
    ]
    for life in (running(LATE), claimed(COMES_AGAIN, DIES)):
        assert life.handle(Lifecycle.on_broker_lost) == []


# --- the lease, and Redis that is away ---------------------------------------------------------


def test_a_claim_under_a_new_lease_repeats_the_open_questions() -> None:
    question = InputRequest(execution_id="id", id="open")
    answered = InputRequest(execution_id="id", id="answered")
    closed = InputClosed(execution_id="id", request_id="answered", reason="answered")
    life = claimed(
        EARLY,
        (Lifecycle.on_input_requested, question),
        (Lifecycle.on_input_requested, answered),
        (Lifecycle.on_input_answered, closed),
    )
    assert life.handle(Lifecycle.on_lease_begun, OURS) == []
    assert life.handle(Lifecycle.on_lease_begun, "new") == [do.AwaitInFlight()]
    assert life.handle(Lifecycle.on_in_flight_done) == [do.Publish(question), do.Reclaim(OURS)]
    assert life.handle(Lifecycle.on_hold_recorded, "new") == []
    assert life.handle(Lifecycle.on_claim_stored, "new", "new") == [
        do.RecordRunning(),
        do.Flush(),
        start(Timer.CLAIM_WAIT),
        do.ConfirmLease("new"),
    ]
    assert life.handle(Lifecycle.on_lease_confirmed, "new") == [do.Acknowledge()]


def test_a_lease_lost_while_the_claim_is_in_flight_is_acquired_again() -> None:
    life = running(LATE, (Lifecycle.on_first_output,))
    assert life.handle(Lifecycle.on_lease_begun, "new") == []
    assert life.handle(Lifecycle.on_claim_stored, OURS, "new")[-1] == do.AwaitInFlight()
    assert life.handle(Lifecycle.on_in_flight_done) == [do.Reclaim(OURS)]


def test_an_attempt_that_another_worker_took_over_runs_on_without_a_stream() -> None:
    life = claimed(LATE, (Lifecycle.on_lease_begun, "new"), (Lifecycle.on_in_flight_done,))
    assert life.handle(Lifecycle.on_claim_refused, Refusal.CLOSED) == [
        do.CloseStream(),
    ]
    assert life.run is Run.RUNNING


def test_an_end_that_waits_for_a_new_claim_is_published_once_and_nothing_after_it() -> None:
    question = InputRequest(execution_id="id", id="open")
    life = claimed(
        LATE, (Lifecycle.on_input_requested, question), (Lifecycle.on_lease_begun, "new")
    )
    assert do.PublishEnd(SUCCESS) in life.handle(*ENDS_WELL)
    assert life.handle(Lifecycle.on_in_flight_done) == [do.Reclaim(OURS)]
    assert life.handle(Lifecycle.on_claim_stored, "new", "new") == [do.Flush()]


def test_5000_ends_while_redis_is_away_are_reported_in_time_and_stored_later() -> None:
    lives = [running(EARLY, (Lifecycle.on_claim_due,), ENDS_WELL) for _ in range(5000)]
    reported = [do.Acknowledge(), do.ReportEnd(end_of_traced(WELL), frees_slot=False)]
    for life in lives:
        assert life.run is Run.OVER
        assert life.handle(Lifecycle.on_end_wait) == reported
        assert life.handle(Lifecycle.on_end_wait) == []
    for life in lives:
        assert life.handle(*CLAIMED) == [do.Flush()]
        assert life.handle(Lifecycle.on_end_stored) == [do.RecordEnd(SUCCESS)]
        assert life.handle(Lifecycle.on_end_stored) == []


def test_a_group_counts_a_member_once_and_only_when_its_end_is_stored() -> None:
    """Whether the group is counted is said by the last event: an attempt's end counts nothing."""
    member = origin(acks_late=True, group="group", index=3)
    counted: list[Action] = []
    first = claimed(member)
    for event in (
        (Lifecycle.on_finished, RETRY, None, 2.0),
        (Lifecycle.on_end_wait,),
        (Lifecycle.on_end_stored,),
    ):
        counted += [one for one in first.handle(*event) if isinstance(one, do.RecordEnd)]
    assert counted == [do.RecordEnd(AttemptEnded(outcome="retry", detail="in 1s"))]

    second = claimed(member)
    for event in (
        ENDS_WELL,
        (Lifecycle.on_end_wait,),
        (Lifecycle.on_end_stored,),
        (Lifecycle.on_end_stored,),
    ):
        counted += [one for one in second.handle(*event) if isinstance(one, do.RecordEnd)]
    assert counted[1:] == [do.RecordEnd(SUCCESS)]

    stale = claimed(member, (Lifecycle.on_append_refused,))
    assert not any(isinstance(one, do.RecordEnd) for one in stale.handle(*ENDS_WELL))


# --- what ends otherwise -----------------------------------------------------------------------


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


# --- the tables --------------------------------------------------------------------------------

_TOO_MANY = End(EndKind.TOO_MANY_LOSSES, "")
AGAIN = origin(acks_late=True, is_redelivered=True)
RETRIED = origin(acks_late=True, is_retry=True)
WAY_TO: dict[tuple[object, object], tuple[Origin, list[Event]]] = {
    (Run.NEW, Run.AWAITING_CLAIM): (LATE, [CLAIM_FIRST]),
    (Run.NEW, Run.AWAITING_JUDGEMENT): (AGAIN, [NO_STREAM]),
    (Run.NEW, Run.QUEUED): (LATE, [CLAIM_LATER]),
    (Run.NEW, Run.OVER): (LATE, [(Lifecycle.on_discarded, Streaming.NONE, "")]),
    (Run.AWAITING_CLAIM, Run.AWAITING_JUDGEMENT): (AGAIN, [CLAIM_FIRST, CLAIMED]),
    (Run.AWAITING_CLAIM, Run.QUEUED): (LATE, [CLAIM_FIRST, CLAIMED]),
    (Run.AWAITING_CLAIM, Run.OVER): (LATE, [CLAIM_FIRST, STOP]),
    (Run.AWAITING_JUDGEMENT, Run.QUEUED): (AGAIN, [NO_STREAM, (Lifecycle.on_loss_judged, None)]),
    (Run.AWAITING_JUDGEMENT, Run.OVER): (
        AGAIN,
        [NO_STREAM, (Lifecycle.on_loss_judged, _TOO_MANY)],
    ),
    (Run.QUEUED, Run.SENT): (LATE, [CLAIM_LATER, (Lifecycle.on_sent,)]),
    (Run.QUEUED, Run.OVER): (LATE, [CLAIM_LATER, STOP]),
    (Run.SENT, Run.QUEUED): (
        LATE,
        [CLAIM_LATER, (Lifecycle.on_sent,), (Lifecycle.on_send_refused,)],
    ),
    (Run.SENT, Run.RUNNING): (LATE, [CLAIM_LATER, (Lifecycle.on_sent,), STARTED]),
    (Run.SENT, Run.OVER): (LATE, [CLAIM_LATER, (Lifecycle.on_sent,), ENDS_WELL]),
    (Run.RUNNING, Run.LOST): (COMES_AGAIN, [CLAIM_LATER, (Lifecycle.on_sent,), STARTED, DIES]),
    (Run.RUNNING, Run.OVER): (LATE, [CLAIM_LATER, (Lifecycle.on_sent,), STARTED, ENDS_WELL]),
    (Run.LOST, Run.OVER): (
        COMES_AGAIN,
        [CLAIM_LATER, (Lifecycle.on_sent,), STARTED, DIES, (Lifecycle.on_loss_judged, None)],
    ),
    (Claim.UNCLAIMED, Claim.CLAIMING): (LATE, [CLAIM_FIRST]),
    (Claim.UNCLAIMED, Claim.AWAITING_PREVIOUS): (RETRIED, [CLAIM_FIRST]),
    (Claim.UNCLAIMED, Claim.CLOSED): (LATE, [NO_STREAM]),
    (Claim.CLAIMING, Claim.AWAITING_PREVIOUS): (
        LATE,
        [
            CLAIM_LATER,
            (Lifecycle.on_first_output,),
            (Lifecycle.on_claim_refused, Refusal.RUNS_ELSEWHERE),
        ],
    ),
    (Claim.CLAIMING, Claim.CLAIMED): (LATE, [CLAIM_FIRST, CLAIMED]),
    (Claim.CLAIMING, Claim.CLOSED): (
        LATE,
        [CLAIM_FIRST, (Lifecycle.on_claim_refused, Refusal.CLOSED)],
    ),
    (Claim.AWAITING_PREVIOUS, Claim.CLAIMING): (
        RETRIED,
        [CLAIM_FIRST, (Lifecycle.on_previous_ended,)],
    ),
    (Claim.AWAITING_PREVIOUS, Claim.CLOSED): (
        LATE,
        [
            *[CLAIM_LATER, (Lifecycle.on_sent,), STARTED, (Lifecycle.on_first_output,)],
            *[
                (Lifecycle.on_claim_refused, Refusal.RUNS_ELSEWHERE),
                (Lifecycle.on_finished, RETRY, None, 2.0),
            ],
            (Lifecycle.on_previous_ended,),
        ],
    ),
    (Claim.CLAIMED, Claim.RECLAIMING): (
        LATE,
        [CLAIM_FIRST, CLAIMED, (Lifecycle.on_lease_begun, "new")],
    ),
    (Claim.CLAIMED, Claim.CLOSED): (LATE, [CLAIM_FIRST, CLAIMED, (Lifecycle.on_append_refused,)]),
    (Claim.RECLAIMING, Claim.CLAIMING): (
        LATE,
        [CLAIM_FIRST, CLAIMED, (Lifecycle.on_lease_begun, "new"), (Lifecycle.on_in_flight_done,)],
    ),
    (Claim.RECLAIMING, Claim.CLOSED): (
        LATE,
        [CLAIM_FIRST, CLAIMED, (Lifecycle.on_lease_begun, "new"), (Lifecycle.on_append_refused,)],
    ),
    (Report.NONE, Report.ACCEPTED): (LATE, [CLAIM_LATER, (Lifecycle.on_sent,), STARTED]),
    (Report.NONE, Report.ENDED): (LATE, [NO_STREAM, STOP]),
    (Report.ACCEPTED, Report.ENDED): (LATE, [NO_STREAM, (Lifecycle.on_sent,), STARTED, ENDS_WELL]),
    (Ack.CELERY, Ack.DEFERRED): (EARLY, [CLAIM_LATER, (Lifecycle.on_sent,), STARTED]),
    (Ack.DEFERRED, Ack.DONE): (
        EARLY,
        [CLAIM_LATER, (Lifecycle.on_sent,), STARTED, fired(Timer.CLAIM_WAIT)],
    ),
}


def states_of(life: Lifecycle) -> tuple[object, ...]:
    return (life.run, life.claim, life.report, life.ack)


@pytest.mark.parametrize(("before", "after"), WAY_TO, ids=str)
def test_an_execution_can_take_each_move_of_the_tables(before: object, after: object) -> None:
    origin, events = WAY_TO[before, after]
    life = life_of(origin, *events[:-1])
    assert before in states_of(life)
    life.handle(*events[-1])
    assert after in states_of(life)


def test_the_tables_allow_no_move_that_no_execution_takes() -> None:
    states = (*Run, *Claim, *Report, *Ack)
    allowed = {(before, after) for before in states for after in before.to}
    assert allowed == set(WAY_TO)


def test_a_move_that_the_table_does_not_allow_is_a_fault_of_ours() -> None:
    with pytest.raises(InternalError, match="whose Run is OVER cannot become QUEUED"):
        Run.OVER.to[Run.QUEUED]
