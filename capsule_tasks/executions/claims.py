"""The claim of an execution in Redis, its lease, and the acknowledgement of its message.

One half of the lifecycle, which can be read without the other:

    UNCLAIMED ──▶ CLAIMING ──▶ CLAIMED ──▶ RECLAIMING ──▶ CLAIMING …      the lease was lost
        │          │    ▲
        ▼          ▼    │
       AWAITING_PREVIOUS                                           any of them ──▶ CLOSED
"""

from __future__ import annotations

import signal
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from capsule_tasks.executions import actions as do
from capsule_tasks.executions import states
from capsule_tasks.executions.actions import Action, Timer
from capsule_tasks.executions.ends import End, EndKind, LastEvent
from capsule_tasks.executions.origin import Origin
from capsule_tasks.protocol.events import AttemptEnded
from capsule_tasks.protocol.messages import InputRequest

NOT_CLAIMED = End(EndKind.NOT_CLAIMED, "another worker has the execution, or it has ended")
_CLAIM_WITH_EVENTS = do.ClaimWithEvents(takes_over=False)
_START_CLAIM_WAIT = do.StartTimer(Timer.CLAIM_WAIT)


class Streaming(Enum):
    """How an execution comes to its stream."""

    NONE = auto()
    """Never: streams are off, or the buffer for Redis is full."""
    CLAIM_LATER = auto()
    """The execution is new: it starts now and is claimed with its first events."""
    CLAIM_FIRST = auto()
    """Redis may know of an attempt or a command: the execution is claimed before it starts."""


class Refusal(Enum):
    """Why a claim was refused."""

    RUNS_ELSEWHERE = auto()
    """Another attempt runs, and may be about to end."""
    CANCELLED = auto()
    """The execution was ended by a cancel."""
    CLOSED = auto()
    """Another attempt has the execution, the execution has ended, or Redis refused the call."""


