"""A simulated worker for lifecycles.

`World` stands for the adapters. Each carries out actions and remembers what is under way: a call to
Redis, a child, a timer.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum, auto

from hypothesis import strategies as st

from capsule_tasks.executions import actions as do
from capsule_tasks.executions.actions import Action, Timer
from capsule_tasks.executions.claims import Refusal, Streaming
from capsule_tasks.executions.ends import End, EndKind, LastEvent
from capsule_tasks.executions.lifecycle import Event, Lifecycle, P
from capsule_tasks.executions.origin import Origin
from capsule_tasks.executions.states import Ack, Claim, Report, Run
from capsule_tasks.protocol.events import (
    RUN_CANCELLED,
    RUN_ELSEWHERE,
    RUN_PARKED,
    AttemptEnded,
    CancelCommand,
    Command,
    InterruptCommand,
    RespondCommand,
    StackCommand,
)
from capsule_tasks.protocol.messages import (
    Error,
    ErrorKind,
    Failure,
    InputRequest,
    TaskResult,
    Terminal,
)


def failed(name: str, message: str = "", **state: object) -> Failure:
    return Failure(module="celery.exceptions", name=name, message=message, state=state)


WELL = TaskResult(execution_id="id", text="4")
TRACED = [
    WELL,
    TaskResult(execution_id="id", failure=Failure(module="builtins", name="ValueError")),
    TaskResult(execution_id="id", failure=failed("Retry")),
    TaskResult(execution_id="id", failure=failed("Ignore", "Replaced by new task")),
    TaskResult(execution_id="id", failure=failed("Reject", requeue=True)),
    TaskResult(execution_id="id", failure=failed("Retry", RUN_PARKED)),
    TaskResult(execution_id="id", failure=failed("Ignore", RUN_ELSEWHERE)),
    TaskResult(execution_id="id", failure=failed("Ignore", RUN_CANCELLED)),
    TaskResult(
        execution_id="id", failure=Failure(module="", name="SystemExit"), escaped_tracer=True
    ),
]
LOST = Error(execution_id="id", kind=ErrorKind.LOST, type="SessionLost", message="it is gone")
NOT_CARRIED = Error(execution_id="id", kind=ErrorKind.TOO_LARGE, type="TooLarge", message="2 GiB")
STOPPED = Error(execution_id="id", kind=ErrorKind.CANCELLED, type="Cancelled", message="in order")
COMMANDS: list[Command] = [
    CancelCommand(requested_by="somebody"),
    InterruptCommand(),
    RespondCommand(text="yes"),
    StackCommand(request_id="s"),
]


class Wait(Enum):
    """Waits that the publisher times by itself."""

    CLAIM_DUE = auto()
    END_WAIT = auto()


TIMERS = [Wait.CLAIM_DUE, Timer.START_WAIT, Timer.CLAIM_WAIT, Wait.END_WAIT]
TIMERS += [Timer.SOFT_LIMIT, Timer.HARD_LIMIT, Timer.TIDY]
SELDOM = st.sampled_from([False] * 7 + [True])
TOO_OFTEN = End(EndKind.TOO_MANY_LOSSES, "five processes")


@st.composite
def origins(draw: st.DrawFn) -> Origin:
    """As adapters make them: an early acknowledged message is not redelivered."""
    flag = st.booleans()
    acknowledged = draw(
        st.sampled_from(["when sure", "when sure", "late", "late, redelivered", "early"])
    )
    may_be_redelivered = acknowledged == "late, redelivered"
    before = draw(st.sampled_from(["new", "new", "new", "retry", "redelivered"]))
    is_async = draw(st.sampled_from([False, False, True]))
    return Origin(
        execution_id="id",
        task="app.task",
        is_async=is_async,
        group=draw(st.sampled_from(["", "group"])),
        index=0,
        is_retry=before == "retry",
        is_redelivered=before == "redelivered",
        acks_late=acknowledged in ("late", "late, redelivered"),
        ack_waits_for_claim=acknowledged == "when sure",
        redelivers_when_lost=may_be_redelivered,
        needs_claim=before == "new" and acknowledged == "early" and draw(flag),
        claims_with_output=is_async and may_be_redelivered and draw(flag),
        continues_after_loss=may_be_redelivered or draw(flag),
        redelivers_over_limit=may_be_redelivered,
        soft_limit_s=draw(st.sampled_from([None, 1.0])),
        hard_limit_s=draw(st.sampled_from([None, 2.0])),
    )


@dataclass
class Call:
    """A call that is on its way to Redis."""

    kind: str
    owner: str = ""
    has_end: bool = False


class World:
    """Dispatcher, publisher, Redis and reporter of one execution."""

    def __init__(self, origin: Origin, streaming: Streaming) -> None:
        self.life = Lifecycle(origin)
        self.timers: set[Timer | Wait] = set()
        self.is_left = False
        """The worker stopped while the execution was not over."""
        self.is_discarded = False
        # the dispatcher
        self.is_queued = self.has_child = self.has_started = self.is_judging = False
        self.questions: dict[str, InputRequest] = {}
        self.has_said = False
        """The child has sent something for watchers."""
        # the publisher and Redis
        self.lease = "lease-1"
        self.call: Call | None = None
        self.backlog = 0
        self.end: LastEvent | None = None
        self.is_end_stored = False
        self.may_append = self.awaits_in_flight = self.is_looking = self.is_reading = False
        self.is_closed = streaming is Streaming.NONE
        self.is_released = self.is_closed
        self.holds: set[str] = set()
        self.confirms: set[str] = set()
        self.notes: list[LastEvent] = []
        # why the message may be acknowledged
        self.stored_owner = self.noted_owner = ""
        self.confirmed: set[str] = set()
        self.has_waited = self.has_end_waited = False
        # the reporter
        self.accepted: do.ReportAccepted | None = None
        self.reported: list[End] = []
        self.acks = self.freed = 0

    def feed(self, event: Event[P], *args: P.args, **kwargs: P.kwargs) -> None:
        actions = self.life.handle(event, *args, **kwargs)
        if self.life.is_over:
            self.timers &= set(Wait)
        for action in actions:
            self.carry_out(action)

    def carry_out(self, action: Action) -> None:  # noqa: C901 - a clause for each action
        match action:
            case do.Send():
                assert not self.is_queued
                assert not self.has_child
                assert self.is_sure or not self.life.origin.needs_claim
                self.is_queued = True
            case do.Unqueue():
                assert self.is_queued
                self.is_queued = False
            case do.Signal() | do.CancelInChild() | do.RaiseSoftLimit():
                assert self.has_child
                if isinstance(action, do.Signal) and self.life.origin.is_async:
                    assert action.signum == signal.SIGKILL, (
                        "other signals are for blocking children"
                    )
            case do.CommandChild(_, request_id):
                assert self.has_child
                assert request_id == next(iter(self.questions), "")
                assert self.life.owner, "only a cancel is meant for an attempt that is not claimed"
            case do.EndInput(request_id):
                del self.questions[request_id]
            case do.JudgeLoss():
                assert not self.is_judging
                self.is_judging = True
            case do.StartTimer(timer):
                if not self.life.is_over:
                    self.timers.add(timer)
            case do.ReportAccepted() | do.Acknowledge() | do.FreeSlot() | do.ReportEnd():
                self.report(action)
            case do.RecordEnd(event):
                assert self.is_end_stored
                self.notes.append(event)
                self.release()
            case _:
                assert not self.is_closed, "nothing is accepted from a stale attempt"
                self.publish(action)

    @property
    def is_sure(self) -> bool:
        """Whether the claim is stored and held, under a lease that lasts."""
        return self.stored_owner == self.noted_owner and self.stored_owner in self.confirmed

    def release(self) -> None:
        assert not self.is_released
        self.is_released = True
        self.timers -= set(Wait)

    def report(self, action: Action) -> None:
        assert not self.reported, "the end is the last report"
        assert not self.is_left, "a message that is left to other workers is not reported"
        match action:
            case do.ReportAccepted():
                assert self.accepted is None
                self.accepted = action
            case do.Acknowledge():
                assert self.accepted is not None
                assert self.accepted.defers_ack
                is_over = self.is_closed or self.is_end_stored or self.has_end_waited
                assert self.is_sure or self.has_waited or is_over
                self.acks += 1
            case do.FreeSlot():
                self.freed += 1
            case do.ReportEnd(end, frees_slot):
                if self.life.origin.needs_claim:
                    assert (end.kind is EndKind.NOT_CLAIMED) == (not self.is_end_stored)
                self.reported.append(end)
                self.freed += frees_slot

    def publish(self, action: Action) -> None:  # noqa: C901, PLR0912 - a clause for each action
        match action:
            case do.ClaimFirst():
                self.claim(Call("first", self.lease))
            case do.ClaimWithEvents(takes_over):
                kind = "takeover" if takes_over else "words"
                self.claim(Call(kind, self.lease, has_end=self.end is not None))
            case do.Reclaim(owner_before):
                assert owner_before == self.life.owner != ""
                assert not self.may_append
                self.claim(Call("anew", self.lease))
            case do.AwaitPrevious():
                assert not self.is_looking
                self.is_looking = True
            case do.ConfirmLease(owner):
                self.confirms.add(owner)
            case do.AwaitInFlight():
                self.may_append, self.awaits_in_flight = False, True
                self.stored_owner = ""
            case do.Publish() | do.PublishStart():
                assert self.end is None, "output comes before the end"
                if action == do.PublishStart():
                    self.timers.add(Wait.CLAIM_DUE)
                self.backlog += 1
                self.send_next()
            case do.PublishEnd(event):
                assert self.end is None, "an execution ends once"
                self.end = event
                self.timers.discard(Wait.CLAIM_DUE)
                self.timers.add(Wait.END_WAIT)
                self.send_next()
            case do.Flush():
                self.send_next()
            case do.CloseStream():
                self.is_closed, self.may_append = True, False
                self.release()
            case do.ReadCommands():
                self.is_reading = True
            case do.RecordRunning():
                assert self.end is None
            case _:
                raise AssertionError(f"an unknown action: {action}")

    def claim(self, call: Call) -> None:
        assert self.call is None, "never two calls at once"
        if self.life.origin.claims_with_output:
            is_last = self.end is not None and not isinstance(self.end, AttemptEnded)
            assert self.has_said or is_last, "a run that another worker has is left alone"
        self.call = call
        self.holds.add(call.owner)

    def send_next(self) -> None:
        if self.may_append and self.call is None and (self.backlog or self.end is not None):
            self.backlog = 0
            self.call = Call("append", has_end=self.end is not None)

    # --- how what is under way comes to its end ------------------------------------------------

    def admit(self, streaming: Streaming) -> None:
        self.feed(Lifecycle.on_admitted, streaming)

    def discard(self, streaming: Streaming) -> None:
        self.is_discarded = True
        self.feed(Lifecycle.on_discarded, streaming, "revoked")

    def send(self, *, is_refused: bool = False) -> None:
        self.is_queued, self.has_child = is_refused, not is_refused
        self.feed(Lifecycle.on_sent)
        if is_refused:
            self.feed(Lifecycle.on_send_refused)

    def start(self) -> None:
        self.has_started = True
        self.feed(Lifecycle.on_child_started, 1.0)

    def finish(self, terminal: Terminal, status: int | None) -> None:
        self.has_child = False
        self.has_started = True
        self.questions.clear()
        self.feed(Lifecycle.on_finished, terminal, status, 2.0)

    def judge(self, end: End | None) -> None:
        self.is_judging = False
        self.feed(Lifecycle.on_loss_judged, end)

    def fire(self, timer: Timer | Wait) -> None:
        self.timers.remove(timer)
        if timer is Wait.CLAIM_DUE:
            self.feed(Lifecycle.on_claim_due)
        elif timer is Wait.END_WAIT:
            self.has_end_waited = True
            self.feed(Lifecycle.on_end_wait)
        else:
            is_start_late = timer is Timer.START_WAIT and self.life.run is Run.AWAITING_CLAIM
            self.has_waited = self.has_waited or is_start_late or timer is Timer.CLAIM_WAIT
            self.feed(Lifecycle.on_timer, timer)

    def store(self) -> None:
        """Redis has answered the call; a claim with the end confirms only the end."""
        call, self.call = self.call, None
        assert call is not None
        if self.is_closed:
            return
        if call.has_end:
            self.is_end_stored = True
            self.feed(Lifecycle.on_end_stored)
            self.is_closed = True
        elif call.kind != "append":
            self.may_append = True
            self.stored_owner = call.owner
            self.confirmed.clear()
            if not self.has_started:
                self.has_waited = False
            self.feed(Lifecycle.on_claim_stored, call.owner, self.lease)
            # One that was started before would cut short the wait for an acknowledgement.
            assert self.has_started or Timer.CLAIM_WAIT not in self.timers
        else:
            self.send_next()

    def refuse(self, reason: Refusal) -> None:
        call, self.call = self.call, None
        assert call is not None
        if not self.is_closed:
            is_append = call.kind == "append"
            if is_append:
                self.feed(Lifecycle.on_append_refused)
            else:
                self.feed(Lifecycle.on_claim_refused, reason)

    def finish_in_flight(self) -> None:
        asked = [] if self.is_closed else list(self.questions.values())
        self.awaits_in_flight = False
        actions = self.life.handle(Lifecycle.on_in_flight_done)
        for action in actions:
            self.carry_out(action)
        if not self.is_closed and self.end is None:
            assert [one.event for one in actions if isinstance(one, do.Publish)] == asked

    def look(self) -> None:
        self.is_looking = False
        self.feed(Lifecycle.on_previous_ended)

    def note_hold(self, owner: str) -> None:
        self.holds.remove(owner)
        self.noted_owner = owner
        self.feed(Lifecycle.on_hold_recorded, owner)

    def confirm(self, owner: str) -> None:
        self.confirms.discard(owner)
        self.confirmed.add(owner)
        self.feed(Lifecycle.on_lease_confirmed, owner)

    def begin_lease(self, lease: str) -> None:
        self.lease = lease
        if self.life.owner and not self.is_closed:
            self.holds.add(lease)
        self.feed(Lifecycle.on_lease_begun, lease)

    def command(self, command: Command) -> None:
        self.is_reading = False
        self.feed(Lifecycle.on_command_received, command)

    def stop_worker(self) -> None:
        self.is_left = self.is_left or not self.life.is_over
        self.feed(Lifecycle.on_worker_stopping)

    def advance(self, *, is_redis_away: bool = False) -> bool:
        """One step of what happens if nothing goes wrong; False if only the child can go on."""
        if self.is_queued:
            self.send()
        elif self.has_child and not self.has_started:
            self.start()
        elif self.is_judging:
            self.judge(None)
        elif self.is_looking:
            self.look()
        elif self.call is not None and not is_redis_away:
            self.store()
        elif self.awaits_in_flight and self.call is None:
            self.finish_in_flight()
        elif self.holds and not is_redis_away:
            self.note_hold(min(self.holds))
        elif self.life.run is Run.AWAITING_CLAIM and self.lease in self.confirms:
            self.confirm(self.lease)
        else:
            return False
        return True

    def quiesce(self, *, is_redis_away: bool) -> None:
        """Everything comes to its end."""
        for _ in range(100):
            if self.advance(is_redis_away=is_redis_away):
                pass
            elif self.timers:
                self.fire(min(self.timers, key=TIMERS.index))
            elif self.has_child:
                assert self.is_left or self.life.ack is not Ack.DEFERRED, "Redis had its time"
                self.finish(WELL, None)
            else:
                return
        raise AssertionError(f"no end: {self.life}")

    def check_over(self, *, is_redis_away: bool) -> None:
        """Nothing hangs, and everything was reported once."""
        life, reported = self.life, [end.kind for end in self.reported]
        if is_redis_away and life.origin.needs_claim and not self.is_left:
            return  # it waits for as long as it takes
        assert life.run is Run.OVER, life
        assert life.report is Report.ENDED, life
        assert not self.timers
        if self.is_left:
            assert not reported
            assert not self.freed
        elif self.is_discarded:
            assert not reported
            assert not self.freed
            assert self.accepted is None
        else:
            assert len(reported) == 1
            assert self.freed == 1
            assert self.acks == (self.accepted is not None and self.accepted.defers_ack)
        assert is_redis_away or life.claim is Claim.CLOSED, life
        if life.origin.claims_with_output and isinstance(self.end, AttemptEnded):
            assert self.has_said
        if life.claim is Claim.CLOSED:
            assert self.is_released
            assert self.is_end_stored == (len(self.notes) == 1)
            assert self.notes == [self.end] or not self.notes
