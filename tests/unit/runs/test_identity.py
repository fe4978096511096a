"""Identities of agents and tools survive a round trip, a restart and a reordered graph."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule_tasks.errors import AmbiguousAgent, InvalidRunState, InvalidSetting, UnknownAgent
from capsule_tasks.runs import AgentGraph, AgentId, RunState, ToolKey
from tests.unit.runs.run_states import names


@dataclass(eq=False)
class Agent:
    name: str
    instructions: Any = None
    handoffs: list[Any] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)
    key: str | None = None


@dataclass
class Handoff:
    agent: Agent


def team(reverse: bool = False) -> dict[str, Agent]:
    """Two agents of one name that differ in their instructions, and two that differ by place."""
    roles = {
        "start": Agent("triage"),
        "refunds": Agent("clerk", "refunds"),
        "orders": Agent("clerk", "orders"),
        "near": Agent("helper"),
        "far": Agent("helper"),
    }
    roles["start"].handoffs = [roles["refunds"], Handoff(roles["orders"]), roles["near"]]
    roles["refunds"].handoffs = [roles["far"], roles["start"]]
    if reverse:
        for agent in roles.values():
            agent.handoffs.reverse()
    return roles


def identities(roles: dict[str, Agent]) -> dict[str, AgentId]:
    graph = AgentGraph(roles["start"])
    return {role: graph.identity(agent) for role, agent in roles.items()}


def test_agents_of_one_name_stay_apart_after_a_round_trip_and_a_reordering() -> None:
    saved = identities(team())
    assert len(set(saved.values())) == len(saved)
    again = team(reverse=True)
    assert identities(again) == saved
    graph = AgentGraph(again["start"])
    for role, identity in saved.items():
        state = RunState(run_id="r", start_agent=saved["start"], agent=identity)
        assert RunState.from_string(state.to_string()).with_graph(graph) is again[role]


@given(st.randoms(use_true_random=False))
def test_no_order_of_handoffs_changes_an_identity(random_order: random.Random) -> None:
    roles = team()
    for agent in roles.values():
        random_order.shuffle(agent.handoffs)
    assert identities(roles) == identities(team())


def test_a_name_of_its_own_needs_no_tag_and_may_change_all_else() -> None:
    assert identities(team())["start"] == AgentId("triage")
    changed = team()
    changed["start"].instructions = "be kind"
    graph = AgentGraph(changed["start"])
    assert graph.resolve(AgentId("triage")) is changed["start"]


def test_agents_that_nothing_tells_apart_are_refused_until_they_have_keys() -> None:
    twins = [Agent("twin"), Agent("twin")]
    start = Agent("start", handoffs=list(twins))
    with pytest.raises(AmbiguousAgent, match="2 agents are named 'twin'"):
        AgentGraph(start).identity(twins[0])
    for key, twin in zip("ab", twins, strict=True):
        twin.key = key
    graph = AgentGraph(start)
    saved = [graph.identity(twin) for twin in twins]
    start.handoffs.reverse()
    twins[0].instructions = "whatever: the key says who it is"
    graph = AgentGraph(start)
    assert [graph.resolve(identity) for identity in saved] == twins


def test_another_agent_of_the_same_name_never_takes_the_place() -> None:
    saved = identities(team())
    alone = team()
    alone["start"].handoffs = [alone["orders"]]
    graph = AgentGraph(alone["start"])
    with pytest.raises(UnknownAgent) as caught:
        graph.resolve(saved["refunds"])
    assert (caught.value.name, caught.value.tag) == ("clerk", saved["refunds"].tag)
    with pytest.raises(AmbiguousAgent):
        AgentGraph(team()["start"]).resolve(AgentId("clerk"))


def test_agents_that_are_not_in_the_graph_are_named() -> None:
    graph = AgentGraph(team()["start"])
    with pytest.raises(UnknownAgent, match="no agent of the graph is 'ghost'; it has clerk"):
        graph.resolve(AgentId("ghost"))
    with pytest.raises(UnknownAgent):
        graph.identity(Agent("ghost"))


def test_every_agent_of_a_state_has_to_be_in_the_graph() -> None:
    state = RunState(run_id="r", start_agent=AgentId("triage"), agent=AgentId("triage"))
    used = state.with_tool_use(AgentId("retired"), ["lookup"])
    graph = AgentGraph(team()["start"])
    assert state.with_graph(graph) is graph.start
    with pytest.raises(UnknownAgent, match="retired"):
        used.with_graph(graph)


def test_instructions_from_code_count_by_their_name() -> None:
    def kind() -> None: ...
    def strict() -> None: ...

    def built() -> dict[str, AgentId]:
        roles = {"a": Agent("clerk", kind), "b": Agent("clerk", strict)}
        roles["start"] = Agent("start", handoffs=list(roles.values()))
        return identities(roles)

    assert built() == built()
    assert built()["a"] != built()["b"]


def test_a_description_of_ones_own_tells_agents_apart_or_gives_them_keys() -> None:
    def by_instructions(agent: Agent) -> dict[str, Any]:
        return {"instructions": agent.instructions}

    def by_key(agent: Agent) -> dict[str, Any]:
        return {"key": agent.instructions}

    clerks = [Agent("clerk", "refunds", key="same"), Agent("clerk", "orders", key="same")]
    start = Agent("start", handoffs=list(clerks))
    with pytest.raises(AmbiguousAgent):
        AgentGraph(start).identity(clerks[0])
    for describe in (by_instructions, by_key):
        graph = AgentGraph(start, describe=describe)
        assert [graph.resolve(graph.identity(clerk)) for clerk in clerks] == clerks
    saved = graph.identity(clerks[0])
    clerks[0].handoffs = [start]
    assert AgentGraph(start, by_key).identity(clerks[0]) == saved


def test_a_tool_in_a_namespace_is_not_the_bare_one_nor_the_deferred_one() -> None:
    keys = [ToolKey("lookup"), ToolKey.namespaced("crm", "lookup"), ToolKey.deferred("lookup")]
    keys += [ToolKey.namespaced("billing", "lookup"), ToolKey("crm/lookup")]
    assert len({key.text for key in keys}) == len(set(keys)) == len(keys)
    assert [key.text for key in keys[:3]] == [
        "bare:lookup",
        "namespaced:crm/lookup",
        "deferred_top_level:lookup",
    ]


@given(st.lists(st.tuples(names, names), min_size=2, max_size=2, unique=True))
def test_no_two_tools_or_agents_have_one_spelling(pairs: list[tuple[str, str]]) -> None:
    tools = [ToolKey.namespaced(*pair) for pair in pairs]
    agents = [AgentId(name) for name, _ in pairs] + [AgentId(name, "t") for name, _ in pairs]
    for some in (tools, agents):
        for one, other in itertools.combinations(some, 2):
            assert (one == other) == (one.text == other.text)


@pytest.mark.parametrize(
    "parts", [("",), ("x", "namespaced"), ("x", "bare", "crm"), ("x", "namespaced", "")]
)
def test_a_tool_key_that_contradicts_itself_is_refused(parts: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidSetting):
        ToolKey(*parts)


@pytest.mark.parametrize("name", ["", "\ud800", 5, None])
def test_a_name_that_no_index_could_hold_is_refused(name: Any) -> None:
    """Such a name once failed only when the run was parked, by an error of Python."""
    for make in (AgentId, ToolKey, lambda text: ToolKey.namespaced("crm", text)):
        with pytest.raises(InvalidSetting, match="name"):
            make(name)
    if name is not None:
        for other in (lambda: AgentId("a", name), lambda: ToolKey.namespaced(name, "t")):
            with pytest.raises(InvalidSetting):
                other()
    snapshot = {"$schemaVersion": "1.0", "run_id": "r", "start_agent": {"name": name}}
    with pytest.raises(InvalidRunState, match="start_agent"):
        RunState.from_json({**snapshot, "agent": {"name": "a"}})
