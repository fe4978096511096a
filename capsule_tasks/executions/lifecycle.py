"""The life of one execution in a worker: events come in, actions come out.

Plain state: no I/O, no clock, no timers of its own. Four axes, each with one table of moves:

- `run`: where the execution is on its way through a child;
- `claim`: what Redis knows of it;
- `report`: what Celery (or whoever sent the execution) has heard;
- `ack`: who acknowledges the message, and whether that is done.

The rules, each beside the code that keeps it:

1. Exactly one end is reported and exactly one last event is published.
2. A slot is freed once, when the execution is over for its child; the report may come later.
3. A deferred acknowledgement is given once the claim is *sure*: stored, noted as held by the same
   owner, and under a lease that lasts by the worker's own clock. Redis has a bounded time for that.
4. What an attempt says after another one took over is discarded.
5. Redis delays the beginning and the report of an execution for a bounded time, and fails neither.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, ClassVar

from capsule_tasks.executions import actions as do
from capsule_tasks.executions import events as on
from capsule_tasks.executions.actions import Action
from capsule_tasks.executions.claims import ClaimAxis
from capsule_tasks.executions.ends import (
    End,
    EndKind,
    LastEvent,
    another_follows,
    end_of_lost,
    end_of_traced,
    is_killed_at_limit,
    last_event,
    lost,
)
from capsule_tasks.executions.events import Event, Streaming, Timer
from capsule_tasks.executions.origin import Origin
from capsule_tasks.executions.states import (
    ACCEPTED,
    ACK_MOVES,
    AWAITING_CLAIM,
    AWAITING_JUDGEMENT,
    CLAIM_MOVES,
    CLAIMED,
    CLOSED,
    DEFERRED,
    ENDED,
    LOST,
    OVER,
    QUEUED,
    REPORT_MOVES,
    RUN_MOVES,
    RUNNING,
    SENT,
    UNCLAIMED,
    moved,
)
from capsule_tasks.protocol.events import AttemptEnded, CancelCommand
from capsule_tasks.protocol.messages import TaskResult

_ASYNC_GRACE_S = 5.0
"""From the cancel of a coroutine to the kill of its child, and so of its neighbours."""
_MAX_REQUESTED_BY = 200
_SEND = do.Send()
_FREE_SLOT = do.FreeSlot()
_PUBLISH_START = do.PublishStart()
_CANCEL_TIMERS = do.CancelTimers()
_START_CLAIM_DUE = do.StartTimer(Timer.CLAIM_DUE)
_START_CLAIM_WAIT = do.StartTimer(Timer.CLAIM_WAIT)
_START_END_WAIT = do.StartTimer(Timer.END_WAIT)
_START_SOFT_LIMIT = do.StartTimer(Timer.SOFT_LIMIT)
_START_HARD_LIMIT = do.StartTimer(Timer.HARD_LIMIT)
_START_TIDY = do.StartTimer(Timer.TIDY)
_NO_STREAM, _, _CLAIM_FIRST = Streaming
_UNSENT = frozenset({AWAITING_CLAIM, AWAITING_JUDGEMENT, QUEUED})
_BROKER_LOST = End(EndKind.REQUEUED, "the connection to the broker was lost")
_WORKER_STOPPED = "its worker was stopped"


class Lifecycle(ClaimAxis):
    """Feed every event to `handle`, and carry out what it returns, in order."""

    __slots__ = ("_is_over_limit", "_is_worker_stopping", "_suspected", "stop_signum")

    def __init__(self, origin: Origin) -> None:
        super().__init__(origin)
        self.stop_signum: int | None = None
        """The signal that somebody wants the execution ended with."""
        self._is_worker_stopping = False
        self._is_over_limit = False
        self._suspected: End | None = None
        """The loss that is being judged."""

    def __repr__(self) -> str:
        where = " ".join(one.name for one in (self.run, self.claim, self.report, self.ack))
        return f"<Lifecycle of {self.origin.task}[{self.origin.execution_id}]: {where}>"

    def handle(self, event: Event) -> list[Action]:
        """The actions that follow from an event."""
        actions: list[Action] = []
        self._do = actions.append
        self._handlers[type(event)](self, event)
        return actions

    @property
    def is_over(self) -> bool:
        return self.run is OVER

    @property
    def is_with_child(self) -> bool:
        return self.run is SENT or self.run is RUNNING

    @property
    def has_started(self) -> bool:
        """Whether the execution waits for nothing but a child, or has come to one."""
        return self.run in (QUEUED, SENT, RUNNING, LOST)

    @property
    def is_published(self) -> bool:
        """Whether what the execution says now comes into its stream."""
        return self.claim is not CLOSED and self._end is None

    # --- beginning -----------------------------------------------------------------------------

    def _on_admitted(self, event: on.Admitted) -> None:
        if event.streaming is _CLAIM_FIRST:
            self.run = moved(RUN_MOVES, self.run, AWAITING_CLAIM)
            self._do(_START_CLAIM_WAIT)
            self._claim_first()
            return
        if event.streaming is _NO_STREAM:
            self.claim = moved(CLAIM_MOVES, self.claim, CLOSED)
        self._begin()

    def _on_discarded(self, event: on.Discarded) -> None:
        self.report = moved(REPORT_MOVES, self.report, ENDED)  # by Celery, before this
        if event.streaming is _NO_STREAM:
            self.claim = moved(CLAIM_MOVES, self.claim, CLOSED)
        elif event.streaming is _CLAIM_FIRST:
            self._claim_first()
        self._finish(End(EndKind.DISCARDED, event.reason))

    def _begin(self) -> None:
        """Nothing more has to be asked about the stream."""
        if self.run is AWAITING_CLAIM:
            # A CLAIM_WAIT that was started for the beginning must not cut short the one that an
            # acknowledgement starts later.
            self._do(_CANCEL_TIMERS)
        if self.origin.is_redelivered and not self.origin.is_async:
            self.run = moved(RUN_MOVES, self.run, AWAITING_JUDGEMENT)
            self._do(do.JudgeLoss(None))
        else:
            self._queue()

    def _queue(self) -> None:
        self.run = moved(RUN_MOVES, self.run, QUEUED)
        self._do(_SEND)

    def _on_loss_judged(self, event: on.LossJudged) -> None:
        if self.run is AWAITING_JUDGEMENT:
            if event.end is not None:
                self._finish(event.end)
            else:
                self._queue()
        elif self.run is LOST:
            end = event.end or self._suspected
            assert end is not None
            self._finish(end)

    # --- the child -----------------------------------------------------------------------------

    def _on_sent(self, _event: on.Sent) -> None:
        if self.run is QUEUED:
            self.run = moved(RUN_MOVES, self.run, SENT)

    def _on_send_refused(self, _event: on.SendRefused) -> None:
        if self.run is SENT:
            self.run = moved(RUN_MOVES, self.run, QUEUED)

    def _on_child_started(self, event: on.ChildStarted) -> None:
        if self.run is not SENT:
            return
        self.run = moved(RUN_MOVES, self.run, RUNNING)
        self.report = moved(REPORT_MOVES, self.report, ACCEPTED)
        is_streamed = self.claim is not CLOSED
        defers_ack = is_streamed and self.origin.ack_waits_for_claim
        if defers_ack:
            self.ack = moved(ACK_MOVES, self.ack, DEFERRED)
        self._do(do.ReportAccepted(event.at, defers_ack))
        if is_streamed:
            self._do(_PUBLISH_START)
            if self._doorbell_rang:
                self._claim_with_events()
            self._do(_START_CLAIM_DUE)
            if self.claim is CLAIMED:
                self._confirm_lease()
            elif self._has_waited:
                self._acknowledge()
        if self.origin.soft_limit_s:
            self._do(_START_SOFT_LIMIT)
        if self.origin.hard_limit_s:
            self._do(_START_HARD_LIMIT)

    def _on_first_output(self, _event: on.FirstOutput) -> None:
        self._claim_with_events()

    def _on_input_requested(self, event: on.InputRequested) -> None:
        """A question that reaches nobody is answered at once, with the end of the input."""
        if not self.is_published:
            self._do(do.EndInput(event.request.id))
            return
        self._questions[event.request.id] = event.request
        self._do(do.Publish(event.request))
        self._claim_with_events()

    def _on_input_answered(self, event: on.InputAnswered) -> None:
        self._questions.pop(event.closed.request_id, None)
        if self.is_published:
            self._do(do.Publish(event.closed))
            self._claim_with_events()

    def _on_finished(self, event: on.Finished) -> None:
        """Rule 1: a terminal message counts once, whatever was decided before."""
        terminal, status = event.terminal, event.exit_status
        if not self.is_with_child:
            return
        if status is not None:
            # The task may have begun without a word: a message that is acknowledged early must
            # not be delivered again.
            self._on_child_started(on.ChildStarted(event.at))
        if isinstance(terminal, TaskResult) and not (
            terminal.escaped_tracer and self.stop_signum is not None
        ):
            self._finish(end_of_traced(terminal))
            return
        if is_killed_at_limit(
            self.stop_signum,
            status,
            is_over_limit=self._is_over_limit,
            is_async=self.origin.is_async,
        ):
            why = f"TimeLimitExceeded({self.origin.hard_limit_s},)"
            self._finish(End(EndKind.OVER_LIMIT, why).with_bytes_of(terminal))
            return
        end = end_of_lost(self.stop_signum, terminal, status)
        # Coroutines share a child: the one that it died of cannot be told from the others.
        is_cause_known = (
            status is not None and self.stop_signum is None and not self.origin.is_async
        )
        if is_cause_known and self.origin.comes_again_when_lost:
            self._suspected = end
            self._questions.clear()  # there is no child that could be answered
            self.run = moved(RUN_MOVES, self.run, LOST)
            self._do(do.JudgeLoss(end))
        else:
            self._finish(end)

    # --- stopping ------------------------------------------------------------------------------

    def _on_stop_requested(self, event: on.StopRequested) -> None:
        if self.run is OVER:
            return
        self.stop_signum = event.signum  # a second request, stronger, may follow
        self._is_worker_stopping = self._is_worker_stopping or event.is_worker_stopping
        if not self.is_with_child:
            self._finish(End(EndKind.TERMINATED, signum=event.signum))
        elif self.origin.is_async:
            self._do(do.CancelInChild(_ASYNC_GRACE_S, event.requested_by))
        elif event.signum == signal.SIGKILL:
            self._do(do.Kill(event.requested_by))
        else:
            self._do(do.Signal(event.signum, event.requested_by))

    def _on_cancel_requested(self, event: on.CancelRequested) -> None:
        if self.run is OVER:
            return
        signum = self.stop_signum = self.stop_signum or int(signal.SIGTERM)
        if not self.is_with_child:
            self._finish(End(EndKind.TERMINATED, signum=signum))
        else:
            self._do(do.CancelInChild(event.grace_s, event.requested_by))

    def _on_kill_requested(self, event: on.KillRequested) -> None:
        if not self.is_with_child:
            return
        # A stop that was requested before is in the log already.
        requested_by = event.requested_by if self.stop_signum is None else ""
        self.stop_signum = self.stop_signum or int(signal.SIGKILL)
        self._do(do.Kill(requested_by))

    def _on_soft_limit(self) -> None:
        if self.run is RUNNING:
            self._do(do.RaiseSoftLimit())

    def _on_hard_limit(self) -> None:
        """The limit is reported once the task is stopped: it may come to its end before."""
        if self.run is not RUNNING:
            return
        self._is_over_limit = True
        if self.origin.is_async:
            self._do(do.CancelInChild(_ASYNC_GRACE_S, ""))
        elif self.stop_signum is not None:  # the task was asked to leave before
            self._do(do.Kill(""))
        else:
            self._do(do.Signal(int(signal.SIGTERM), ""))
            self._do(_START_TIDY)

    def _on_tidied(self) -> None:
        if self.is_with_child:
            self._do(do.Kill(""))

    def _on_broker_lost(self, _event: on.BrokerLost) -> None:
        if self.run in _UNSENT:
            self._finish(_BROKER_LOST)

    def _on_worker_stopping(self, _event: on.WorkerStopping) -> None:
        """Report nothing: an unacknowledged message is delivered again."""
        if self.run is OVER:
            return
        is_gone = self.report is ACCEPTED and not self.origin.acks_late and self.ack is not DEFERRED
        was_queued, was_unseen = self.run is QUEUED, self._is_unseen()
        self.run = moved(RUN_MOVES, self.run, OVER)
        self.report = moved(REPORT_MOVES, self.report, ENDED)
        if was_queued:
            self._do(do.Unqueue())  # a child that is free before the pool has ended must not run it
        self._do(_CANCEL_TIMERS)
        event = lost(_WORKER_STOPPED) if is_gone else another_follows("requeued", _WORKER_STOPPED)
        self._end = End(EndKind.REQUEUED, _WORKER_STOPPED)
        if was_unseen:
            self._close()
        elif self.claim is not CLOSED:
            self._publish_end(event)

    # --- the end -------------------------------------------------------------------------------

    def _finish(self, end: End) -> None:
        """Rules 1 and 2: the one way to be over. The slot is free now; Celery hears of the end
        when the last event is stored, so that an acknowledged message has its end in the stream.
        """
        was_queued, was_unseen = self.run is QUEUED, self._is_unseen()
        self.run = moved(RUN_MOVES, self.run, OVER)
        self._end = end
        if was_queued:
            self._do(do.Unqueue())
        self._do(_CANCEL_TIMERS)
        if self.claim is CLOSED:
            self._report_end(frees_slot=True)
            return
        event = last_event(end, self.origin, is_worker_stopping=self._is_worker_stopping)
        if was_unseen and isinstance(event, AttemptEnded):
            self._close(frees_slot=True)
            return
        if self.report is not ENDED:
            self._do(_FREE_SLOT)
        self._do(_START_END_WAIT)
        self._publish_end(event)

    def _publish_end(self, event: LastEvent) -> None:
        self._last = event
        self._questions.clear()  # they end with the execution
        self._do(do.PublishEnd(event))
        self._claim_with_events()

    def _is_unseen(self) -> bool:
        """Whether neither Redis nor a watcher can know of this attempt."""
        return self.claim is UNCLAIMED and self.report is not ACCEPTED

    def _on_end_stored(self, _event: on.EndStored) -> None:
        if self.claim is not CLOSED and self._last is not None:
            self.claim = moved(CLAIM_MOVES, self.claim, CLOSED)
            self._do(do.RecordEnd(self._last))
            self._do(do.Release())
            self._report_all()

    def _on_end_waited(self) -> None:
        """Rule 5: Redis is away; the end is stored when it is back."""
        self._report_all()

    def _report_all(self) -> None:
        self._acknowledge()
        if self._end is not None:
            self._report_end(frees_slot=False)

    def _report_end(self, *, frees_slot: bool) -> None:
        if self.report is not ENDED:
            self.report = moved(REPORT_MOVES, self.report, ENDED)
            assert self._end is not None
            self._do(do.ReportEnd(self._end, frees_slot))

    # --- commands ------------------------------------------------------------------------------

    def _on_command_received(self, event: on.CommandReceived) -> None:
        """Before the attempt is claimed only a cancel is meant for it."""
        command = event.command
        if isinstance(command, CancelCommand):
            self._on_cancel_requested(
                on.CancelRequested(command.grace_s, _quoted(command.requested_by))
            )
        elif self.is_with_child and self.owner and self.claim is not CLOSED:
            self._do(do.CommandChild(command, next(iter(self._questions), "")))

    # --- moves ---------------------------------------------------------------------------------

    def _on_timer_fired(self, event: on.TimerFired) -> None:
        self._timers[event.timer](self)

    _timers: ClassVar[dict[Timer, Callable[[Lifecycle], None]]] = {
        **ClaimAxis.claim_timers,
        Timer.END_WAIT: _on_end_waited,
        Timer.SOFT_LIMIT: _on_soft_limit,
        Timer.HARD_LIMIT: _on_hard_limit,
        Timer.TIDY: _on_tidied,
    }
    _handlers: ClassVar[dict[type[Event], Callable[[Lifecycle, Any], None]]] = {
        **ClaimAxis.claim_handlers,
        on.Admitted: _on_admitted,
        on.Discarded: _on_discarded,
        on.LossJudged: _on_loss_judged,
        on.Sent: _on_sent,
        on.SendRefused: _on_send_refused,
        on.ChildStarted: _on_child_started,
        on.FirstOutput: _on_first_output,
        on.InputRequested: _on_input_requested,
        on.InputAnswered: _on_input_answered,
        on.Finished: _on_finished,
        on.TimerFired: _on_timer_fired,
        on.EndStored: _on_end_stored,
        on.CommandReceived: _on_command_received,
        on.StopRequested: _on_stop_requested,
        on.CancelRequested: _on_cancel_requested,
        on.KillRequested: _on_kill_requested,
        on.BrokerLost: _on_broker_lost,
        on.WorkerStopping: _on_worker_stopping,
    }


def _quoted(requested_by: str) -> str:
    """Quoted: whoever can write to Redis chooses the text, and it must stay one line of the log."""
    if not requested_by:
        return "Execution.cancel"
    return f"{requested_by[:_MAX_REQUESTED_BY]!r} (Execution.cancel)"
