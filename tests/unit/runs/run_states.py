"""States to test with: the fixtures of every version, and any state at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from capsule_tasks.runs import (
    AgentId,
    CodeSession,
    Decision,
    FilteredInput,
    GuardrailResult,
    ModelResponse,
    PendingCall,
    RunApprovals,
    RunState,
    SavedContext,
    ServerConversation,
    Spent,
    ToolKey,
    TraceState,
    Usage,
)
from capsule_tasks.runs.state import ToolUse

FIXTURES = Path(__file__).parents[2] / "fixtures" / "runstate"


def fixture_of(version: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((FIXTURES / f"{version}.json").read_text())
    return data


texts = st.text(st.characters(codec="utf-8"), max_size=12)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
counts = st.integers(0, 2**40)
leaves = st.none() | st.booleans() | st.integers() | texts
leaves |= st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)
items = st.lists(st.dictionaries(texts, values, max_size=3), max_size=2)
agents = st.builds(AgentId, names, st.none() | names)
tools = (
    st.builds(ToolKey, names)
    | st.builds(ToolKey.namespaced, names, names)
    | st.builds(ToolKey.deferred, names)
)
maybe = st.none() | texts
calls = st.builds(
    PendingCall,
    call_id=names,
    tool=tools,
    agent=agents,
    arguments=texts,
    needs_approval=st.booleans(),
)
exact = st.builds(
    Decision,
    approved=st.booleans(),
    tool=tools,
    agent=agents,
    call_id=names,
    fingerprint=maybe,
    message=maybe,
    by=maybe,
    at_ms=counts,
)
standing = st.builds(Decision, approved=st.booleans(), tool=tools, agent=agents, message=maybe)


def tuples_of(each: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(each, max_size=3).map(tuple)


unique_calls = st.lists(calls, max_size=3, unique_by=lambda call: call.call_id).map(tuple)
contexts = st.just(SavedContext()) | st.builds(
    SavedContext,
    kind=st.sampled_from(["mapping", "custom"]),
    type=names,
    value=st.dictionaries(texts, values, max_size=3),
    left_out=tuples_of(texts),
    warning=maybe,
)

traces = st.builds(
    TraceState,
    trace_id=names,
    workflow=maybe,
    metadata=st.none() | st.dictionaries(texts, texts, max_size=2),
    unfiltered=st.booleans(),
)


spent = st.builds(Spent, requests=counts, cached_tokens=counts, time_ms=counts)
responses = st.builds(
    ModelResponse,
    agent=agents,
    response_id=maybe,
    items=items,
    stored_items=counts,
    spent=spent,
)
about_guardrails = {"name": names, "agent": agents, "tripped": st.booleans(), "info": values}
guardrails = st.builds(
    GuardrailResult,
    kind=st.sampled_from(["input", "output"]),
    unfiltered=st.booleans(),
    **about_guardrails,
) | st.builds(
    GuardrailResult,
    kind=st.sampled_from(["tool_input", "tool_output"]),
    call_id=names,
    tool=tools,
    behavior=st.sampled_from(["allow", "reject", "raise"]),
    message=maybe,
    **about_guardrails,
)
sessions = st.builds(CodeSession, session_id=names, profile=maybe, last_call=counts)
filtered = st.builds(FilteredInput, items=items, stands_for=counts, last_item=maybe)


@st.composite
def states(draw: st.DrawFn, depth: int = 2) -> RunState:
    """Any state, with runs nested up to `depth`."""
    own = draw(unique_calls)
    nested = {}
    if depth and own:
        inside = draw(st.lists(st.sampled_from([call.call_id for call in own]), max_size=1))
        nested = {call_id: draw(states(depth=depth - 1)) for call_id in inside}
    return RunState(
        run_id=draw(names),
        start_agent=draw(agents),
        agent=draw(agents),
        turn=draw(counts),
        max_turns=draw(st.none() | counts),
        input=draw(texts | items),
        stored_items=draw(counts),
        first_item=draw(maybe),
        last_item=draw(maybe),
        held_items=draw(items),
        calls=own,
        approvals=RunApprovals(exact=draw(tuples_of(exact)), standing=draw(tuples_of(standing))),
        tool_use=draw(tuples_of(st.builds(ToolUse, agent=agents, tools=tuples_of(names)))),
        usage=draw(tuples_of(st.builds(Usage, agent=agents, requests=counts, time_ms=counts))),
        context=draw(contexts),
        trace=draw(st.none() | traces),
        nested=nested,
        conversation=draw(
            st.none()
            | st.builds(ServerConversation, conversation_id=maybe, acknowledged_items=counts)
        ),
        responses=draw(tuples_of(responses)),
        guardrails=draw(tuples_of(guardrails)),
        filtered_input=draw(st.none() | filtered),
        code=draw(st.none() | sessions),
    )
