"""Executions that are claimed with their first event, the durable runs, in short stories."""

from __future__ import annotations

import signal

import pytest

from capsule_tasks.executions import actions as do
from capsule_tasks.executions.claims import Refusal
from capsule_tasks.executions.ends import End, EndKind, end_of_traced
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.states import Claim, Run
from capsule_tasks.protocol.events import (
    RUN_CANCELLED,
    RUN_ELSEWHERE,
    RUN_PARKED,
    AttemptEnded,
    CancelCommand,
    Ended,
    Outcome,
)
from capsule_tasks.protocol.messages import Failure, TaskResult
from tests.unit.executions.stories import (
    CLAIM_LATER,
    CLAIMED,
    DIES,
    ENDS_WELL,
    STARTED,
    SUCCESS,
    Event,
    life_of,
    origin,
)

RUN = origin(
    is_async=True,
    claims_with_output=True,
    is_redelivered=True,
    acks_late=True,
    redelivers_when_lost=True,
    continues_after_loss=True,
)
SENT = (Lifecycle.on_sent,)
SAYS = (Lifecycle.on_first_output,)
UNSEEN = [CLAIM_LATER, SENT, STARTED]
DRIVEN = [*UNSEEN, SAYS, CLAIMED]


def ends(name: str, message: str) -> TaskResult:
    failure = Failure(module="celery.exceptions", name=name, message=message)
    return TaskResult(execution_id="id", failure=failure)


def finished(result: TaskResult) -> Event:
    return (Lifecycle.on_finished, result, None, 2.0)


ELSEWHERE = ends("Ignore", RUN_ELSEWHERE)


@pytest.mark.parametrize(
    "news",
    [(Lifecycle.on_claim_due,), (Lifecycle.on_doorbell_rang,), (Lifecycle.on_successor_admitted,)],
)
def test_only_its_own_events_claim_it(news: Event) -> None:
    life = life_of(RUN, *UNSEEN)
    assert life.handle(*news) == []
    assert life.claim is Claim.UNCLAIMED
    assert life.handle(*SAYS) == [do.ClaimWithEvents(takes_over=False)]


def test_a_doorbell_before_the_start_is_heard_with_the_claim() -> None:
    life = life_of(RUN, CLAIM_LATER, SENT, (Lifecycle.on_doorbell_rang,))
    assert do.ClaimWithEvents(takes_over=False) not in life.handle(*STARTED)
    life.handle(*SAYS)
    assert do.ReadCommands() in life.handle(*CLAIMED)


@pytest.mark.parametrize(
    "result", [ELSEWHERE, ends("Retry", RUN_PARKED)], ids=["elsewhere", "parked"]
)
def test_an_attempt_that_said_nothing_leaves_no_trace(result: TaskResult) -> None:
    life = life_of(RUN, *UNSEEN)
    assert life.handle(*finished(result)) == [
        do.CloseStream(),
        do.ReportEnd(end_of_traced(result), frees_slot=True),
    ]


def test_a_lost_child_and_a_stopping_worker_leave_no_trace_of_it_either() -> None:
    died = life_of(RUN, *UNSEEN).handle(*DIES)
    assert died[0] == do.CloseStream()
    assert isinstance(died[1], do.ReportEnd)
    assert died[1].end.kind is EndKind.LOST
    assert life_of(RUN, *UNSEEN).handle(Lifecycle.on_worker_stopping) == [do.CloseStream()]


def test_a_parked_attempt_is_published_and_another_follows() -> None:
    life = life_of(RUN, *DRIVEN)
    parked = AttemptEnded(outcome="parked", detail=RUN_PARKED)
    assert life.handle(*finished(ends("Retry", RUN_PARKED))) == [
        do.FreeSlot(),
        do.PublishEnd(parked),
    ]
    assert life.handle(Lifecycle.on_end_stored)[0] == do.RecordEnd(parked)


def test_a_run_that_is_lost_to_another_worker_ends_its_attempt_only() -> None:
    life = life_of(RUN, *DRIVEN)
    another = AttemptEnded(outcome="requeued", detail=RUN_ELSEWHERE)
    assert do.PublishEnd(another) in life.handle(*finished(ELSEWHERE))


def test_an_end_without_an_event_before_it_is_published_with_its_claim() -> None:
    """The run had ended before: its first worker died before it could say so."""
    life = life_of(RUN, *UNSEEN)
    assert life.handle(*ENDS_WELL) == [
        do.FreeSlot(),
        do.PublishEnd(SUCCESS),
        do.ClaimWithEvents(takes_over=False),
    ]


def test_a_run_takes_its_stream_from_an_attempt_that_seems_to_run() -> None:
    """Also if it is parked before that is known: who drives the run has the stream."""
    life = life_of(RUN, *UNSEEN, SAYS)
    refused = life.handle(Lifecycle.on_claim_refused, Refusal.RUNS_ELSEWHERE)
    assert refused == [do.AwaitPrevious()]
    life.handle(*finished(ends("Retry", RUN_PARKED)))
    assert life.handle(Lifecycle.on_previous_ended) == [do.ClaimWithEvents(takes_over=True)]


def test_a_cancelled_run_ends_as_a_cancelled_task_does() -> None:
    life = life_of(RUN, *DRIVEN)
    actions = life.handle(*finished(ends("Ignore", RUN_CANCELLED)))
    cancelled = Ended(outcome=Outcome.CANCELLED, type="Terminated", message="it was cancelled")
    assert actions[1] == do.PublishEnd(cancelled)
    reported = life.handle(Lifecycle.on_end_stored)[-1]
    assert reported == do.ReportEnd(End(EndKind.STOPPED, signum=signal.SIGTERM), frees_slot=False)


def test_a_cancel_of_a_run_that_waits_for_its_turn_ends_it() -> None:
    life = life_of(RUN, CLAIM_LATER)
    life.handle(Lifecycle.on_command_received, CancelCommand())
    assert life.run is Run.OVER
