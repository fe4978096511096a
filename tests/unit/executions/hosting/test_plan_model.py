"""Any order of events of a host, with Hypothesis."""

from __future__ import annotations

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from capsule_tasks.executions.hosting.plan import (
    Decision,
    HostLimits,
    HostPlan,
    Leave,
    Save,
    Stage,
)

_NAMES = st.sampled_from("abcdef")


class HostMachine(RuleBasedStateMachine):
    """The maximum holds, nothing busy is touched, and nothing is decided twice."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = HostPlan(
            HostLimits(
                max_live=3,
                idle_timeout_s=30.0,
                max_age_s=100.0,
                checkpoint_every=2,
                checkpoint_idle_s=5.0,
            )
        )
        self.now = 0.0
        self.saving: set[str] = set()
        self.leaving: set[str] = set()

    def stage(self, name: str) -> Stage | None:
        seat = self.plan.seats.get(name)
        return seat.stage if seat is not None else None

    def note(self, decision: Decision) -> None:
        name = decision.session_id
        assert name not in self.leaving
        if isinstance(decision, Leave):
            self.leaving.add(name)
        else:
            assert name not in self.saving
            self.saving.add(name)

    @rule(seconds=st.floats(0.0, 40.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=_NAMES)
    def a_session_is_offered(self, name: str) -> None:
        if self.plan.may_take(name, self.now):
            self.plan.take(name, self.now)

    @rule(name=_NAMES, succeeds=st.booleans())
    def a_take_ends(self, name: str, succeeds: bool) -> None:
        if self.stage(name) is Stage.TAKING and succeeds:
            self.plan.taken(name, self.now)
        elif self.stage(name) is Stage.TAKING:
            assert self.plan.failed(name, self.now) > 0
            assert not self.plan.may_take(name, self.now)

    @rule(name=_NAMES)
    def a_call_ends(self, name: str) -> None:
        if self.stage(name) is not Stage.BUSY or name in self.saving:
            return
        self.plan.executed(name)
        decision = self.plan.between_calls(name, self.now)
        if decision is not None:
            self.note(decision)
        if isinstance(decision, Save):
            self.saving.discard(name)
            self.plan.saved(name, self.now, is_saved=True)

    @rule(name=_NAMES)
    def no_call_waits(self, name: str) -> None:
        if self.stage(name) is Stage.BUSY:
            self.plan.idle(name, self.now)

    @rule(name=_NAMES)
    def a_call_comes(self, name: str) -> None:
        if self.stage(name) is Stage.IDLE:
            self.plan.busy(name)
        elif self.stage(name) is Stage.LEAVING:
            self.plan.stays(name)
            self.leaving.discard(name)

    @rule(name=_NAMES, is_saved=st.booleans())
    def a_checkpoint_ends(self, name: str, is_saved: bool) -> None:
        if name in self.saving:
            self.saving.discard(name)
            self.plan.saved(name, self.now, is_saved=is_saved)

    @rule(name=_NAMES)
    def a_session_has_left(self, name: str) -> None:
        if name in self.leaving:
            self.leaving.discard(name)
            self.plan.left(name)

    @rule(sessions=st.integers(0, 6))
    def room_is_wanted(self, sessions: int) -> None:
        self.plan.want_room(sessions)

    @rule()
    def the_worker_stops(self) -> None:
        self.plan.is_stopping = True

    @rule()
    def decide(self) -> None:
        idle = {name for name in "abcdef" if self.stage(name) is Stage.IDLE}
        for decision in self.plan.decide(self.now):
            assert decision.session_id in idle
            self.note(decision)

    @invariant()
    def the_maximum_holds(self) -> None:
        assert len(self.plan.seats) <= 3

    @invariant()
    def stages_agree_with_what_was_decided(self) -> None:
        found = {name for name in "abcdef" if self.stage(name) is Stage.LEAVING}
        assert found == self.leaving
        assert all(self.stage(name) is Stage.SAVING for name in self.saving)

    @invariant()
    def the_next_check_finds_something(self) -> None:
        """Time alone makes something due: nothing is forgotten, and nothing spins."""
        check_at = self.plan.next_check_at()
        if check_at is None or self.plan.is_stopping:
            return
        assert all(
            seat.stage is not Stage.IDLE or check_at <= seat.idle_since + 30.0
            for seat in self.plan.seats.values()
        )


TestHost = HostMachine.TestCase
TestHost.settings = hypothesis_settings(max_examples=150, stateful_step_count=40, deadline=None)
