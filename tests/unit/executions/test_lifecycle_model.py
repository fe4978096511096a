"""Lifecycles in a simulated worker: whatever happens, in any order that can happen, the rules hold.

The rules of the machine let whatever is under way in the `World` come to its end in any order.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from hypothesis import event as note
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.strategies import SearchStrategy

from capsule_tasks.executions.actions import Timer
from capsule_tasks.executions.claims import Refusal, Streaming
from capsule_tasks.executions.ends import End
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.origin import Origin
from capsule_tasks.executions.states import Claim, Report, Run
from capsule_tasks.protocol.events import Command
from capsule_tasks.protocol.messages import InputClosed, InputRequest, Terminal
from tests.unit.executions.world import (
    COMMANDS,
    LOST,
    NOT_CARRIED,
    SELDOM,
    STOPPED,
    TIMERS,
    TOO_OFTEN,
    TRACED,
    Wait,
    World,
    origins,
)


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
        if origin.claims_with_output and streaming is not Streaming.NONE:
            streaming = Streaming.CLAIM_LATER
        if origin.needs_claim:
            is_discarded = False
            if streaming is Streaming.CLAIM_LATER:
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
        self.has_printed = self.world.has_said = True
        self.world.feed(Lifecycle.on_first_output)

    @when(lambda self: self.world.has_child and self.world.has_started)
    @when(lambda self: self.asked < 3)
    @step()
    def asks(self) -> None:
        self.asked += 1
        request = InputRequest(execution_id="id", id=f"question-{self.asked}")
        self.world.questions[request.id] = request
        self.world.has_said = True
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

    @when(lambda self: self.world.awaits_in_flight and self.world.call is None)
    @step()
    def nothing_is_on_its_way(self) -> None:
        self.world.finish_in_flight()

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
    def doorbell_rings(self) -> None:
        self.world.feed(Lifecycle.on_doorbell_rang)

    @when(lambda self: self.world.is_reading)
    @when(lambda self: not self.is_redis_away)
    @step(command=st.sampled_from(COMMANDS))
    def command_arrives(self, command: Command) -> None:
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
        """Pending steps are finished in `teardown`."""

    @invariant()
    def slot_and_report_are_single(self) -> None:
        world = self.world
        assert len(world.reported) <= 1
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
