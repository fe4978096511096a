"""The life of one execution in a worker: events come in, actions come out.

An event is a fact, never an order: a method `on_…` of the lifecycle, and its arguments.
Plain state: no I/O, no clock, no timers of its own. Four axes, each with its moves in `states.py`:

- `run`: where the execution is on its way through a child;
- `claim`: what Redis knows of it;
- `report`: what was reported to Celery (or to whatever else sent the execution);
- `ack`: who acknowledges the message, and whether that is done.

The rules, each next to the code that keeps it:

1. Exactly one end is reported and exactly one last event is published.
2. A slot is freed once, when the execution is over for its child; the report may come later.
3. A deferred acknowledgement is given once the claim is *sure*: stored, recorded as held by the
   same owner, and under a lease that lasts by the worker's own clock; or when Redis has had its
   time for that.
4. Whatever an attempt publishes after another one took over is discarded.
5. Redis delays the start and the report of an execution for a bounded time, and fails neither.
6. An execution that needs a claim starts when its claim is sure, and its end is reported when that
   is stored, however long Redis takes. Refused the claim, it ends here without having run.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, Final, ParamSpec

from capsule_tasks.executions import actions as do
from capsule_tasks.executions import ends, states
from capsule_tasks.executions.actions import Action, Timer
from capsule_tasks.executions.claims import NOT_CLAIMED, ClaimAxis, Streaming
from capsule_tasks.executions.ends import End, EndKind, LastEvent
from capsule_tasks.protocol.events import AttemptEnded, CancelCommand, Command
from capsule_tasks.protocol.messages import InputClosed, InputRequest, TaskResult, Terminal

P = ParamSpec("P")

_ASYNC_GRACE_S = 5.0
"""From the cancel of a coroutine to the kill of its child, and so of its neighbours."""
_MAX_REQUESTED_BY = 200
_SEND = do.Send()
_FREE_SLOT = do.FreeSlot()
_PUBLISH_START = do.PublishStart()
_NO_STREAM, _, _CLAIM_FIRST = Streaming
_UNSENT = frozenset({states.AWAITING_CLAIM, states.AWAITING_JUDGEMENT, states.QUEUED})
_BROKER_LOST = End(EndKind.REQUEUED, "the connection to the broker was lost")
_WORKER_STOPPED = "its worker was stopped"


@dataclass(eq=False, slots=True)
class Lifecycle(ClaimAxis):
    """Have `handle` call the method of an event, and carry out the actions that follow, in order:

    life.handle(Lifecycle.on_claim_stored, owner, current_owner)
    """

    stop_signum: int | None = None
    """The signal that the execution was requested to be ended with; for a cancel, which sends none,
    the one that Celery reports: SIGTERM."""
    is_worker_stopping: bool = False
    """The worker itself asked for the end: the message is requeued."""
    _is_over_limit: bool = False
    _is_end_stored: bool = False
    _suspected: End | None = None
    """The loss that is being judged."""

    def __repr__(self) -> str:
        where = " ".join(state.name for state in (self.run, self.claim, self.report, self.ack))
        return f"<Lifecycle of {self.origin.task}[{self.origin.execution_id}]: {where}>"

    def handle(self, event: Event[P], *args: P.args, **kwargs: P.kwargs) -> list[Action]:
        """The actions that follow from an event."""
        actions: list[Action] = []
        self._do = actions.append
        event(self, *args, **kwargs)
        return actions

    @property
    def is_over(self) -> bool:
        return self.run is states.OVER

    @property
    def is_with_child(self) -> bool:
        return self.run is states.SENT or self.run is states.RUNNING

    @property
    def is_published(self) -> bool:
        """Whether what the execution publishes now is stored."""
        return self.claim is not states.CLOSED and self._end is None

    # --- the start -----------------------------------------------------------------------------

    def on_admitted(self, streaming: Streaming) -> None:
        """The execution came to this worker."""
        if streaming is _CLAIM_FIRST:
            self.run = self.run.to[states.AWAITING_CLAIM]
            if not self.origin.needs_claim:
                self._do(do.StartTimer(Timer.START_WAIT))
            self._claim_first()
            return
        if streaming is _NO_STREAM:
            self.claim = self.claim.to[states.CLOSED]
        if self.origin.needs_claim:
            self._finish(NOT_CLAIMED)
        else:
            self._start()

    def on_discarded(self, streaming: Streaming, reason: str) -> None:
        """Celery discarded the execution before it reached the pool."""
        self.report = self.report.to[states.ENDED]  # by Celery, before this
        if streaming is _NO_STREAM:
            self.claim = self.claim.to[states.CLOSED]
        elif streaming is _CLAIM_FIRST:
            self._claim_first()
        self._finish(End(EndKind.DISCARDED, reason))

    def _start(self) -> None:
        if self.origin.is_redelivered and not self.origin.is_async:
            self.run = self.run.to[states.AWAITING_JUDGEMENT]
            self._do(do.JudgeLoss(None))
        else:
            self._queue()

    def _queue(self) -> None:
        self.run = self.run.to[states.QUEUED]
        self._do(_SEND)

    def on_loss_judged(self, end: End | None) -> None:
        """With an `end`, the message has cost too many processes."""
        if self.run is states.AWAITING_JUDGEMENT:
            if end is not None:
                self._finish(end)
            else:
                self._queue()
        elif self.run is states.LOST:
            end = end or self._suspected
            assert end is not None
            self._finish(end)

    # --- the child -----------------------------------------------------------------------------

    def on_sent(self) -> None:
        """A child was sent the execution."""
        if self.run is states.QUEUED:
            self.run = self.run.to[states.SENT]

    def on_send_refused(self) -> None:
        """A condemned child refused the execution, which is queued again."""
        if self.run is states.SENT:
            self.run = self.run.to[states.QUEUED]

    def on_child_started(self, at: float) -> None:
        """The child has started the execution, or has had the time to."""
        if self.run is not states.SENT:
            return
        self.run = self.run.to[states.RUNNING]
        self.report = self.report.to[states.ACCEPTED]
        is_streamed = self.claim is not states.CLOSED
        defers_ack = is_streamed and self.origin.ack_waits_for_claim
        if defers_ack:
            self.ack = self.ack.to[states.DEFERRED]
        self._do(do.ReportAccepted(at, defers_ack))
        if is_streamed:
            self._do(_PUBLISH_START)
            if self._doorbell_rang and not self.origin.claims_with_output:
                self._claim_with_events()
            if self.claim is states.CLAIMED:
                self._confirm_lease()
            elif self._has_waited:
                self._acknowledge()
        if self.origin.soft_limit_s:
            self._do(do.StartTimer(Timer.SOFT_LIMIT))
        if self.origin.hard_limit_s:
            self._do(do.StartTimer(Timer.HARD_LIMIT))

    def on_first_output(self) -> None:
        """The execution has an event that watchers should see now."""
        self._claim_with_events()

    def on_input_requested(self, request: InputRequest) -> None:
        """A question that cannot be published is answered now, with the end of the input."""
        if not self.is_published:
            self._do(do.EndInput(request.id))
            return
        self._questions[request.id] = request
        self._do(do.Publish(request))
        self._claim_with_events()

    def on_input_answered(self, closed: InputClosed) -> None:
        self._questions.pop(closed.request_id, None)
        if self.is_published:
            self._do(do.Publish(closed))
            self._claim_with_events()

    def on_finished(self, terminal: Terminal, status: int | None, at: float) -> None:
        """The child's terminal message, and its exit status if the child has ended.

        Rule 1: only the first terminal message counts, whatever was decided before.
        """
        if not self.is_with_child:
            return
        if status is not None:
            # The task may have started without an Ack: a message that is acknowledged early must
            # not be delivered again.
            self.on_child_started(at)
        if isinstance(terminal, TaskResult) and not (
            terminal.escaped_tracer and self.stop_signum is not None
        ):
            self._finish(ends.end_of_traced(terminal))
            return
        if self._is_killed_at_limit(status):
            message = f"TimeLimitExceeded({self.origin.hard_limit_s},)"
            self._finish(End(EndKind.OVER_LIMIT, message).with_bytes_of(terminal))
            return
        end = ends.end_of_unfinished(self.stop_signum, terminal, status)
        if self.origin.needs_claim:
            end = ends.call_in_part(end)
        # Coroutines share a child: the one that killed it cannot be identified.
        is_cause_known = (
            status is not None and self.stop_signum is None and not self.origin.is_async
        )
        if is_cause_known and self.origin.redelivers_when_lost:
            self._suspected = end
            self._questions.clear()  # no child is left that could take a response
            self.run = self.run.to[states.LOST]
            self._do(do.JudgeLoss(end))
        else:
            self._finish(end)

    def _is_killed_at_limit(self, status: int | None) -> bool:
        """Whether the hard limit ended the execution, and no signal before that did."""
        has_refused = self.stop_signum != signal.SIGKILL and status == -signal.SIGKILL
        is_cause = self.stop_signum is None or (has_refused and not self.origin.is_async)
        return self._is_over_limit and is_cause

    # --- stopping ------------------------------------------------------------------------------

    def on_stop_requested(
        self, signum: int, requested_by: str, is_worker_stopping: bool = False
    ) -> None:
        """The execution is to be ended with a signal.

        With `is_worker_stopping` the worker itself asks, and the message is requeued.
        """
        if self.run is states.OVER:
            return
        self.stop_signum = signum  # a second request, stronger, may follow
        self.is_worker_stopping = self.is_worker_stopping or is_worker_stopping
        if not self.is_with_child:
            self._finish(End(EndKind.STOPPED, signum=signum))
        elif self.origin.is_async:
            self._do(do.CancelInChild(_ASYNC_GRACE_S, requested_by))
        else:
            self._do(do.Signal(signum, requested_by))

    def on_cancel_requested(self, grace_s: float | None, requested_by: str) -> None:
        """The execution is to be ended in order, and by force after the grace."""
        if self.run is states.OVER:
            return
        signum = self.stop_signum = self.stop_signum or int(signal.SIGTERM)
        if not self.is_with_child:
            self._finish(End(EndKind.STOPPED, signum=signum))
        else:
            self._do(do.CancelInChild(grace_s, requested_by))

    def on_kill_requested(self, requested_by: str) -> None:
        """The worker waits for running executions no longer."""
        if not self.is_with_child:
            return
        # A stop that was requested before is in the log already.
        requested_by = requested_by if self.stop_signum is None else ""
        self.stop_signum = self.stop_signum or int(signal.SIGKILL)
        self._do(do.Signal(int(signal.SIGKILL), requested_by))

    def on_soft_limit(self) -> None:
        if self.run is states.RUNNING:
            self._do(do.RaiseSoftLimit())

    def on_hard_limit(self) -> None:
        """The limit is reported once the task is stopped: the task may end by itself before."""
        if self.run is not states.RUNNING:
            return
        self._is_over_limit = True
        if self.origin.is_async:
            self._do(do.CancelInChild(_ASYNC_GRACE_S, ""))
        elif self.stop_signum is not None:  # the task was asked to stop before
            self._do(do.Signal(int(signal.SIGKILL), ""))
        else:
            self._do(do.Signal(int(signal.SIGTERM), ""))
            self._do(do.StartTimer(Timer.TIDY))

    def on_tidy(self) -> None:
        if self.is_with_child:
            self._do(do.Signal(int(signal.SIGKILL), ""))

    def on_broker_lost(self) -> None:
        """The connection to the broker is lost: messages that have not started are redelivered."""
        if self.run in _UNSENT and not self.origin.needs_claim:
            self._finish(_BROKER_LOST)

    def on_worker_stopping(self) -> None:
        """The pool stops. Report nothing: an unacknowledged message is redelivered."""
        if self.run is states.OVER:
            return
        is_acked = (
            self.report is states.ACCEPTED
            and not self.origin.acks_late
            and self.ack is not states.DEFERRED
        )
        may_have_run = self.origin.needs_claim and self.is_with_child
        was_queued, was_unseen = self.run is states.QUEUED, self._is_unseen()
        self.run = self.run.to[states.OVER]
        self.report = self.report.to[states.ENDED]
        if was_queued:
            self._do(do.Unqueue())  # no child may run it before the pool has ended
        event = (
            ends.lost(_WORKER_STOPPED)
            if is_acked or may_have_run
            else ends.another_follows("requeued", _WORKER_STOPPED)
        )
        self._end = End(EndKind.REQUEUED, _WORKER_STOPPED)
        if was_unseen:
            self._close()
        elif self.claim is not states.CLOSED:
            self._publish_end(event)

    # --- the end -------------------------------------------------------------------------------

    def _finish(self, end: End) -> None:
        """Rules 1 and 2: the only way to be over, but for a stopping worker.

        The slot is free now. The end is reported when the last event is stored, so that an
        acknowledged message has its end in the stream.
        """
        was_queued, was_unseen = self.run is states.QUEUED, self._is_unseen()
        self.run = self.run.to[states.OVER]
        self._end = end
        if was_queued:
            self._do(do.Unqueue())
        if self.claim is states.CLOSED:
            self._report_end(frees_slot=True)
            return
        event = ends.last_event(end, self.origin, is_worker_stopping=self.is_worker_stopping)
        if was_unseen and isinstance(event, AttemptEnded):
            self._close(frees_slot=True)
            return
        if self.report is not states.ENDED:
            self._do(_FREE_SLOT)
        self._publish_end(event)

    def _publish_end(self, event: LastEvent) -> None:
        self._last = event
        self._questions.clear()  # they end with the execution
        self._do(do.PublishEnd(event))
        self._claim_with_events()

    def _is_unseen(self) -> bool:
        """Whether neither Redis nor a watcher can know of this attempt."""
        is_silent = self.report is not states.ACCEPTED or self.origin.claims_with_output
        return self.claim is states.UNCLAIMED and is_silent

    def on_end_stored(self) -> None:
        """The last event is stored."""
        if self.claim is not states.CLOSED and self._last is not None:
            self.claim = self.claim.to[states.CLOSED]
            self._do(do.RecordEnd(self._last))
            self._is_end_stored = True
            self._report_all()

    def on_end_wait(self) -> None:
        """Rule 5: Redis is unavailable; the end is stored when it is back."""
        if not self.origin.needs_claim:
            self._report_all()

    def _report_all(self) -> None:
        self._acknowledge()
        if self._end is not None:
            self._report_end(frees_slot=False)

    def _report_end(self, *, frees_slot: bool) -> None:
        if self.report is not states.ENDED:
            self.report = self.report.to[states.ENDED]
            assert self._end is not None
            is_known = self._is_end_stored or not self.origin.needs_claim
            self._do(do.ReportEnd(self._end if is_known else NOT_CLAIMED, frees_slot))

    # --- commands ------------------------------------------------------------------------------

    def on_command_received(self, command: Command) -> None:
        """Before the attempt is claimed only a cancel can be meant for it."""
        if isinstance(command, CancelCommand):
            self.on_cancel_requested(command.grace_s, _quoted(command.requested_by))
        elif self.is_with_child and self.owner and self.claim is not states.CLOSED:
            self._do(do.CommandChild(command, next(iter(self._questions), "")))

    # --- timers --------------------------------------------------------------------------------

    def on_timer(self, timer: Timer) -> None:
        _TIMER_HANDLERS[timer](self)


Event = Callable[Concatenate[Lifecycle, P], None]
_TIMER_HANDLERS: Final = {timer: getattr(Lifecycle, f"on_{timer.name.lower()}") for timer in Timer}


def _quoted(requested_by: str) -> str:
    """The text comes from Redis: quoted and cut, so that it stays one line of the log."""
    if not requested_by:
        return "Execution.cancel"
    return f"{requested_by[:_MAX_REQUESTED_BY]!r} (Execution.cancel)"
