"""Decisions on tool calls: what they are bound to, and which of them counts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from capsule_tasks.errors import CallChanged, InvalidRunState, UnknownCall
from capsule_tasks.runs import AgentGraph, AgentId, PendingCall, RunState, Spent, ToolKey
from capsule_tasks.runs.approvals import DEFAULT_REJECTION
from tests.unit.runs.run_states import calls

ALICE, BOB = AgentId("alice"), AgentId("bob")


def call(
    call_id: str = "c1", tool: ToolKey | str = "pay", agent: AgentId = ALICE, arguments: str = "{}"
) -> PendingCall:
    key = ToolKey(tool) if isinstance(tool, str) else tool
    return PendingCall(call_id=call_id, tool=key, agent=agent, arguments=arguments)


def state(*waiting: PendingCall) -> RunState:
    return RunState(run_id="r", start_agent=ALICE, agent=ALICE).with_calls(waiting)


def stored(state: RunState) -> RunState:
    """As another process gets it."""
    return RunState.from_string(state.to_string())


def test_an_approval_and_a_rejection_hold_for_the_call_they_were_given_for() -> None:
    parked = stored(state(call("c1"), call("c2"), call("c3")))
    parked = stored(parked.approve("c1", by="ann", at_ms=5))
    parked = stored(parked.reject("c2", message="not today"))
    first, second, third = parked.calls
    approval, rejection = parked.decision_for(first), parked.decision_for(second)
    assert approval is not None
    assert (approval.approved, approval.by, approval.at_ms) == (True, "ann", 5)
    assert rejection is not None
    assert (rejection.approved, rejection.rejection) == (False, "not today")
    assert parked.decision_for(third) is None
    assert parked.unresolved() == [third]


def test_a_rejection_without_a_message_has_a_default_text_for_the_model() -> None:
    parked = state(call()).reject("c1")
    decision = parked.decision_for(call())
    assert decision is not None
    assert decision.rejection == DEFAULT_REJECTION


def test_a_standing_approval_covers_later_calls_of_that_tool_by_that_agent_only() -> None:
    parked = stored(state(call("c1")).approve("c1", always=True))
    covered = [
        call("c2"),
        call("c3", arguments='{"other": 1}'),
    ]
    others = [
        call("c4", "refund"),
        call("c5", ToolKey.namespaced("bank", "pay")),
        call("c6", ToolKey.deferred("pay")),
        call("c7", agent=BOB),
        call("c8", agent=AgentId("alice", "tag")),
    ]
    assert parked.with_calls([*covered, *others]).unresolved() == others


def test_a_standing_approval_for_one_namespace_does_not_cover_another() -> None:
    crm, billing = ToolKey.namespaced("crm", "find"), ToolKey.namespaced("billing", "find")
    parked = stored(state(call("c1", crm)).approve("c1", always=True))
    assert parked.decision_for(call("c2", crm)) is not None
    assert parked.decision_for(call("c2", billing)) is None
    assert parked.decision_for(call("c2", "find")) is None


@pytest.mark.parametrize("exact_first", [True, False])
def test_an_exact_decision_beats_a_standing_one(exact_first: bool) -> None:
    parked = state(call("c1"), call("c2"))
    if exact_first:
        parked = parked.reject("c1").approve("c2", always=True)
    else:
        parked = parked.approve("c2", always=True).reject("c1")
    decision = stored(parked).decision_for(call("c1"))
    assert decision is not None
    assert not decision.approved


def test_the_latest_standing_decision_counts() -> None:
    parked = state(call("c1"), call("c2")).approve("c1", always=True).reject("c2", always=True)
    decision = stored(parked).decision_for(call("c3"))
    assert decision is not None
    assert not decision.approved


def test_a_decision_on_one_agents_call_is_none_on_anothers_of_the_same_id() -> None:
    parked = state(call("c1")).approve("c1")
    assert parked.decision_for(call("c1", agent=BOB)) is None
    assert parked.decision_for(call("c1", "other")) is None


def test_changed_arguments_under_a_decided_id_are_refused() -> None:
    parked = stored(state(call("c1", arguments='{"to": "ann"}')).approve("c1"))
    with pytest.raises(CallChanged) as caught:
        parked.decision_for(call("c1", arguments='{"to": "eve"}'))
    assert caught.value.call_id == "c1"


@pytest.mark.parametrize("other", [call(arguments="[]"), call(tool="x"), call(agent=BOB)])
def test_another_call_under_a_waiting_id_is_refused(other: PendingCall) -> None:
    with pytest.raises(CallChanged):
        state(call()).with_calls([other])
    assert state(call()).with_calls([call()]) == state(call())


def test_a_decision_on_a_call_that_does_not_wait_is_refused() -> None:
    with pytest.raises(UnknownCall, match="'c9' waits for no decision"):
        state(call()).approve("c9")
    with pytest.raises(UnknownCall):
        state(call()).approve("c1", tool=ToolKey("other"))


def test_a_call_that_needs_no_approval_is_not_requested() -> None:
    free = PendingCall(
        call_id="c1", tool=ToolKey("x"), agent=ALICE, arguments="", needs_approval=False
    )
    assert state(free).unresolved() == []
    with pytest.raises(UnknownCall):
        state(free).approve("c1")


def nested() -> RunState:
    inner = RunState(run_id="r/c1", start_agent=BOB, agent=BOB)
    inner = inner.with_calls([call("c1", "delete", BOB), call("c2", "send", BOB)])
    outer = state(PendingCall(call_id="c1", tool=ToolKey("ask_bob"), agent=ALICE, arguments="{}"))
    data = outer.approve("c1").to_json()
    data["nested"] = {"c1": {k: v for k, v in inner.to_json().items() if k != "$schemaVersion"}}
    return RunState.from_json(data)


def test_a_run_inside_of_a_call_waits_and_is_decided_through_its_parent() -> None:
    parked = nested()
    assert [each.tool.name for each in parked.unresolved()] == ["delete", "send"]
    parked = stored(parked.reject("c2", message="no mail"))
    assert [each.tool.name for each in parked.unresolved()] == ["delete"]
    decision = parked.nested["c1"].decision_for(call("c2", "send", BOB))
    assert decision is not None
    assert decision.message == "no mail"


def test_a_standing_decision_in_a_nested_run_holds_for_later_runs_of_that_agent() -> None:
    parked = stored(nested().approve("c2", tool=ToolKey("send"), agent=BOB, always=True))
    standing = parked.without_calls(["c1"]).approvals.standing
    assert [(each.tool.name, each.agent) for each in standing] == [("send", BOB)]
    assert parked.decision_for(call("c9", "send")) is None, "it held for another agent"

    class Alice:
        name, handoffs = "alice", ()

    graph = AgentGraph(Alice())
    assert parked.with_graph(graph).name == "alice", "the agent used as a tool was looked up"


def test_a_call_id_used_twice_needs_the_tool_or_the_agent() -> None:
    parked = nested()
    with pytest.raises(UnknownCall, match="2 calls have that id"):
        parked.approve("c1")
    assert [each.call_id for each in parked.approve("c1", agent=BOB).unresolved()] == ["c2"]


def test_completed_calls_leave_only_standing_decisions() -> None:
    parked = state(call("c1"), call("c2")).approve("c1", always=True).reject("c2")
    after = parked.without_calls(["c1", "c2"])
    assert after.calls == ()
    assert after.approvals.exact == ()
    assert len(after.approvals.standing) == 1
    assert nested().without_calls(["c1"]).nested == {}


def test_states_do_not_grow_with_the_turns_behind_them() -> None:
    parked = state()
    sizes = []
    for turn in range(500):
        waiting = call(f"call_{turn:04}")
        parked = parked.with_calls([waiting]).approve(waiting.call_id, always=True)
        parked = parked.without_calls([waiting.call_id]).with_tool_use(ALICE, ["pay"])
        parked = parked.with_usage(ALICE, Spent(requests=1, input_tokens=10))
        sizes.append(len(parked.to_string()))
    assert sizes[-1] <= 1.2 * sizes[0]
    assert parked.usage[0].requests == 500


@pytest.mark.parametrize("value", [None, 7, "", b"c1"])
def test_a_call_id_stays_the_string_that_the_provider_sent(value: object) -> None:
    with pytest.raises(InvalidRunState):
        PendingCall(call_id=value, tool=ToolKey("x"), agent=ALICE, arguments="")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, {}, b"{}"])
def test_a_call_without_arguments_to_show_is_refused(value: object) -> None:
    with pytest.raises(InvalidRunState, match="call 'c1' of tool 'bare:x'"):
        PendingCall(call_id="c1", tool=ToolKey("x"), agent=ALICE, arguments=value)  # type: ignore[arg-type]


@given(st.lists(calls, min_size=1, max_size=4, unique_by=lambda each: each.call_id), st.data())
def test_in_any_order_of_decisions_the_last_exact_one_counts(
    waiting: list[PendingCall], data: st.DataObject
) -> None:
    asked = [each for each in waiting if each.needs_approval]
    parked = state(*waiting)
    last: dict[str, bool] = {}
    for _ in range(data.draw(st.integers(0, 6)) if asked else 0):
        one = data.draw(st.sampled_from(asked))
        approved, always = data.draw(st.booleans()), data.draw(st.booleans())
        decide = parked.approve if approved else parked.reject
        parked = stored(decide(one.call_id, always=always))
        last[one.call_id] = approved
    for each in asked:
        decision = parked.decision_for(each)
        if each.call_id in last:
            assert decision is not None
            assert decision.approved == last[each.call_id]


places = st.builds(
    call,
    st.sampled_from(["c1", "c2", "c3"]),
    st.sampled_from(
        [
            *(ToolKey("pay"), ToolKey.deferred("pay"), ToolKey("pay", "shell")),
            *(ToolKey.namespaced(name, "pay") for name in ("crm", "shop")),
            *(ToolKey.hosted_mcp(server, "pay") for server in ("crm", "shop")),
        ]
    ),
    st.sampled_from([ALICE, BOB]),
)
decisions = st.lists(st.tuples(places, st.booleans(), st.booleans(), st.integers(0, 9)), max_size=8)


@settings(max_examples=100)
@given(decisions, places, st.booleans())
def test_of_any_decisions_an_exact_one_counts_before_a_standing_one_and_a_later_one_before_both(
    taken: list[tuple[PendingCall, bool, bool, int]], asked: PendingCall, is_stored: bool
) -> None:
    """The rule in its plainest form: two searches from the latest decision to the first."""
    parked, book = state(), list[tuple[PendingCall, bool, bool, int]]()
    for one, approved, always, at_ms in taken:
        waiting = parked.without_calls([each.call_id for each in parked.calls])
        if any(each.call_id == one.call_id for each, *_ in book):
            continue  # the provider gives each call of a run an id of its own
        waiting = replace(waiting, approvals=parked.approvals).with_calls([one])
        decide = waiting.approve if approved else waiting.reject
        parked = decide(one.call_id, always=always, at_ms=at_ms)
        book.append((one, approved, always, at_ms))
    if is_stored:
        parked = stored(parked)

    def same(one: PendingCall, *names: str) -> bool:
        return all(getattr(one, name) == getattr(asked, name) for name in names)

    exact = [each for each in book if same(each[0], "call_id", "tool", "agent")]
    standing = [each for each in book if each[2] and same(each[0], "tool", "agent")]
    wanted = [*standing[-1:], *exact[-1:]]
    decision = parked.decision_for(asked)
    if not wanted:
        assert decision is None
    else:
        assert decision is not None
        assert (decision.approved, decision.at_ms) == (wanted[-1][1], wanted[-1][3])
