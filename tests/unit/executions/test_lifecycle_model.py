"""Lifecycles in a simulated worker: whatever happens, in any order that can happen, the rules hold.

`World` stands for the adapters. Each carries out actions and remembers what is under way (a call
to Redis, a child, a timer); the rules of the machine let any of that come to its end in any order.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from hypothesis import event as note
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.strategies import SearchStrategy

from capsule_tasks.executions import actions as do
from capsule_tasks.executions.actions import Action, Timer
from capsule_tasks.executions.claims import Refusal, Streaming
from capsule_tasks.executions.ends import End, EndKind, LastEvent
from capsule_tasks.executions.lifecycle import Event, Lifecycle, P
from capsule_tasks.executions.origin import Origin
from capsule_tasks.executions.states import Ack, Claim, Report, Run
from capsule_tasks.protocol.events import (
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
    InputClosed,
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
    """What the publisher times by itself."""

    CLAIM_DUE = auto()
    END_WAIT = auto()


TIMERS = [Wait.CLAIM_DUE, Timer.START_WAIT, Timer.CLAIM_WAIT, Wait.END_WAIT]
TIMERS += [Timer.SOFT_LIMIT, Timer.HARD_LIMIT, Timer.TIDY]
SELDOM = st.sampled_from([False] * 7 + [True])
TOO_OFTEN = End(EndKind.TOO_MANY_LOSSES, "five processes")


@st.composite
def origins(draw: st.DrawFn) -> Origin:
    """As adapters make them: what is acknowledged early does not come again."""
    flag = st.booleans()
    acknowledged = draw(
        st.sampled_from(["when sure", "when sure", "late", "late, comes again", "early"])
    )
    comes_again = acknowledged == "late, comes again"
    before = draw(st.sampled_from(["new", "new", "new", "retry", "redelivered"]))
    return Origin(
        execution_id="id",
        task="app.task",
        is_async=draw(st.sampled_from([False, False, True])),
        group=draw(st.sampled_from(["", "group"])),
        index=0,
        is_retry=before == "retry",
        is_redelivered=before == "redelivered",
        acks_late=acknowledged in ("late", "late, comes again"),
        ack_waits_for_claim=acknowledged == "when sure",
        redelivers_when_lost=comes_again,
        continues_after_loss=comes_again or draw(flag),
        redelivers_over_limit=comes_again,
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
        # the publisher and Redis
        self.lease = "lease-1"
        self.call: Call | None = None
        self.backlog = 0
        self.end: LastEvent | None = None
        self.is_end_stored = False
        self.may_append = self.is_settling = self.is_looking = self.is_reading = False
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
        self.told: list[End] = []
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

    def release(self) -> None:
        assert not self.is_released
        self.is_released = True
        self.timers -= set(Wait)

    def report(self, action: Action) -> None:
        assert not self.told, "the end is the last that is told"
        assert not self.is_left, "a message that is left to other workers is not spoken of"
        match action:
            case do.ReportAccepted():
                assert self.accepted is None
                self.accepted = action
            case do.Acknowledge():
                assert self.accepted is not None
                assert self.accepted.defers_ack
                is_certain = self.stored_owner == self.noted_owner and (
                    self.stored_owner in self.confirmed
                )
                is_over = self.is_closed or self.is_end_stored or self.has_end_waited
                assert is_certain or self.has_waited or is_over
                self.acks += 1
            case do.FreeSlot():
                self.freed += 1
            case do.ReportEnd(end, frees_slot):
                self.told.append(end)
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
                self.may_append, self.is_settling = False, True
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
        """Redis has done what it was asked for; a claim with the end says only that."""
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

    def settle(self) -> None:
        asked = [] if self.is_closed else list(self.questions.values())
        self.is_settling = False
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
        elif self.is_settling and self.call is None:
            self.settle()
        elif self.holds and not is_redis_away:
            self.note_hold(min(self.holds))
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
        """Nothing hangs, and everything was said once."""
        life, told = self.life, [end.kind for end in self.told]
        assert life.run is Run.OVER, life
        assert life.report is Report.ENDED, life
        assert not self.timers
        if self.is_left:
            assert not told
            assert not self.freed
        elif self.is_discarded:
            assert not told
            assert not self.freed
            assert self.accepted is None
        else:
            assert len(told) == 1
            assert self.freed == 1
            assert self.acks == (self.accepted is not None and self.accepted.defers_ack)
        assert is_redis_away or life.claim is Claim.CLOSED, life
        if life.claim is Claim.CLOSED:
            assert self.is_released
            assert self.is_end_stored == (len(self.notes) == 1)
            assert self.notes == [self.end] or not self.notes


class Trouble(Enum):
    END = auto()
    STOP = auto()
    KILL = auto()
    DEATH = auto()
    LEASE = auto()
    REDIS = auto()
    REFUSAL = auto()
    BROKER = auto()
    WORKER = auto()
    NEWS = auto()
    LATE = auto()


class Step:
    """Something that can happen, with values that are drawn for it."""

    def __init__(self, function: Callable[..., None], values: dict[str, SearchStrategy]) -> None:
        self.function = function
        self.values = values
        self.conditions: list[Callable[[LifecycleMachine], object]] = []

    def __repr__(self) -> str:
        return self.function.__name__

    def can_happen(self, machine: LifecycleMachine) -> bool:
        return all(condition(machine) for condition in self.conditions)

    def happen(self, machine: LifecycleMachine, data: st.DataObject) -> None:
        values = {name: data.draw(values) for name, values in self.values.items()}
        self.function(machine, **values)


STEPS: list[Step] = []


def step(**values: SearchStrategy) -> Callable[[Callable[..., None]], Step]:
    def decorate(function: Callable[..., None]) -> Step:
        made = Step(function, values)
        STEPS.append(made)
        return made

    return decorate


def when(condition: Callable[[LifecycleMachine], object]) -> Callable[[Step], Step]:
    def decorate(step: Step) -> Step:
        step.conditions.append(condition)
        return step

    return decorate


def in_case_of(trouble: Trouble) -> Callable[[Step], Step]:
    return when(lambda machine: trouble in machine.troubles)


class LifecycleMachine(RuleBasedStateMachine):
    """One execution, and all that can happen to it."""

    world: World
    streaming: Streaming

    @initialize(
        origin=origins(),
        streaming=st.sampled_from([Streaming.CLAIM_LATER, *Streaming]),
        is_discarded=SELDOM,
        steps=st.integers(0, 5),
        length=st.integers(0, 25),
        is_redis_away=st.sampled_from([False, False, True]),
        troubles=st.sets(st.sampled_from(Trouble), min_size=2, max_size=4),
    )
    def begin(
        self,
        origin: Origin,
        streaming: Streaming,
        is_discarded: bool,
        steps: int,
        length: int,
        is_redis_away: bool,
        troubles: set[Trouble],
    ) -> None:
        """In many runs nothing but a few troubles happens, and that late: else most end early."""
        is_known = origin.is_retry or origin.is_redelivered
        if streaming is Streaming.CLAIM_LATER and is_known:
            streaming = Streaming.CLAIM_FIRST
        self.leases = 1
        self.asked = 0
        self.troubles = troubles
        self.world = World(origin, streaming)
        self.is_redis_away = is_redis_away
        self.length = length
        self.has_printed = False
        if is_discarded:
            self.world.discard(streaming)
        else:
            self.world.admit(streaming)
        for _ in range(steps):
            self.world.advance(is_redis_away=is_redis_away)

    # --- the child -----------------------------------------------------------------------------

    @when(lambda self: self.world.is_queued)
    @step(is_refused=st.sampled_from([False, False, True]))
    def is_sent(self, is_refused: bool) -> None:
        self.world.send(is_refused=is_refused)

    @when(lambda self: self.world.has_child and not self.world.has_started)
    @step()
    def starts(self) -> None:
        self.world.start()

    @when(lambda self: self.world.has_child and self.world.has_started)
    @when(lambda self: not self.has_printed)
    @step()
    def prints(self) -> None:
        self.has_printed = True
        self.world.feed(Lifecycle.on_first_output)

    @when(lambda self: self.world.has_child and self.world.has_started)
    @when(lambda self: self.asked < 3)
    @step()
    def asks(self) -> None:
        self.asked += 1
        request = InputRequest(execution_id="id", id=f"question-{self.asked}")
        self.world.questions[request.id] = request
        self.world.feed(Lifecycle.on_input_requested, request)

    @when(lambda self: self.world.has_child and self.world.questions)
    @step(data=st.data())
    def stops_waiting_for_input(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.world.questions)))
        del self.world.questions[request_id]
        closed = InputClosed(execution_id="id", request_id=request_id, reason="answered")
        self.world.feed(Lifecycle.on_input_answered, closed)

    @when(lambda self: self.world.has_child and self.world.has_started)
    @in_case_of(Trouble.END)
    @step(terminal=st.sampled_from([*TRACED, NOT_CARRIED, STOPPED]), is_now=SELDOM)
    def ends(self, terminal: Terminal, is_now: bool) -> None:
        if is_now:
            self.world.finish(terminal, None)

    @when(lambda self: self.world.has_child)
    @in_case_of(Trouble.DEATH)
    @step(status=st.sampled_from([-signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV, 1]))
    def dies(self, status: int) -> None:
        self.world.finish(LOST, status)

    @when(lambda self: self.world.has_child and not self.world.has_started)
    @in_case_of(Trouble.DEATH)
    @step()
    def cannot_be_carried(self) -> None:
        self.world.finish(NOT_CARRIED, None)

    @when(lambda self: self.world.is_judging)
    @step(end=st.sampled_from([None, TOO_OFTEN]))
    def is_judged(self, end: End | None) -> None:
        self.world.judge(end)

    # --- Redis ---------------------------------------------------------------------------------

    @when(lambda self: self.world.call)
    @when(lambda self: not self.is_redis_away)
    @step()
    def redis_stores(self) -> None:
        self.world.store()

    @when(lambda self: self.world.call)
    @in_case_of(Trouble.REFUSAL)
    @when(lambda self: not self.is_redis_away)
    @step(data=st.data())
    def redis_refuses(self, data: st.DataObject) -> None:
        whys = [Refusal.CANCELLED, Refusal.CLOSED]
        if self.world.call and self.world.call.kind in ("words", "takeover"):
            whys.append(Refusal.RUNS_ELSEWHERE)
        self.world.refuse(data.draw(st.sampled_from(whys)))

    @when(lambda self: self.world.call and self.world.call.kind == "first")
    @in_case_of(Trouble.STOP)
    @when(lambda self: self.world.call and self.world.call.kind == "first")
    @when(lambda self: not self.is_redis_away)
    @step(command=st.sampled_from(COMMANDS))
    def the_claim_brings_a_command(self, command: Command) -> None:
        self.world.command(command)
        self.world.store()

    @when(lambda self: self.world.is_settling and self.world.call is None)
    @step()
    def nothing_is_on_its_way(self) -> None:
        self.world.settle()

    @when(lambda self: self.world.is_looking)
    @step()
    def previous_ends(self) -> None:
        self.world.look()

    @when(lambda self: self.world.holds)
    @when(lambda self: not self.is_redis_away)
    @step(data=st.data())
    def hold_is_noted(self, data: st.DataObject) -> None:
        self.world.note_hold(data.draw(st.sampled_from(sorted(self.world.holds))))

    @when(lambda self: self.world.lease in self.world.confirms)
    @when(lambda self: not self.is_redis_away)
    @step()
    def lease_is_sure(self) -> None:
        self.world.confirm(self.world.lease)

    @in_case_of(Trouble.LEASE)
    @step()
    def lease_is_lost(self) -> None:
        self.leases += 1
        self.world.begin_lease(f"lease-{self.leases}")

    @in_case_of(Trouble.NEWS)
    @step()
    def successor_comes(self) -> None:
        self.world.feed(Lifecycle.on_successor_admitted)

    @in_case_of(Trouble.NEWS)
    @step()
    def bell_rings(self) -> None:
        self.world.feed(Lifecycle.on_doorbell_rang)

    @when(lambda self: self.world.is_reading)
    @when(lambda self: not self.is_redis_away)
    @step(command=st.sampled_from(COMMANDS))
    def is_told(self, command: Command) -> None:
        self.world.command(command)

    @in_case_of(Trouble.REDIS)
    @step()
    def redis_goes_or_comes(self) -> None:
        self.is_redis_away = not self.is_redis_away

    # --- the worker ----------------------------------------------------------------------------

    @when(lambda self: self.world.timers)
    @step(data=st.data())
    def timer_fires(self, data: st.DataObject) -> None:
        timers = sorted(self.world.timers, key=TIMERS.index)
        self.world.fire(data.draw(st.sampled_from(timers)))

    @in_case_of(Trouble.STOP)
    @when(lambda self: not self.world.life.is_over)
    @step(
        signum=st.sampled_from([signal.SIGTERM, signal.SIGINT, signal.SIGKILL]),
        is_worker_stopping=st.booleans(),
    )
    def is_stopped(self, signum: int, is_worker_stopping: bool) -> None:
        self.world.feed(Lifecycle.on_stop_requested, int(signum), "somebody", is_worker_stopping)

    @in_case_of(Trouble.STOP)
    @when(lambda self: not self.world.life.is_over)
    @step()
    def is_cancelled(self) -> None:
        self.world.feed(Lifecycle.on_cancel_requested, None, "somebody")

    @in_case_of(Trouble.KILL)
    @when(lambda self: not self.world.life.is_over)
    @step()
    def is_killed(self) -> None:
        self.world.feed(Lifecycle.on_kill_requested, "a cold shutdown")

    @in_case_of(Trouble.BROKER)
    @when(lambda self: not self.world.life.is_over)
    @step()
    def broker_is_lost(self) -> None:
        self.world.feed(Lifecycle.on_broker_lost)

    @in_case_of(Trouble.WORKER)
    @when(lambda self: not self.world.life.is_over)
    @step()
    def worker_stops(self) -> None:
        self.world.stop_worker()

    # --- news that come too late, or twice -----------------------------------------------------

    @step(lease=st.integers(1, 3))
    def old_leases_are_spoken_of(self, lease: int) -> None:
        """By then the worker works under another one."""
        if lease <= self.leases:
            self.world.confirmed.add(f"lease-{lease}")
            self.world.feed(Lifecycle.on_lease_confirmed, f"lease-{lease}")
        self.world.feed(Lifecycle.on_lease_begun, self.world.lease)

    @when(lambda self: not (self.world.has_child or self.world.is_queued))
    @in_case_of(Trouble.NEWS)
    @step()
    def the_child_is_heard_again(self) -> None:
        for event in (
            (Lifecycle.on_sent,),
            (Lifecycle.on_child_started, 3.0),
            (Lifecycle.on_finished, LOST, -9, 4.0),
        ):
            assert not self.world.life.handle(*event)

    @when(lambda self: not self.world.is_looking)
    @in_case_of(Trouble.NEWS)
    @step()
    def previous_ends_again(self) -> None:
        assert not self.world.life.handle(Lifecycle.on_previous_ended)

    @when(lambda self: self.world.life.is_over)
    @in_case_of(Trouble.LATE)
    @step()
    def what_is_over_stays_over(self) -> None:
        """Nothing of this changes anything any more, whatever Redis still has to do."""
        life = self.world.life
        late: list[tuple[Any, ...]] = [
            (Lifecycle.on_loss_judged, None),
            (Lifecycle.on_loss_judged, TOO_OFTEN),
            (Lifecycle.on_send_refused,),
        ]
        late += [
            (Lifecycle.on_stop_requested, 9, ""),
            (Lifecycle.on_cancel_requested, 1.0, ""),
            (Lifecycle.on_kill_requested, ""),
        ]
        late += [(Lifecycle.on_broker_lost,), (Lifecycle.on_worker_stopping,)]
        late += [(Lifecycle.on_command_received, command) for command in COMMANDS]
        late += [(Lifecycle.on_timer, timer) for timer in Timer]
        late += [(Lifecycle.on_claim_due,)]
        if life.claim is Claim.CLOSED and life.report is Report.ENDED:
            late += [
                (Lifecycle.on_claim_stored, "a", "b"),
                (Lifecycle.on_claim_refused, Refusal.CLOSED),
                (Lifecycle.on_in_flight_done,),
            ]
            late += [
                (Lifecycle.on_append_refused,),
                (Lifecycle.on_end_stored,),
                (Lifecycle.on_hold_recorded, "a"),
            ]
            late += [
                (Lifecycle.on_end_wait,),
                (Lifecycle.on_first_output,),
                (Lifecycle.on_doorbell_rang,),
            ]
        before = repr(life)
        for event in late:
            actions = life.handle(*event)
            if event == (Lifecycle.on_timer, Timer.CLAIM_WAIT):
                self.world.has_waited = True
                for action in actions:
                    self.world.carry_out(action)
                before = repr(life)
            else:
                assert not actions, (event, actions)
        assert repr(life) == before

    @step()
    def goes_on(self) -> None:
        self.world.advance(is_redis_away=self.is_redis_away)

    # --- what holds always ---------------------------------------------------------------------

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def something_happens(self, data: st.DataObject) -> None:
        """One rule for all: with a rule for each step the seldom ones come up too seldom."""
        self.length -= 1
        possible = [step for step in STEPS if step.can_happen(self)]
        data.draw(st.sampled_from(possible), "next").happen(self, data)

    @precondition(lambda self: not self.length)
    @rule()
    def nothing_happens(self) -> None:
        """What is under way comes to its end in `teardown`."""

    @invariant()
    def slot_and_report_are_single(self) -> None:
        world = self.world
        assert len(world.told) <= 1
        assert world.freed <= 1
        assert world.acks <= 1
        assert len(world.notes) <= 1

    @invariant()
    def what_is_held_is_held_under_the_present_lease(self) -> None:
        life = self.world.life
        assert life.claim is not Claim.CLAIMED or life.owner == self.world.lease

    @invariant()
    def an_execution_that_is_over_has_one_timer_at_most(self) -> None:
        if self.world.life.is_over:
            assert self.world.timers <= {Wait.END_WAIT}

    @invariant()
    def an_open_question_reaches_a_watcher(self) -> None:
        if self.world.questions and not self.world.is_left:
            assert self.world.life.is_published

    @invariant()
    def a_child_and_a_queue_belong_to_what_is_not_over(self) -> None:
        life = self.world.life
        assert self.world.is_queued == (life.run is Run.QUEUED)
        if not self.world.is_left:
            assert self.world.has_child == life.is_with_child

    def teardown(self) -> None:
        world, life = self.world, self.world.life
        for state in (life.run, life.claim, life.report, life.ack):
            note(f"{type(state).__name__} {state.name}")
        world.quiesce(is_redis_away=self.is_redis_away)
        world.check_over(is_redis_away=self.is_redis_away)
        if self.is_redis_away:  # and now it is back
            world.quiesce(is_redis_away=False)
            world.check_over(is_redis_away=False)


LifecycleMachine.TestCase.settings = hypothesis_settings(
    max_examples=250, stateful_step_count=40, deadline=None
)
TestLifecycle = LifecycleMachine.TestCase
