"""Checks when agents, agents as tools and run configurations are made."""

from typing import Any

import pytest

from capsule_tasks.errors import InvalidSetting, WrongArguments
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.checking import check_distinct, snake_case
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.agents.handoffs import Handoff
from capsule_tasks.runs.agents.run_config import RunConfig
from capsule_tasks.runs.agents.tools import AgentTool, HostedTool, Tool
from capsule_tasks.runs.models.model import ModelSettings

Support = Agent(name="Support Desk", handoff_description="Helps.")


def lookup(a: int) -> int:
    return a


def tool(name: str, namespace: str | None = None) -> Tool:
    return function_tool(name=name, namespace=namespace)(lookup)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"name": ""}, "Agent.name = ''"),
        ({"name": 3}, "Agent.name = 3"),
        ({"instructions": 3}, r"Agent\(A\)\.instructions = 3"),
        ({"instructions": lambda: ""}, r"instructions = .*2 arguments"),
        ({"model": 3}, "model = 3"),
        ({"model_settings": {"temperature": 1}}, "model_settings"),
        ({"tools": (tool("a"),)}, "tools = "),
        ({"tools": [lookup]}, r"tools\[0\] = <function lookup"),
        ({"handoffs": ["Support"]}, r"handoffs\[0\] = 'Support'"),
        ({"handoffs": [Agent(name="客")]}, "name of the handoff to 客 = ''"),
        ({"input_guardrails": [lookup]}, r"input_guardrails\[0\]"),
        ({"output_guardrails": lookup}, "output_guardrails"),
        ({"output_type": object}, "output_type"),
        ({"after_tools": "end"}, "after_tools = 'end'"),
        ({"after_tools": lookup}, "after_tools = .*2 arguments"),
        ({"reset_tool_choice": None}, "reset_tool_choice"),
        ({"handoff_description": ""}, "handoff_description"),
        ({"key": 3}, "key = 3"),
    ],
)
def test_wrong_fields_of_agents_are_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidSetting, match=name):
        Agent(**({"name": "A"} | options))


def test_agents_of_every_kind_are_accepted() -> None:
    agent = Agent(
        name="A",
        instructions=lambda ctx, agent: f"{ctx}{agent}",
        model="gpt-5",
        tools=[tool("a"), Support.as_tool(), HostedTool({"type": "web_search"})],
        handoffs=[Support, Handoff(Support, name="other")],
        after_tools=frozenset({"a"}),
        output_type=dict[str, int],
    )
    copy = agent.clone(name="B")
    assert (copy.tools, copy.name) == (agent.tools, "B")
    assert copy.tools is not agent.tools


def test_an_agent_as_a_tool_gets_one_text() -> None:
    as_tool = Support.as_tool()
    spec = as_tool.as_spec()
    assert (spec.name, spec.description, spec.strict) == ("support_desk", "Helps.", True)
    assert spec.parameters["required"] == ["input"]
    assert as_tool.input_of('{"input": "Hello"}') == "Hello"
    with pytest.raises(WrongArguments, match=r"support_desk .*`input`"):
        as_tool.input_of("{}")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"name": "a b"}, "AgentTool.name"),
        ({"agent": "Support"}, r"AgentTool\(t\)\.agent"),
        ({"max_turns": 0}, "max_turns"),
        ({"output": lambda: 1}, "output = .*1 arguments"),
        ({"needs_approval": lambda: 1}, "needs_approval = .*1 arguments"),
    ],
)
def test_wrong_fields_of_agents_as_tools_are_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidSetting, match=name):
        AgentTool(**({"name": "t", "description": "", "agent": Support} | options))


@pytest.mark.parametrize("spec", [None, {}, {"type": 3}], ids=str)
def test_a_hosted_tool_has_a_type(spec: Any) -> None:
    with pytest.raises(InvalidSetting, match=r"HostedTool\.spec"):
        HostedTool(spec)


def test_two_tools_of_one_name_are_refused() -> None:
    hosted = HostedTool({"type": "web_search"}).as_spec()
    handoff = Handoff(Support, name="lookup").as_spec()
    one, other = tool("lookup").as_spec(), tool("lookup", "crm").as_spec()
    check_distinct("A", [one, other, hosted, hosted])
    with pytest.raises(InvalidSetting, match="a tool of agent A = 'lookup'"):
        check_distinct("A", [one, other, handoff])


@pytest.mark.parametrize(
    ("name", "snake"),
    [("Support", "support"), ("HTTPServer v2", "http_server_v2"), ("a-b c", "a_b_c"), ("客", "")],
    ids=str,
)
def test_names_of_agents_become_names_of_tools(name: str, snake: str) -> None:
    assert snake_case(name) == snake


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"model": 3}, "model = 3"),
        ({"model_settings": 3}, "model_settings"),
        ({"model_provider": lambda: 1}, "model_provider = .*1 arguments"),
        ({"session_input_callback": lambda _one: 1}, "session_input_callback = .*2 arguments"),
        ({"input_filter": 3}, "input_filter = 3"),
        ({"handoff_input_filter": "x"}, "handoff_input_filter"),
        ({"input_guardrails": [3]}, r"input_guardrails\[0\]"),
        ({"output_guardrails": None}, "output_guardrails"),
        ({"auto_previous_response_id": 1}, "auto_previous_response_id"),
    ],
)
def test_wrong_run_configurations_are_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidSetting, match=rf"RunConfig\..*{name}"):
        RunConfig(**options)


def test_a_run_configuration_is_accepted() -> None:
    config = RunConfig(model="gpt-5", model_settings=ModelSettings(temperature=1), input_filter=max)
    assert config.model == "gpt-5"
