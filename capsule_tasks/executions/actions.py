"""Actions on an execution: data that a lifecycle returns and adapters carry out."""

from __future__ import annotations

import msgspec

from capsule_tasks.executions.ends import End, LastEvent
from capsule_tasks.executions.events import Timer
from capsule_tasks.protocol.events import Command, EventMessage


class Action(msgspec.Struct, frozen=True, gc=False):
    """The base of all actions."""


# --- for the dispatcher ----------------------------------------------------------------------


class Send(Action, frozen=True, gc=False):
    """Queue the execution for a child."""


class Unqueue(Action, frozen=True, gc=False):
    """Take the execution out of the queue."""


class Signal(Action, frozen=True, gc=False):
    """Send the child a signal. With an empty `requested_by` the hard time limit has passed."""

    signum: int
    requested_by: str


class Kill(Action, frozen=True, gc=False):
    """Kill the child's whole family."""

    requested_by: str


class CancelInChild(Action, frozen=True, gc=False):
    """End the execution in order; by force after the grace, which None leaves to the settings."""

    grace_s: float | None
    requested_by: str


class RaiseSoftLimit(Action, frozen=True, gc=False):
    """Raise SoftTimeLimitExceeded in the task, and tell Celery if that is done."""


class CommandChild(Action, frozen=True, gc=False):
    """Interrupt, answer, or ask for the stack, as a watcher wants it."""

    command: Command
    request_id: str
    """The question that is open, if there is one."""


class EndInput(Action, frozen=True, gc=False):
    """Have `input()` raise EOFError: the question reaches nobody."""

    request_id: str


class JudgeLoss(Action, frozen=True, gc=False):
    """Count the processes that the message has cost; with `end` one more was lost now."""

    end: End | None


# --- for the publisher -----------------------------------------------------------------------


class ClaimFirst(Action, frozen=True, gc=False):
    """Claim the execution before it begins."""


class ClaimWithEvents(Action, frozen=True, gc=False):
    """Claim the execution together with everything that it has said, its end included."""

    takes_over: bool
    """Also from an attempt that runs elsewhere."""


class Reclaim(Action, frozen=True, gc=False):
    """Claim the execution under the present lease, if the owner before still has it."""

    owner_before: str


class AwaitPrevious(Action, frozen=True, gc=False):
    """Wait until the attempt before has ended, for a while."""


class ConfirmLease(Action, frozen=True, gc=False):
    """Find out whether the owner's lease lasts."""

    owner: str


class AwaitInFlight(Action, frozen=True, gc=False):
    """Send nothing more, and tell when nothing is on its way."""


class Publish(Action, frozen=True, gc=False):
    """Store an event, in order with the output."""

    event: EventMessage


class PublishStart(Action, frozen=True, gc=False):
    """Store that the code runs; watchers need not hear of it at once."""


class Flush(Action, frozen=True, gc=False):
    """Send what waits, also what nobody is in a hurry to hear."""


class PublishEnd(Action, frozen=True, gc=False):
    """Store the last event, behind everything else."""

    event: LastEvent


class CloseStream(Action, frozen=True, gc=False):
    """Discard what was not stored, and whatever is said from now on."""


class ReadCommands(Action, frozen=True, gc=False):
    """Read what the execution was told."""


class RecordRunning(Action, frozen=True, gc=False):
    """Put the execution into the index of recent ones."""


class RecordEnd(Action, frozen=True, gc=False):
    """Note the end in the index of recent executions, and count the execution in its group."""

    event: LastEvent


class Release(Action, frozen=True, gc=False):
    """The execution is over here: hold it no longer."""


# --- for the reporter ------------------------------------------------------------------------


class ReportAccepted(Action, frozen=True, gc=False):
    """The child runs the task. With `defers_ack` an Acknowledge follows."""

    at: float
    defers_ack: bool


class Acknowledge(Action, frozen=True, gc=False):
    """Acknowledge the message, whose acknowledgement was deferred."""


class FreeSlot(Action, frozen=True, gc=False):
    """The next task may come, before anybody hears of this one's end."""


class ReportEnd(Action, frozen=True, gc=False):
    """Tell how the task ended, and forget it; free the slot before if that was not done.

    The timer for the end, if it still runs, has nothing to do any more.
    """

    end: End
    frees_slot: bool


# --- timers ----------------------------------------------------------------------------------


class StartTimer(Action, frozen=True, gc=False):
    """Nothing happens if the timer runs."""

    timer: Timer


class CancelTimers(Action, frozen=True, gc=False):
    """Cancel all timers but the one for the end."""
