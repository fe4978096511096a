"""Executions whose lease is lost, and executions while Redis is unavailable, in short stories."""

from __future__ import annotations

from capsule_tasks.executions import actions as do
from capsule_tasks.executions.actions import Action, Timer
from capsule_tasks.executions.claims import Refusal
from capsule_tasks.executions.ends import end_of_traced
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.states import Run
from capsule_tasks.protocol.events import AttemptEnded
from capsule_tasks.protocol.messages import InputClosed, InputRequest
from tests.unit.executions.stories import (
    CLAIMED,
    EARLY,
    ENDS_WELL,
    LATE,
    OURS,
    RETRY,
    SUCCESS,
    WELL,
    claimed,
    origin,
    running,
    start,
)


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
    """The last event decides whether the group is counted; an attempt's end counts nothing."""
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
