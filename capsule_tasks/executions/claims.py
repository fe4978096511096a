"""The claim of an execution in Redis, the lease that it is under, and the acknowledgement.

Half of `lifecycle.py`, and one that can be read alone:

    UNCLAIMED ──▶ CLAIMING ──▶ CLAIMED ──▶ RECLAIMING ──▶ CLAIMING …      the lease was lost
        │          │    ▲
        ▼          ▼    │
       AWAITING_PREVIOUS                                           any of them ──▶ CLOSED
"""

from __future__ import annotations

import signal
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from capsule_tasks.executions import actions as do
from capsule_tasks.executions import events as on
from capsule_tasks.executions.actions import Action
from capsule_tasks.executions.ends import End, EndKind, LastEvent
from capsule_tasks.executions.events import Event, Refusal, Timer
from capsule_tasks.executions.origin import Origin
from capsule_tasks.executions.states import (
    ACK_MOVES,
    AWAITING_CLAIM,
    AWAITING_PREVIOUS,
    CELERY,
    CLAIM_MOVES,
    CLAIMED,
    CLAIMING,
    CLOSED,
    DEFERRED,
    DONE,
    ENDED,
    NEW,
    NONE,
    RECLAIMING,
    RUNNING,
    UNCLAIMED,
    moved,
)
from capsule_tasks.protocol.events import AttemptEnded
from capsule_tasks.protocol.messages import InputRequest

_CLAIM_WITH_EVENTS = do.ClaimWithEvents(takes_over=False)
_START_CLAIM_WAIT = do.StartTimer(Timer.CLAIM_WAIT)


