"""Actions on an execution: data that a lifecycle returns and adapters carry out."""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from capsule_tasks.executions.ends import End, LastEvent
from capsule_tasks.protocol.events import Command, EventMessage


class Timer(Enum):
    """Each runs at most once at a time for an execution."""

    __hash__ = object.__hash__  # in C; `Enum.__hash__` is Python code

    START_WAIT = auto()
    """The claim that comes before the start was not answered in time."""
    CLAIM_WAIT = auto()
    """The claim was not answered in time: the acknowledgement does not wait for it any more."""
    SOFT_LIMIT = auto()
    HARD_LIMIT = auto()
    TIDY = auto()
    """The `finally` blocks have had their time after a hard limit."""


class Action(msgspec.Struct, frozen=True, gc=False):
    """The base of all actions."""


# --- for the dispatcher ----------------------------------------------------------------------


class Send(Action, frozen=True, gc=False):
    """Queue the execution for a child."""


class Unqueue(Action, frozen=True, gc=False):
    """Take the execution out of the queue."""


class Signal(Action, frozen=True, gc=False):
    """Send the child a signal; SIGKILL is for its whole family.

    With an empty `requested_by` the hard time limit has passed, or the stop is in the log already.
    """

    signum: int
    requested_by: str


class CancelInChild(Action, frozen=True, gc=False):
    """End the execution in order; by force after the grace, which None leaves to the settings."""

    grace_s: float | None
    requested_by: str


class RaiseSoftLimit(Action, frozen=True, gc=False):
    """Raise SoftTimeLimitExceeded in the task, and report to Celery that it was raised."""


class CommandChild(Action, frozen=True, gc=False):
    """Carry out a watcher's command: interrupt, respond, or dump the stack."""

    command: Command
    request_id: str
    """The question that is open, if there is one."""


class EndInput(Action, frozen=True, gc=False):
    """Have `input()` raise EOFError: the question cannot be published."""

    request_id: str


class JudgeLoss(Action, frozen=True, gc=False):
    """Count the processes that the message has cost; with `end` one more was lost now."""

    end: End | None


# --- for the publisher -----------------------------------------------------------------------


class ClaimFirst(Action, frozen=True, gc=False):
    """Claim the execution before it starts."""


class ClaimWithEvents(Action, frozen=True, gc=False):
    """Claim the execution together with all of its events, its end included."""

    takes_over: bool
    """Also from an attempt that runs elsewhere."""


class Reclaim(Action, frozen=True, gc=False):
    """Claim the execution under the present lease, if the previous owner still has it."""

    owner_before: str


class AwaitPrevious(Action, frozen=True, gc=False):
    """Wait for a while until the previous attempt has ended."""


class ConfirmLease(Action, frozen=True, gc=False):
    """Feed `on_lease_confirmed` once the owner's lease is known to last."""

    owner: str


class AwaitInFlight(Action, frozen=True, gc=False):
    """Send nothing more, and feed `on_in_flight_done` once all calls are answered."""


class Publish(Action, frozen=True, gc=False):
    """Store an event, in order with the output."""

    event: EventMessage


class PublishStart(Action, frozen=True, gc=False):
    """Store that the code runs, soon; the claim is due (`on_claim_due`) after a while."""


class Flush(Action, frozen=True, gc=False):
    """Send all events that wait."""


class PublishEnd(Action, frozen=True, gc=False):
    """Store the last event, after all others. Feed `on_end_wait` if that takes too long."""

    event: LastEvent


class CloseStream(Action, frozen=True, gc=False):
    """Discard events that are not stored, and all that come from now on; release the hold."""


class ReadCommands(Action, frozen=True, gc=False):
    """Read the commands that the execution was sent."""


class RecordRunning(Action, frozen=True, gc=False):
    """Put the execution into the index of recent ones."""


class RecordEnd(Action, frozen=True, gc=False):
    """Record the end in the index of recent executions and in the group; release the hold."""

    event: LastEvent


# --- for the reporter ------------------------------------------------------------------------


class ReportAccepted(Action, frozen=True, gc=False):
    """The child runs the task. With `defers_ack` an Acknowledge follows."""

    at: float
    defers_ack: bool


class Acknowledge(Action, frozen=True, gc=False):
    """Acknowledge the message, whose acknowledgement was deferred."""


class FreeSlot(Action, frozen=True, gc=False):
    """The next task may come, before the end of this one is reported."""


class ReportEnd(Action, frozen=True, gc=False):
    """Report how the task ended, and forget it; free the slot before if that was not done."""

    end: End
    frees_slot: bool


# --- timers ----------------------------------------------------------------------------------


class StartTimer(Action, frozen=True, gc=False):
    """Start the timer, unless it runs, or the execution is over by now."""

    timer: Timer
