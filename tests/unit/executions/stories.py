"""Events, origins and lifecycles for the tests of the lifecycle."""

from __future__ import annotations

import signal
from typing import Any

from capsule_tasks.executions import actions as do
from capsule_tasks.executions.actions import Timer
from capsule_tasks.executions.claims import Streaming
from capsule_tasks.executions.ends import End, EndKind
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.origin import Origin
from capsule_tasks.protocol.events import Ended, Outcome
from capsule_tasks.protocol.messages import Error, ErrorKind, Failure, TaskResult

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


def terminated() -> End:
    return End(EndKind.STOPPED, signum=signal.SIGTERM)
