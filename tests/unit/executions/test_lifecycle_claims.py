"""Executions that need a claim, the calls of named sessions, in short stories."""

from __future__ import annotations

import signal

import pytest

from capsule_tasks.executions import actions as do
from capsule_tasks.executions.claims import NOT_CLAIMED, Refusal
from capsule_tasks.executions.ends import End, EndKind, end_of_traced
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.states import Run
from capsule_tasks.protocol.events import AttemptEnded, CancelCommand, Ended, Outcome
from tests.unit.executions.stories import (
    CLAIM_FIRST,
    CLAIMED,
    DIES,
    ENDS_WELL,
    NO_STREAM,
    OURS,
    STARTED,
    SUCCESS,
    THEIRS,
    WELL,
    Event,
    life_of,
    origin,
)

CALL = origin(needs_claim=True)
HELD = (Lifecycle.on_hold_recorded, OURS)
CONFIRMED = (Lifecycle.on_lease_confirmed, OURS)
SURE = [CLAIM_FIRST, CLAIMED, HELD, CONFIRMED]
RUNS = [*SURE, (Lifecycle.on_sent,), STARTED]


def test_it_starts_when_its_claim_is_sure_and_waits_for_that_as_long_as_it_takes() -> None:
    life = Lifecycle(CALL)
    assert life.handle(*CLAIM_FIRST) == [do.ClaimFirst()]  # and no timer
    assert life.handle(*HELD) == []
    assert life.handle(*CLAIMED) == [do.RecordRunning(), do.Flush(), do.ConfirmLease(OURS)]
    assert life.handle(Lifecycle.on_lease_confirmed, THEIRS) == []
    assert life.handle(*CONFIRMED) == [do.Send()]
    assert life.handle(*CONFIRMED) == []


@pytest.mark.parametrize("reason", [Refusal.CLOSED, Refusal.CANCELLED])
def test_a_refused_claim_ends_it_here_without_a_run_and_without_an_event(reason: Refusal) -> None:
    life = life_of(CALL, CLAIM_FIRST)
    assert life.handle(Lifecycle.on_claim_refused, reason) == [
        do.CloseStream(),
        do.ReportEnd(NOT_CLAIMED, frees_slot=True),
    ]
    assert life.run is Run.OVER


def test_it_does_not_run_where_there_is_no_room_for_a_stream() -> None:
    assert Lifecycle(CALL).handle(*NO_STREAM) == [do.ReportEnd(NOT_CLAIMED, frees_slot=True)]


def test_a_lease_that_is_lost_before_the_start_is_made_good_first() -> None:
    life = life_of(CALL, CLAIM_FIRST, HELD)
    assert life.handle(Lifecycle.on_claim_stored, OURS, "new")[-1] == do.AwaitInFlight()
    assert life.handle(*CONFIRMED) == []
    assert life.handle(Lifecycle.on_in_flight_done) == [do.Reclaim(OURS)]
    assert life.handle(Lifecycle.on_claim_refused, Refusal.CLOSED) == [
        do.CloseStream(),
        do.ReportEnd(NOT_CLAIMED, frees_slot=True),
    ]


def test_a_cancel_that_waited_ends_it_under_the_claim_that_brought_it() -> None:
    life = life_of(CALL, CLAIM_FIRST, (Lifecycle.on_command_received, CancelCommand()))
    life.handle(*HELD)
    assert life.handle(*CLAIMED) == [do.Flush()]
    assert life.handle(Lifecycle.on_end_stored)[-1] == do.ReportEnd(
        End(EndKind.STOPPED, signum=signal.SIGTERM), frees_slot=False
    )


def test_a_cancel_here_of_what_another_worker_has_is_not_reported_as_one() -> None:
    life = life_of(CALL, CLAIM_FIRST, (Lifecycle.on_cancel_requested, None, "somebody"))
    refused = life.handle(Lifecycle.on_claim_refused, Refusal.CLOSED)
    assert refused[-1] == do.ReportEnd(NOT_CLAIMED, frees_slot=False)


def test_its_end_is_reported_when_it_is_stored_and_not_before() -> None:
    life = life_of(CALL, *RUNS, ENDS_WELL)
    assert life.handle(Lifecycle.on_end_wait) == []
    assert life.handle(Lifecycle.on_end_stored) == [
        do.RecordEnd(SUCCESS),
        do.ReportEnd(end_of_traced(WELL), frees_slot=False),
    ]


def test_an_end_that_another_owner_keeps_from_being_stored_is_not_reported_as_one() -> None:
    life = life_of(CALL, *RUNS, (Lifecycle.on_append_refused,))
    assert life.handle(*ENDS_WELL) == [do.ReportEnd(NOT_CLAIMED, frees_slot=True)]


def test_a_lost_broker_has_no_message_of_it() -> None:
    assert life_of(CALL, *SURE).handle(Lifecycle.on_broker_lost) == []


@pytest.mark.parametrize(
    ("events", "last"),
    [
        (SURE, AttemptEnded(outcome="requeued", detail="its worker was stopped")),
        (
            [*SURE, (Lifecycle.on_sent,)],
            Ended(outcome=Outcome.LOST, type="WorkerLostError", message="its worker was stopped"),
        ),
    ],
    ids=["has not run", "may have run"],
)
def test_a_stopping_worker_says_whether_it_may_have_run(
    events: list[Event], last: AttemptEnded | Ended
) -> None:
    stopping = life_of(CALL, *events).handle(Lifecycle.on_worker_stopping)
    assert do.PublishEnd(last) in stopping


def test_a_lost_child_fails_it() -> None:
    life = life_of(CALL, *RUNS)
    published = [one for one in life.handle(*DIES) if isinstance(one, do.PublishEnd)]
    assert [one.event.outcome for one in published] == [Outcome.FAILED]
