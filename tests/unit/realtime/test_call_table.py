"""The table of a session's calls: no tool runs twice, no output and no waiting call is lost."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from capsule_tasks.errors import CallChanged, UnknownCall
from capsule_tasks.realtime import call_table
from capsule_tasks.realtime.call_table import ABANDONED, TRANSITIONS, CallStatus, CallTable
from capsule_tasks.runs import RunState
from capsule_tasks.runs.approvals import PendingCall
from capsule_tasks.runs.engine.ports import UNCERTAIN
from capsule_tasks.runs.identity import AgentId, ToolKey
from capsule_tasks.runs.records import CodeSession, Spent

SHOP, BANK = AgentId("shop"), AgentId("bank")


def call(
    call_id: str = "c1", tool: str = "pay", arguments: str = "{}", agent: AgentId = SHOP
) -> PendingCall:
    return PendingCall(call_id=call_id, tool=ToolKey(tool), agent=agent, arguments=arguments)


def base(agent: AgentId = SHOP) -> RunState:
    return RunState(run_id="run", start_agent=agent, agent=agent)


def inner(*calls: PendingCall, tokens: int = 0) -> RunState:
    """A run of the bank, an agent used as a tool, that waits for people."""
    return base(BANK).with_calls(calls).with_usage(BANK, Spent(requests=1, input_tokens=tokens))


def waiting(*calls: PendingCall) -> CallTable:
    table = CallTable(base())
    for each in calls:
        table.called(each)
        table.waits(each.call_id)
    return table


def of_bank(*call_ids: str) -> list[PendingCall]:
    return [call(each, "transfer", agent=BANK) for each in call_ids]


# --- calls that the model makes again ------------------------------------------------------------


def test_a_call_runs_once_and_its_output_is_sent_again_only_while_the_model_lacks_it() -> None:
    table = CallTable(base())
    assert table.called(call()) == "run"
    assert table.called(call()) == "ignore"
    table.waits("c1")
    assert table.called(call()) == "ignore"
    table.decide("c1", approved=True)
    assert table.made("c1")
    assert table.called(call()) == "send"
    table.sent("c1")
    assert table.called(call()) == "ignore"


@pytest.mark.parametrize("other", [call(arguments='{"euros": 9}'), call(tool="refund")])
@pytest.mark.parametrize("stage", ["running", "waiting", "unsent", "sent"])
def test_a_known_id_with_another_tool_or_arguments_is_refused(
    other: PendingCall, stage: str
) -> None:
    table = CallTable(base())
    table.called(call())
    if stage == "waiting":
        table.waits("c1")
    if stage in ("unsent", "sent"):
        table.made("c1")
    if stage == "sent":
        table.sent("c1")
    with pytest.raises(CallChanged):
        table.called(other)


def test_the_calls_whose_outputs_were_sent_are_known_up_to_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_table, "_KNOWN_SENT", 2)
    table = CallTable(base())
    for each in ("c1", "c2", "c3"):
        table.called(call(each))
        table.made(each)
        table.sent(each)
    assert table.called(call("c3")) == table.called(call("c2")) == "ignore"
    assert table.called(call("c1")) == "run"


def test_every_status_has_its_moves() -> None:
    assert TRANSITIONS.keys() == set(CallStatus)
    table = CallTable(base())
    table.called(call())
    table.made("c1")
    with pytest.raises(AssertionError, match="is unsent, not to be waiting"):
        table.waits("c1")


# --- decisions -----------------------------------------------------------------------------------


def test_a_decision_releases_its_call_alone() -> None:
    table = waiting(call("c1"), call("c2"))
    assert table.decide("c2", approved=True) == [call("c2")]
    decision = table.state.decision_for(call("c2"))
    assert decision is not None
    assert decision.approved
    assert table.state.decision_for(call("c1")) is None


def test_a_rejection_has_its_message() -> None:
    table = waiting(call())
    assert table.decide("c1", approved=False, message="too dear") == [call()]
    decision = table.state.decision_for(call())
    assert decision is not None
    assert decision.rejection == "too dear"


def test_a_standing_decision_releases_all_waiting_calls_of_its_tool_and_holds_for_later_ones() -> (
    None
):
    table = waiting(call("c1"), call("c2"), call("c3", "refund"))
    assert table.decide("c1", approved=True, always=True) == [call("c1"), call("c2")]
    assert table.state.decision_for(call("c9")) is not None
    assert table.state.unresolved() == [call("c3", "refund")]


@pytest.mark.parametrize("status", ["unknown", "running", "decided", "unsent", "sent", "over"])
def test_only_a_waiting_call_can_be_decided_about_and_only_once(status: str) -> None:
    table = waiting(call()) if status != "running" else CallTable(base())
    if status == "running":
        table.called(call())
    if status in ("decided", "unsent", "sent"):
        table.decide("c1", approved=True)
    if status in ("unsent", "sent"):
        table.made("c1")
    if status == "sent":
        table.sent("c1")
    if status == "over":
        table.end("abandon")
    with pytest.raises(UnknownCall):
        table.decide("c2" if status == "unknown" else "c1", approved=False)


# --- agents used as tools ------------------------------------------------------------------------


def with_agent_called() -> CallTable:
    table = CallTable(base())
    table.called(call("ask"))
    assert not table.without_approval(call("ask")).needs_approval
    return table


def with_inner(*call_ids: str) -> CallTable:
    """A table with the call of an agent that waits with calls of its own."""
    table = with_agent_called()
    table.note_inner("ask", inner(*of_bank(*call_ids)))
    assert table.waits("ask")
    return table


def test_a_decision_about_an_inner_call_lets_the_outer_call_go_on() -> None:
    table = with_inner("t1", "t2")
    [outer] = table.decide("t1", approved=True)
    assert outer.call_id == "ask"
    assert [each.call_id for each in table.state.unresolved()] == ["t2"]


def test_a_decision_that_comes_while_the_inner_run_goes_on_is_not_lost() -> None:
    table = with_inner("t1", "t2")
    table.decide("t1", approved=True)
    assert table.decide("t2", approved=False) == []  # it runs
    table.note_inner("ask", inner(*of_bank("t2")))  # made of the state before the decision
    assert not table.waits("ask")
    assert table.state.unresolved() == []
    table.note_inner("ask", inner(*of_bank("t3")))
    assert table.waits("ask")
    assert [each.call_id for each in table.state.unresolved()] == ["t3"]


def test_so_is_none_about_a_call_of_an_agent_within_that_agent() -> None:
    def nested() -> RunState:
        outer = call("t1", "consult", agent=BANK)
        deep = inner(*of_bank("d1", "d2"))
        return replace(inner(replace(outer, needs_approval=False)), nested={"t1": deep})

    table = with_agent_called()
    table.note_inner("ask", nested())
    table.waits("ask")
    assert [each.call_id for each in table.decide("d1", approved=True)] == ["ask"]
    table.decide("d2", approved=True)
    table.note_inner("ask", nested())
    assert not table.waits("ask")
    assert table.state.unresolved() == []


def test_standing_decisions_reach_inner_runs_that_go_on() -> None:
    table = with_inner("t1")
    table.called(call("ask2"))
    table.without_approval(call("ask2"))
    table.decide("t1", approved=True, always=True)
    table.note_inner("ask2", inner(*of_bank("t9")))
    assert not table.waits("ask2")


def test_the_usage_of_an_inner_run_is_counted_once_it_is_over() -> None:
    table = CallTable(base())
    table.called(call("ask"))
    table.note_inner("ask", inner(tokens=5))
    assert table.in_state(base()).total_usage().input_tokens == 5  # by the inner run itself
    table.made("ask")
    after = table.in_state(base().with_usage(SHOP, Spent(input_tokens=2)))
    assert after.total_usage() == Spent(requests=1, input_tokens=7)
    assert after.nested == {}


def test_usage_of_the_state_to_go_on_from_is_not_counted_twice() -> None:
    state = base().with_usage(SHOP, Spent(input_tokens=2))
    assert CallTable(state).in_state(state).total_usage().input_tokens == 2


# --- the end, and going on -----------------------------------------------------------------------


def three_calls() -> CallTable:
    """c1 has begun, c2 waits, c3 runs and has not begun, c4 has an output that is not sent."""
    table = waiting(call("c2"))
    for each in ("c1", "c3", "c4"):
        table.called(call(each))
    table.begun.add("c1")
    table.made("c4")
    return table


def test_at_the_end_calls_that_have_begun_are_uncertain_and_the_others_are_returned() -> None:
    table = three_calls()
    assert table.end("return") == {"c1": UNCERTAIN}
    assert table.abandoned == ()
    state = table.in_state(base())
    assert [each.call_id for each in state.calls] == ["c2", "c3"]
    assert table.end("return") == {}
    assert RunState.from_string(state.to_string()) == state


def test_at_the_end_calls_that_have_not_begun_can_be_abandoned() -> None:
    table = three_calls()
    assert table.end("abandon") == {"c1": UNCERTAIN, "c2": ABANDONED, "c3": ABANDONED}
    assert [each.call_id for each in table.abandoned] == ["c2", "c3"]
    assert table.end("abandon") == {}
    assert len(table.abandoned) == 2
    assert table.in_state(base()).calls == ()


def test_an_inner_run_is_returned_as_far_as_it_has_come() -> None:
    table = with_inner("t1")
    table.decide("t1", approved=True)
    assert table.end("return") == {}
    state = table.in_state(base())
    assert [each.call_id for each in state.calls] == ["ask"]
    assert state.nested["ask"].decision_for(of_bank("t1")[0]) is not None
    assert RunState.from_string(state.to_string()) == state


def test_an_inner_run_is_abandoned_with_the_calls_that_wait_in_it() -> None:
    table = with_inner("t1")
    assert table.end("abandon") == {"ask": UNCERTAIN}  # the agent may have made other calls
    assert list(table.abandoned) == of_bank("t1")
    assert table.in_state(base()).nested == {}


def test_nothing_is_made_after_the_end() -> None:
    table = three_calls()
    table.end("return")
    assert not table.made("c1")
    assert not table.made("c3")
    assert table.called(call("c9")) == "ignore"
    table.note_inner("c3", inner(*of_bank("t1")))
    assert table.in_state(base()).nested == {}


def test_another_session_goes_on_with_the_calls_the_decisions_and_the_code_session() -> None:
    before = waiting(call("c1"), call("c2"))
    before.note_code(CodeSession(session_id="code", last_call=3))
    before.end("return")
    state = before.in_state(base()).approve("c2")
    table = CallTable(state)
    assert [each.call_id for each in table.state.calls] == ["c1", "c2"]
    assert table.state.decision_for(call("c1")) is None
    decision = table.state.decision_for(call("c2"))
    assert decision is not None
    assert decision.approved
    assert table.state.code == CodeSession(session_id="code", last_call=3)


def test_a_call_of_the_state_can_be_decided_about_before_it_is_looked_at_again() -> None:
    table = CallTable(base().with_calls([call()]))
    assert table.decide("c1", approved=True) == []
    assert table.state.decision_for(call()) is not None


# --- any order of events -------------------------------------------------------------------------

IDS = st.sampled_from(["c1", "c2", "c3", "c4"])


class Calls(RuleBasedStateMachine):
    """A session that does what the table says, in any order, with any failures."""

    def __init__(self) -> None:
        super().__init__()
        self.table = CallTable(base())
        self.runs: Counter[str] = Counter()
        """How often a function was called."""
        self.recorded: dict[str, str] = {}
        self.delivered: Counter[str] = Counter()
        self.running: dict[str, bool] = {}
        """The calls with a task; whether they may be made, as no approval is needed any more."""
        self.waiting: set[str] = set()
        self.unsent: set[str] = set()
        self.is_over = False

    @rule(call_id=IDS, needs_approval=st.booleans())
    def the_model_calls(self, call_id: str, needs_approval: bool) -> None:
        step = self.table.called(call(call_id))
        if self.is_over:
            assert step == "ignore"
        elif call_id in self.unsent:
            assert step == "send"
        elif call_id in self.running or call_id in self.waiting or call_id in self.delivered:
            assert step == "ignore"
        else:
            assert step == "run"
            self.running[call_id] = not needs_approval

    @rule(call_id=IDS)
    def the_id_comes_with_other_arguments(self, call_id: str) -> None:
        known = self.running.keys() | self.waiting | self.unsent | self.delivered.keys()
        if call_id in known and not self.is_over:
            with pytest.raises(CallChanged):
                self.table.called(call(call_id, arguments="{ }"))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_task_goes_on(self, data: st.DataObject) -> None:
        call_id = data.draw(st.sampled_from(sorted(self.running)))
        if self.running[call_id] or self.table.state.decision_for(call(call_id)) is not None:
            if call_id not in self.table.begun:
                if self.is_over:
                    return
                self.runs[call_id] += 1
                self.table.begun.add(call_id)
                self.running[call_id] = True
            elif self.table.made(call_id):
                del self.running[call_id]
                self.recorded[call_id] = "output"
                self.unsent.add(call_id)
        elif not self.is_over and self.table.waits(call_id):
            del self.running[call_id]
            self.waiting.add(call_id)

    @rule(call_id=IDS, approved=st.booleans(), always=st.booleans())
    def people_decide(self, call_id: str, approved: bool, always: bool) -> None:
        if self.is_over:
            return
        if call_id not in self.waiting:
            with pytest.raises(UnknownCall):
                self.table.decide(call_id, approved=approved, always=always)
            return
        found = {
            each.call_id for each in self.table.decide(call_id, approved=approved, always=always)
        }
        assert found == (self.waiting if always else {call_id})
        self.waiting -= found
        self.running |= dict.fromkeys(found, False)

    @precondition(lambda self: self.unsent)
    @rule(data=st.data(), succeeds=st.booleans())
    def an_output_is_sent(self, data: st.DataObject, succeeds: bool) -> None:
        call_id = data.draw(st.sampled_from(sorted(self.unsent)))
        if succeeds and not self.is_over:
            self.table.sent(call_id)
            self.delivered[call_id] += 1
            self.unsent.discard(call_id)

    @rule(open_approvals=st.sampled_from(["return", "abandon"]))
    def the_session_ends(self, open_approvals: Literal["return", "abandon"]) -> None:
        outputs = self.table.end(open_approvals)
        assert outputs.keys().isdisjoint(self.recorded)
        self.recorded |= outputs
        if self.is_over:
            assert not outputs
            return
        self.is_over = True
        left = {each.call_id for each in self.table.in_state(base()).calls}
        begun = {each for each, text in outputs.items() if text == UNCERTAIN}
        abandoned = {each.call_id for each in self.table.abandoned}
        assert begun == {each for each in self.running if self.runs[each]}
        assert left | abandoned == (self.running.keys() | self.waiting) - begun
        assert not (left if open_approvals == "abandon" else abandoned)

    @invariant()
    def nothing_is_lost_or_done_twice(self) -> None:
        assert all(count == 1 for count in self.runs.values())
        assert all(count == 1 for count in self.delivered.values())
        if not self.is_over:
            state = self.table.in_state(base())
            assert {each.call_id for each in self.table.state.unresolved()} == self.waiting
            kept = {each.call_id for each in state.calls}
            assert kept == self.waiting | {each for each in self.running if not self.runs[each]}
            RunState.from_string(state.to_string())


TestCalls = Calls.TestCase
TestCalls.settings = settings(max_examples=60, stateful_step_count=30)