class ClaimAxis:
    """Changes `claim` and `ack`; where the execution is, and how it ends, is its subclass's."""

    __slots__ = (
        "_awaits_takeover",
        "_do",
        "_doorbell_rang",
        "_end",
        "_has_waited",
        "_held_by",
        "_last",
        "_questions",
        "ack",
        "claim",
        "origin",
        "owner",
        "report",
        "run",
    )

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.run = NEW
        self.claim = UNCLAIMED
        self.report = NONE
        self.ack = CELERY
        self.owner = ""
        """Under which the execution is claimed."""
        self._do: Callable[[Action], None]
        """Appends to the actions of the event that is being handled."""
        self._end: End | None = None
        self._last: LastEvent | None = None
        """The last event, once it is published."""
        self._held_by = ""
        self._has_waited = False
        """Redis had its time for the claim before the execution began, and did not use it."""
        self._awaits_takeover = False
        """A claim with words was refused, since the execution runs elsewhere."""
        self._doorbell_rang = False
        self._questions: dict[str, InputRequest] = {}
        """The input requests that are open, in order."""

    @abstractmethod
    def _begin(self) -> None:
        """Nothing more has to be asked about the stream."""

    @abstractmethod
    def _finish(self, end: End) -> None:
        """The execution is over."""

    @abstractmethod
    def _report_end(self, *, frees_slot: bool) -> None:
        """Have the end told, if it was not."""

    # --- the claim -----------------------------------------------------------------------------

    def _claim_first(self) -> None:
        """The message of a retry may be here before its attempt has said the last words."""
        if self.origin.is_retry:
            self.claim = moved(CLAIM_MOVES, self.claim, AWAITING_PREVIOUS)
            self._do(do.AwaitPrevious())
        else:
            self.claim = moved(CLAIM_MOVES, self.claim, CLAIMING)
            self._do(do.ClaimFirst())

    def _claim_with_events(self) -> None:
        if self.claim is UNCLAIMED:
            self.claim = moved(CLAIM_MOVES, self.claim, CLAIMING)
            self._do(_CLAIM_WITH_EVENTS)

    def _on_claim_due(self) -> None:
        if self.run is not RUNNING:
            return
        if self.claim is UNCLAIMED:
            self._claim_with_events()
        elif self.claim is not CLOSED:
            self._do(do.Flush())
        if self.ack is DEFERRED:
            self._do(_START_CLAIM_WAIT)

    def _on_claim_stored(self, event: on.ClaimStored) -> None:
        if self.claim is not CLAIMING:
            return
        self.claim = moved(CLAIM_MOVES, self.claim, CLAIMED)
        self.owner = event.owner
        self._has_waited = False
        if self._end is None:
            self._do(do.RecordRunning())
        if self._doorbell_rang:
            self._doorbell_rang = False
            self._do(do.ReadCommands())
        if self.run is AWAITING_CLAIM:
            self._begin()
        self._do(do.Flush())
        if event.owner != event.current_owner:  # that lease was lost while the claim was on its way
            self._reclaim()
        else:
            self._confirm_lease()

    def _on_claim_refused(self, event: on.ClaimRefused) -> None:
        """Rule 4: another attempt has the execution, or it is over."""
        if self.claim is not CLAIMING:
            return
        if event.reason is Refusal.RUNS_ELSEWHERE and not self._awaits_takeover:
            self._awaits_takeover = True
            self.claim = moved(CLAIM_MOVES, self.claim, AWAITING_PREVIOUS)
            self._do(do.AwaitPrevious())
            return
        self._close()
        if self.run is not AWAITING_CLAIM:
            return
        if event.reason is Refusal.CANCELLED:
            self._finish(End(EndKind.TERMINATED, signum=int(signal.SIGTERM)))
        else:
            self._begin()

    def _on_previous_ended(self, _event: on.PreviousEnded) -> None:
        if self.claim is not AWAITING_PREVIOUS:
            return
        if self._awaits_takeover and isinstance(self._last, AttemptEnded):
            self._close()  # the attempt that follows has the execution by now
            return
        self.claim = moved(CLAIM_MOVES, self.claim, CLAIMING)
        if self._awaits_takeover:
            self._do(do.ClaimWithEvents(takes_over=True))
        else:
            self._do(do.ClaimFirst())

    def _on_successor_admitted(self, _event: on.SuccessorAdmitted) -> None:
        """The claim of the attempt that follows must not come before this one's."""
        self._claim_with_events()

    def _on_append_refused(self, _event: on.AppendRefused) -> None:
        if self.claim is not CLOSED:
            self._close()

    def _close(self, *, frees_slot: bool = False) -> None:
        """Rule 4: nothing more of this attempt is stored, and nobody waits for that."""
        self.claim = moved(CLAIM_MOVES, self.claim, CLOSED)
        self._do(do.CloseStream())
        for request_id in self._questions:
            self._do(do.EndInput(request_id))
        self._questions.clear()
        self._do(do.Release())
        self._acknowledge()
        if self._end is not None:
            self._report_end(frees_slot=frees_slot)

    # --- the lease -----------------------------------------------------------------------------

    def _on_hold_recorded(self, event: on.HoldRecorded) -> None:
        self._held_by = event.owner
        self._confirm_lease()

    def _confirm_lease(self) -> None:
        """Rule 3: the claim is stored and noted; whether the lease lasts is to be found out."""
        is_stored = self.claim is CLAIMED and self._held_by == self.owner
        if self.ack is DEFERRED and is_stored and self._end is None:
            self._do(_START_CLAIM_WAIT)
            self._do(do.ConfirmLease(self.owner))

    def _on_lease_confirmed(self, event: on.LeaseConfirmed) -> None:
        is_certain = self.claim is CLAIMED and self._held_by == self.owner == event.owner
        if is_certain:
            self._acknowledge()

    def _on_claim_waited(self) -> None:
        """Rules 3 and 5: Redis has had its time."""
        if self.run is AWAITING_CLAIM:
            self._has_waited = True
            self._begin()
        self._acknowledge()

    def _acknowledge(self) -> None:
        if self.ack is DEFERRED and self.report is not ENDED:
            self.ack = moved(ACK_MOVES, self.ack, DONE)
            self._do(do.Acknowledge())

    def _on_lease_begun(self, event: on.LeaseBegun) -> None:
        """A reaper may end what was claimed under the lease before: claim it anew."""
        if self.claim is CLAIMED and self.owner != event.owner:
            self._reclaim()

    def _reclaim(self) -> None:
        self.claim = moved(CLAIM_MOVES, self.claim, RECLAIMING)
        self._do(do.AwaitInFlight())

    def _on_in_flight_done(self, _event: on.InFlightDone) -> None:
        if self.claim is RECLAIMING:
            self.claim = moved(CLAIM_MOVES, self.claim, CLAIMING)
            for request in self._questions.values():  # the end of an attempt closes its questions
                self._do(do.Publish(request))
            self._do(do.Reclaim(self.owner))

    # --- the bell ------------------------------------------------------------------------------

    def _on_doorbell_rang(self, _event: on.DoorbellRang) -> None:
        """The reply to a claim brings the commands; until then the bell is remembered."""
        if self.claim is CLAIMED:
            self._do(do.ReadCommands())
        elif self.claim is not CLOSED:
            self._doorbell_rang = True
            if self.run is RUNNING:
                self._claim_with_events()

    claim_timers: ClassVar[dict[Timer, Callable[[ClaimAxis], None]]] = {
        Timer.CLAIM_DUE: _on_claim_due,
        Timer.CLAIM_WAIT: _on_claim_waited,
    }
    claim_handlers: ClassVar[dict[type[Event], Callable[[ClaimAxis, Any], None]]] = {
        on.ClaimStored: _on_claim_stored,
        on.ClaimRefused: _on_claim_refused,
        on.PreviousEnded: _on_previous_ended,
        on.SuccessorAdmitted: _on_successor_admitted,
        on.HoldRecorded: _on_hold_recorded,
        on.LeaseConfirmed: _on_lease_confirmed,
        on.LeaseBegun: _on_lease_begun,
        on.InFlightDone: _on_in_flight_done,
        on.AppendRefused: _on_append_refused,
        on.DoorbellRang: _on_doorbell_rang,
    }
