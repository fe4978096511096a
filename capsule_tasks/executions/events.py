"""Events in the life of an execution: facts, never orders."""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from capsule_tasks.executions.ends import End
from capsule_tasks.protocol.events import Command
from capsule_tasks.protocol.messages import InputClosed, InputRequest, Terminal


class Event(msgspec.Struct, frozen=True, gc=False):
    """The base of all events."""


class Streaming(Enum):
    """How an execution comes to its stream."""

    NONE = auto()
    """Never: streams are off, or the buffer for Redis is full."""
    CLAIM_LATER = auto()
    """The execution is new: it starts now and is claimed with its first events."""
    CLAIM_FIRST = auto()
    """Redis may know of an attempt or a command: the execution is claimed before it starts."""


class Timer(Enum):
    """Each runs at most once at a time for an execution."""

    __hash__ = object.__hash__  # in C; `Enum.__hash__` is Python code

    CLAIM_DUE = auto()
    """A task that runs silently is claimed now."""
    CLAIM_WAIT = auto()
    """The claim was not answered in time: what waits for it goes on."""
    END_WAIT = auto()
    """The end was not stored in time."""
    SOFT_LIMIT = auto()
    HARD_LIMIT = auto()
    TIDY = auto()
    """The `finally` blocks have had their time after a hard limit."""


class Refusal(Enum):
    """Why a claim was refused."""

    RUNS_ELSEWHERE = auto()
    """Another attempt runs, and may be about to end."""
    CANCELLED = auto()
    """The execution was ended by a cancel."""
    CLOSED = auto()
    """Another attempt has the execution, the execution has ended, or Redis refused the call."""


class Admitted(Event, frozen=True, gc=False):
    """The execution came to this worker."""

    streaming: Streaming


class Discarded(Event, frozen=True, gc=False):
    """Celery discarded the execution before it reached the pool."""

    streaming: Streaming
    reason: str


# --- the child -------------------------------------------------------------------------------


class Sent(Event, frozen=True, gc=False):
    """A child was sent the execution."""


class SendRefused(Event, frozen=True, gc=False):
    """A condemned child refused the execution, which is queued again."""


class ChildStarted(Event, frozen=True, gc=False):
    """The child has started the execution, or has had the time to."""

    at: float


class FirstOutput(Event, frozen=True, gc=False):
    """The execution has an event that watchers should see now."""


class InputRequested(Event, frozen=True, gc=False):
    request: InputRequest


class InputAnswered(Event, frozen=True, gc=False):
    closed: InputClosed


class Finished(Event, frozen=True, gc=False):
    """The child's terminal message; `exit_status` if the child has ended."""

    terminal: Terminal
    exit_status: int | None
    at: float


class LossJudged(Event, frozen=True, gc=False):
    """With an `end`, the message has cost too many processes."""

    end: End | None


class TimerFired(Event, frozen=True, gc=False):
    timer: Timer


# --- Redis -----------------------------------------------------------------------------------


class ClaimStored(Event, frozen=True, gc=False):
    """The execution is claimed under `owner`; the lease may have changed since."""

    owner: str
    current_owner: str


class ClaimRefused(Event, frozen=True, gc=False):
    reason: Refusal


class PreviousEnded(Event, frozen=True, gc=False):
    """The previous attempt has ended, or has had its time to."""


class SuccessorAdmitted(Event, frozen=True, gc=False):
    """Another message with the same id came to this worker."""


class HoldRecorded(Event, frozen=True, gc=False):
    """The execution is recorded as held by this owner, where a reaper finds it."""

    owner: str


class LeaseConfirmed(Event, frozen=True, gc=False):
    """The owner's lease lasts, by the worker's own clock."""

    owner: str


class LeaseBegun(Event, frozen=True, gc=False):
    """The worker has another lease from now on."""

    owner: str


class InFlightDone(Event, frozen=True, gc=False):
    """All calls of the execution are answered."""


class AppendRefused(Event, frozen=True, gc=False):
    """Nothing more of this attempt is stored."""


class EndStored(Event, frozen=True, gc=False):
    """The last event is stored."""


class DoorbellRang(Event, frozen=True, gc=False):
    """The execution may have been sent a command."""


class CommandReceived(Event, frozen=True, gc=False):
    command: Command


# --- the worker ------------------------------------------------------------------------------


class StopRequested(Event, frozen=True, gc=False):
    """The execution is to be ended with a signal."""

    signum: int
    requested_by: str
    is_worker_stopping: bool = False
    """The worker itself asks, and the message is requeued."""


class CancelRequested(Event, frozen=True, gc=False):
    """The execution is to be ended in order, and by force after the grace."""

    grace_s: float | None
    requested_by: str


class KillRequested(Event, frozen=True, gc=False):
    """The worker waits for running executions no longer."""

    requested_by: str


class BrokerLost(Event, frozen=True, gc=False):
    """The connection to the broker is lost: messages that have not started are redelivered."""


class WorkerStopping(Event, frozen=True, gc=False):
    """The pool stops: other workers take what is not over."""
