"""Each move that the tables of states allow is taken by an execution, and no other is allowed."""

from __future__ import annotations

import pytest

from capsule_tasks.errors import InternalError
from capsule_tasks.executions.actions import Timer
from capsule_tasks.executions.claims import Refusal, Streaming
from capsule_tasks.executions.ends import End, EndKind
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.origin import Origin
from capsule_tasks.executions.states import Ack, Claim, Report, Run
from tests.unit.executions.stories import (
    CLAIM_FIRST,
    CLAIM_LATER,
    CLAIMED,
    COMES_AGAIN,
    DIES,
    EARLY,
    ENDS_WELL,
    LATE,
    NO_STREAM,
    RETRY,
    STARTED,
    STOP,
    Event,
    fired,
    life_of,
    origin,
)

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
