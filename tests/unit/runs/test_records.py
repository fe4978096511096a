"""What a run records: usage, replies of models, results of guardrails, without secrets."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule_tasks.errors import UnknownAgent
from capsule_tasks.runs import (
    AgentGraph,
    AgentId,
    CodeSession,
    FilteredInput,
    GuardrailResult,
    ModelResponse,
    PendingCall,
    RunState,
    Spent,
    ToolKey,
    Usage,
)
from tests.unit.runs.run_states import counts, states

SECRET = "sk-live-0123456789"
TRIAGE, WRITER = AgentId("triage"), AgentId("writer")
PAY = ToolKey("pay")


def state_of(**fields: object) -> RunState:
    return RunState(run_id="r", start_agent=TRIAGE, agent=TRIAGE, **fields)  # type: ignore[arg-type]


def call(call_id: str) -> PendingCall:
    return PendingCall(call_id=call_id, tool=PAY, agent=TRIAGE, arguments="{}")


def guardrail(call_id: str | None = None, **fields: object) -> GuardrailResult:
    about = (
        {"kind": "tool_input", "call_id": call_id, "tool": PAY} if call_id else {"kind": "input"}
    )
    return GuardrailResult.recorded(name="g", agent=TRIAGE, **about, **fields)


def test_the_usage_of_an_agent_is_summed_and_so_is_that_of_the_run() -> None:
    state = state_of().with_usage(TRIAGE, Spent(requests=1, input_tokens=10, cached_tokens=4))
    state = state.with_usage(TRIAGE, Spent(requests=1, output_tokens=2, reasoning_tokens=1))
    inner = state_of().with_usage(WRITER, Spent(requests=1, time_ms=5))
    state = RunState.from_json(
        {**state.with_calls([call("c")]).to_json(), "nested": {"c": without_version(inner)}}
    )
    assert state.usage == (
        Usage(
            agent=TRIAGE,
            requests=2,
            input_tokens=10,
            cached_tokens=4,
            output_tokens=2,
            reasoning_tokens=1,
        ),
    )
    assert state.total_usage() == Spent(
        requests=3,
        input_tokens=10,
        cached_tokens=4,
        output_tokens=2,
        reasoning_tokens=1,
        time_ms=5,
    )


def without_version(state: RunState) -> dict[str, object]:
    return {name: value for name, value in state.to_json().items() if not name.startswith("$")}


@given(st.lists(st.builds(Spent, requests=counts, input_tokens=counts, time_ms=counts)))
def test_no_order_of_additions_changes_the_sum(parts: list[Spent]) -> None:
    one = other = state_of()
    for spent in parts:
        one = one.with_usage(TRIAGE, spent)
    for spent in reversed(parts):
        other = other.with_usage(TRIAGE, spent)
    assert one.total_usage() == other.total_usage()
    assert one.total_usage().requests == sum(spent.requests for spent in parts)


def test_a_turn_ends_with_its_replies_and_with_guardrails_of_calls_that_are_over() -> None:
    reply = ModelResponse(agent=TRIAGE, response_id="resp_1", spent=Spent(requests=1, time_ms=9))
    state = state_of(code=CodeSession(session_id="s"), filtered_input=FilteredInput([], 3))
    state = state.with_calls([call("c1"), call("c2")]).with_response(reply)
    state = state.with_guardrails([guardrail(), guardrail("c1"), guardrail("c2")])
    assert state.responses == (reply,)
    after = state.without_calls(["c1"]).after_turn(agent=WRITER, stored_items=4)
    assert (after.turn, after.agent, after.stored_items, after.responses) == (1, WRITER, 4, ())
    assert after.guardrails == (guardrail(), guardrail("c2"))
    assert after.total_usage() == reply.spent
    assert (after.code, after.filtered_input) == (state.code, state.filtered_input)
    assert after.after_turn().agent == WRITER


def test_a_snapshot_does_not_grow_with_its_turns() -> None:
    sizes = []
    state = state_of(calls=())
    for number in range(500):
        item = {"type": "message", "content": "x" * 1000}
        reply = ModelResponse(agent=TRIAGE, response_id=f"resp_{number}", items=[item])
        state = state.with_response(reply).with_calls([call(f"c{number}")])
        state = state.with_guardrails([guardrail(f"c{number}")])
        state = state.without_calls([f"c{number}"]).after_turn(stored_items=2)
        sizes.append(len(state.to_string()))
    assert sizes[-1] <= 1.2 * sizes[0]


@settings(max_examples=25)
@given(states())
def test_a_state_after_its_turn_comes_back_as_it_was(state: RunState) -> None:
    after = state.after_turn(stored_items=2)
    assert RunState.from_string(after.to_string()) == after
    assert {each.call_id for each in after.guardrails if each.call_id} <= {
        each.call_id for each in after.calls
    }


@dataclass
class Verdict:
    token: str = SECRET


def test_info_of_a_guardrail_is_stored_without_secrets_unless_they_are_wanted() -> None:
    info = {"score": 1, "api_key": SECRET, "seen": [f"https://ann:{SECRET}@example.org/", "calm"]}
    state = state_of(guardrails=(guardrail(info=info),))
    text = state.to_string()
    assert SECRET not in text
    (found,) = RunState.from_string(text).guardrails
    assert found.info == {"score": 1, "seen": [None, "calm"]}
    assert found.left_out == ("$.info.api_key", "$.info.seen[0]")
    wanted = state_of(guardrails=(guardrail(info=info, unfiltered=True),))
    (found,) = RunState.from_string(wanted.to_string()).guardrails
    assert found.info == info
    assert info["api_key"] == SECRET, "the guardrail's own value was changed"


def test_of_info_that_is_not_json_only_the_type_is_stored() -> None:
    state = state_of(guardrails=(guardrail(info=Verdict()),))
    text = state.to_string()
    assert SECRET not in text
    (found,) = RunState.from_string(text).guardrails
    assert found.info is None
    assert found.info_type == f"{__name__}.Verdict"


def test_agents_of_replies_and_guardrails_have_to_be_in_the_graph() -> None:
    class Node:
        name, handoffs = "triage", ()

    graph = AgentGraph(Node())
    assert state_of().with_graph(graph).name == "triage"
    for strange in (
        state_of(responses=(ModelResponse(agent=WRITER),)),
        state_of(guardrails=(GuardrailResult(kind="input", name="g", agent=WRITER),)),
    ):
        with pytest.raises(UnknownAgent):
            strange.with_graph(graph)