@dataclass(eq=False, slots=True)
class ClaimAxis:
    """Decides about `claim` and `ack`; the subclass decides about `run`, `report` and the end."""

    origin: Origin
    run: states.Run = states.NEW
    claim: states.Claim = states.UNCLAIMED
    report: states.Report = states.NONE
    ack: states.Ack = states.CELERY
    owner: str = ""
    """The incarnation under which the execution is claimed."""
    _do: Callable[[Action], object] = field(init=False)
    """Appends to the actions of the event that is being handled."""
    _end: End | None = None
    _last: LastEvent | None = None
    """The last event, once it is published."""
    _held_by: str = ""
    """The incarnation that is recorded as holding the execution."""
    _has_waited: bool = False
    """The claim that had to come before the start was not answered in time."""
    _awaits_takeover: bool = False
    """A claim with events was refused, since the execution runs elsewhere."""
    _doorbell_rang: bool = False
    _questions: dict[str, InputRequest] = field(default_factory=dict)
    """The input requests that are open, in order."""

    @abstractmethod
    def _start(self) -> None:
        """Nothing more has to be known about the stream before the execution starts."""

    @abstractmethod
    def _finish(self, end: End) -> None:
        """The execution is over."""

    @abstractmethod
    def _report_end(self, *, frees_slot: bool) -> None:
        """Report the end, unless it was reported."""

    # --- the claim -----------------------------------------------------------------------------

    def _claim_first(self) -> None:
        """The message of a retry may arrive before the previous attempt has published its end."""
        if self.origin.is_retry:
            self.claim = self.claim.to[states.AWAITING_PREVIOUS]
            self._do(do.AwaitPrevious())
        else:
            self.claim = self.claim.to[states.CLAIMING]
            self._do(do.ClaimFirst())

    def _claim_with_events(self) -> None:
        if self.claim is states.UNCLAIMED:
            self.claim = self.claim.to[states.CLAIMING]
            self._do(_CLAIM_WITH_EVENTS)

    def on_claim_due(self) -> None:
        """A task that runs silently is claimed now."""
        if self.run is not states.RUNNING:
            return
        if self.claim is states.UNCLAIMED:
            if not self.origin.claims_with_output:
                self._claim_with_events()
        elif self.claim is not states.CLOSED:
            self._do(do.Flush())
        if self.ack is states.DEFERRED:
            self._do(_START_CLAIM_WAIT)

    def on_claim_stored(self, owner: str, current_owner: str) -> None:
        """The execution is claimed under `owner`; the lease may have changed since."""
        if self.claim is not states.CLAIMING:
            return
        self.claim = self.claim.to[states.CLAIMED]
        self.owner = owner
        self._has_waited = False
        if self._end is None:
            self._do(do.RecordRunning())
        if self._doorbell_rang:
            self._doorbell_rang = False
            self._do(do.ReadCommands())
        if self.run is states.AWAITING_CLAIM and not self.origin.needs_claim:
            self._start()
        self._do(do.Flush())
        if owner != current_owner:  # that lease was lost while the claim was sent
            self._reclaim()
        else:
            self._confirm_lease()

    def on_claim_refused(self, reason: Refusal) -> None:
        """Rule 4: another attempt has the execution, or the execution has ended."""
        if self.claim is not states.CLAIMING:
            return
        if reason is Refusal.RUNS_ELSEWHERE and not self._awaits_takeover:
            self._awaits_takeover = True
            self.claim = self.claim.to[states.AWAITING_PREVIOUS]
            self._do(do.AwaitPrevious())
            return
        self._close()
        if self.run is not states.AWAITING_CLAIM:
            return
        if self.origin.needs_claim:
            self._finish(NOT_CLAIMED)
        elif reason is Refusal.CANCELLED:
            self._finish(End(EndKind.STOPPED, signum=int(signal.SIGTERM)))
        else:
            self._start()

    def on_previous_ended(self) -> None:
        """The previous attempt has ended, or has had its time to."""
        if self.claim is not states.AWAITING_PREVIOUS:
            return
        is_late = isinstance(self._last, AttemptEnded) and not self.origin.claims_with_output
        if self._awaits_takeover and is_late:
            self._close()  # the attempt that follows this one has the execution by now
            return
        self.claim = self.claim.to[states.CLAIMING]
        if self._awaits_takeover:
            self._do(do.ClaimWithEvents(takes_over=True))
        else:
            self._do(do.ClaimFirst())

    def on_successor_admitted(self) -> None:
        """Another message with the same id came to this worker: claim now.

        The claim of the attempt that follows must not come before this one's.
        """
        if not self.origin.claims_with_output:
            self._claim_with_events()

    def on_append_refused(self) -> None:
        """Nothing more of this attempt is stored."""
        if self.claim is not states.CLOSED:
            self._close()

    def _close(self, *, frees_slot: bool = False) -> None:
        """Rule 4: nothing more of this attempt is stored, so nothing waits for that any more."""
        self.claim = self.claim.to[states.CLOSED]
        self._do(do.CloseStream())
        for request_id in self._questions:
            self._do(do.EndInput(request_id))
        self._questions.clear()
        self._acknowledge()
        if self._end is not None:
            self._report_end(frees_slot=frees_slot)

    # --- the lease -----------------------------------------------------------------------------

    def on_hold_recorded(self, owner: str) -> None:
        """The execution is recorded as held by this owner, where a reaper finds it."""
        self._held_by = owner
        self._confirm_lease()

    def _confirm_lease(self) -> None:
        """Rules 3 and 6: the claim is stored and the hold recorded; ask whether the lease lasts."""
        is_stored = self.claim is states.CLAIMED and self._held_by == self.owner
        if not is_stored or self._end is not None:
            return
        if self.ack is states.DEFERRED:
            self._do(_START_CLAIM_WAIT)
            self._do(do.ConfirmLease(self.owner))
        elif self.run is states.AWAITING_CLAIM:
            self._do(do.ConfirmLease(self.owner))

    def on_lease_confirmed(self, owner: str) -> None:
        """The owner's lease lasts, by the worker's own clock."""
        if self.claim is states.CLAIMED and self._held_by == self.owner == owner:
            self._acknowledge()
            if self.run is states.AWAITING_CLAIM:
                self._start()

    def on_claim_wait(self) -> None:
        """Rule 3: the claim was not answered in time."""
        self._acknowledge()

    def on_start_wait(self) -> None:
        """Rule 5: the claim that has to come before the start was not answered in time."""
        if self.run is states.AWAITING_CLAIM:
            self._has_waited = True
            self._start()

    def _acknowledge(self) -> None:
        if self.ack is states.DEFERRED and self.report is not states.ENDED:
            self.ack = self.ack.to[states.DONE]
            self._do(do.Acknowledge())

    def on_lease_begun(self, owner: str) -> None:
        """A reaper may end what was claimed under the previous lease: claim the execution again."""
        if self.claim is states.CLAIMED and self.owner != owner:
            self._reclaim()

    def _reclaim(self) -> None:
        self.claim = self.claim.to[states.RECLAIMING]
        self._do(do.AwaitInFlight())

    def on_in_flight_done(self) -> None:
        """All calls of the execution are answered."""
        if self.claim is states.RECLAIMING:
            self.claim = self.claim.to[states.CLAIMING]
            for request in self._questions.values():  # the end of an attempt closes its questions
                self._do(do.Publish(request))
            self._do(do.Reclaim(self.owner))

    # --- the doorbell --------------------------------------------------------------------------

    def on_doorbell_rang(self) -> None:
        """The execution may have been sent a command.

        The reply to a claim brings the commands; until then remember that the doorbell rang.
        """
        if self.claim is states.CLAIMED:
            self._do(do.ReadCommands())
        elif self.claim is not states.CLOSED:
            self._doorbell_rang = True
            if self.run is states.RUNNING and not self.origin.claims_with_output:
                self._claim_with_events()
