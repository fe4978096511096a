"""Settings and agents: scenarios of the SDK's tests, which `docs/realtime_sdk.md` lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from capsule_tasks.errors import CallbackFailed, InvalidSetting
from capsule_tasks.realtime import (
    OpenAIRealtime,
    RealtimeConfig,
    RealtimeModelConfig,
    RealtimeRunner,
    RealtimeSettings,
)
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import RunContext
from capsule_tasks.runs.agents.handoffs import Handoff, without_tools
from capsule_tasks.runs.agents.tools import HostedTool
from capsule_tasks.testing.realtime import RealtimeServer
from tests.integration.realtime.scenarios import NotedTools, talk_to


async def told(talk: Any) -> dict[str, Any]:
    """The next settings that the server is told."""
    session: dict[str, Any] = (await talk.hear("session.update"))["session"]
    return session


async def test_the_server_is_told_what_the_agent_is_and_can_do() -> None:
    async def is_enabled(_context: RunContext, _agent: Agent) -> bool:
        return True

    async def instructions(context: RunContext, agent: Agent) -> str:
        return f"{agent.name} helps {context.context}."

    tools = NotedTools()
    agent = Agent(
        name="Desk",
        instructions=instructions,
        tools=[tools.make("look"), tools.make("hidden", is_enabled=False)],
        handoffs=[
            Agent(name="Refunds"),
            Handoff(Agent(name="Sales"), is_enabled=is_enabled),
            Handoff(Agent(name="Nobody"), is_enabled=lambda _context, _agent: False),
        ],
    )
    async with talk_to(agent, context="Ann") as talk:
        session = await told(talk)
        assert session["instructions"] == "Desk helps Ann."
        names = [tool["name"] for tool in session["tools"]]
        assert names == ["look", "transfer_to_refunds", "transfer_to_sales"]


async def test_settings_of_the_run_come_before_those_of_the_config_and_of_the_agent() -> None:
    config = RealtimeConfig(settings=RealtimeSettings(voice="marin", modalities=("audio",)))
    settings = RealtimeSettings(voice="verse", tool_choice="auto")
    first = Agent(name="First", instructions="First.")
    async with talk_to(first, config=config, settings=settings) as talk:
        for instructions in ("First.", "Second."):
            session = await told(talk)
            assert session["instructions"] == instructions
            assert session["audio"]["output"]["voice"] == "verse"
            assert session["output_modalities"] == ["audio"]
            assert session["tool_choice"] == "auto"
            if instructions == "First.":  # they hold for the agents that come later, too
                await talk.session.update_agent(Agent(name="Second", instructions="Second."))


@pytest.mark.parametrize(
    ("tracing", "sent"),
    [
        ("auto", "auto"),
        ({"workflow_name": "w", "group_id": "g", "metadata": {"a": [1]}},) * 2,
        ("off", None),
    ],
    ids=["auto", "given", "off"],
)
async def test_tracing_is_a_setting_of_the_server(tracing: Any, sent: Any) -> None:
    async with talk_to(Agent(name="A"), settings=RealtimeSettings(tracing=tracing)) as talk:
        session = await told(talk)
        assert session["tracing"] == sent


async def test_update_agent_tells_the_server_and_those_who_iterate() -> None:
    tools = NotedTools()
    first = Agent(name="First", instructions="First.")
    second = Agent(name="Second", instructions="Second.", tools=[tools.make("look")])
    async with talk_to(first) as talk:
        await told(talk)
        await talk.session.update_agent(second)
        assert talk.session.agent is second
        session = await told(talk)
        assert session["instructions"] == "Second."
        assert [tool["name"] for tool in session["tools"]] == ["look"]
        handoff = await talk.event("handoff")
        assert (handoff.from_agent, handoff.to_agent) == (first, second)
        await talk.call("look", call_id="c1")
        assert await talk.output("c1") == "ok"


def ambiguous() -> Agent:
    """An agent with a tool and a handoff of one name."""
    tool = NotedTools().make("transfer_to_billing")
    return Agent(name="Ambiguous", tools=[tool], handoffs=[Agent(name="Billing")])


async def test_a_tool_and_a_handoff_of_one_name_are_refused_before_a_connection() -> None:
    with pytest.raises(InvalidSetting, match="transfer_to_billing"):
        async with talk_to(ambiguous()):
            pytest.fail("it was entered")


@pytest.mark.parametrize("way", ["handoff", "update_agent"])
async def test_an_agent_that_is_refused_does_not_become_the_current_one(way: str) -> None:
    to = ambiguous()
    first = Agent(name="First", handoffs=[to])
    async with talk_to(first) as talk:
        await told(talk)
        if way == "update_agent":
            with pytest.raises(InvalidSetting, match="transfer_to_billing"):
                await talk.session.update_agent(to)
        else:
            await talk.call("transfer_to_ambiguous", call_id="c1")
            assert "transfer_to_billing" in await talk.output("c1")
        assert talk.session.agent is first
        await talk.settled()
        assert talk.server.count("session.update") == 1
        assert talk.count("handoff") == 0


REFUSED: dict[str, Callable[[], dict[str, Any]]] = {
    "hosted": lambda: {"tools": [HostedTool({"type": "web_search"})]},
    "namespace": lambda: {"tools": [NotedTools().make("look", namespace="crm")]},
    "output_type": lambda: {"output_type": dict[str, int]},
    "input_filter": lambda: {"handoffs": [Handoff(Agent(name="B"), input_filter=without_tools)]},
}


@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED.keys())
async def test_what_a_realtime_model_cannot_honour_is_refused(
    options: Callable[[], dict[str, Any]],
) -> None:
    agent = Agent(name="Desk", **options())
    with pytest.raises(InvalidSetting, match=r"Desk|crm"):
        async with talk_to(agent):
            pytest.fail("it was entered")
    first = Agent(name="First")
    async with talk_to(first) as talk:
        with pytest.raises(InvalidSetting, match=r"Desk|crm"):
            await talk.session.update_agent(agent)
        assert talk.session.agent is first
        await talk.settled()
        assert talk.server.count("session.update") == 1


async def test_what_is_disabled_takes_no_name() -> None:
    tools = NotedTools()
    billing = Agent(name="Billing")
    for enabled in ("tool", "handoff"):
        tool = tools.make("transfer_to_billing", is_enabled=enabled == "tool")
        handoff = Handoff(billing, is_enabled=enabled == "handoff")
        async with talk_to(Agent(name="A", tools=[tool], handoffs=[handoff])) as talk:
            assert len((await told(talk))["tools"]) == 1
            await talk.call("transfer_to_billing", call_id="c1")
            await talk.output("c1")
            assert (talk.session.agent is billing) == (enabled == "handoff")
    assert len(tools.calls) == 1


async def test_functions_in_is_enabled_are_asked_once_for_a_transition() -> None:
    asked: list[tuple[Any, Agent]] = []

    def is_enabled(context: RunContext, agent: Agent) -> bool:
        asked.append((context.context, agent))
        return len(asked) == 1

    tools = NotedTools()
    look = tools.make("look", is_enabled=is_enabled)
    agent = Agent(name="A", tools=[look])
    async with talk_to(agent, context="Ann") as talk:
        assert len((await told(talk))["tools"]) == 1
        await talk.call("look", call_id="c1")
        assert await talk.output("c1") == "ok"
        assert asked == [("Ann", agent)]
        await talk.session.update_agent(agent)
        assert (await told(talk))["tools"] == []
        await talk.call("look", call_id="c2")
        assert "no tool 'look'" in await talk.output("c2")
    assert len(asked) == 2


async def test_an_error_in_is_enabled_is_raised_and_nothing_is_left() -> None:
    def is_enabled(_context: RunContext, _agent: Agent) -> bool:
        raise RuntimeError("no flags")

    look = NotedTools().make("look", is_enabled=is_enabled)
    agent = Agent(name="A", tools=[look])
    with pytest.raises(CallbackFailed, match="no flags"):
        async with talk_to(agent):
            pytest.fail("it was entered")
    first = Agent(name="First")
    async with talk_to(first) as talk:
        with pytest.raises(CallbackFailed, match="no flags"):
            await talk.session.update_agent(agent)
        assert talk.session.agent is first


async def test_a_runner_makes_sessions_and_does_nothing_else() -> None:
    class Falsy(OpenAIRealtime):
        def __bool__(self) -> bool:
            return False

    asked: list[Any] = []

    def instructions(context: RunContext, _agent: Agent) -> str:
        asked.append(context.context)
        return "Help."

    async with RealtimeServer() as server:
        config = RealtimeModelConfig(url=server.url, api_key="key")
        agent = Agent(name="A", instructions=instructions)
        runner = RealtimeRunner(agent)
        sessions = [runner.run(context=user, model_config=config) for user in ("Ann", "Bob")]
        assert (asked, server.handshakes) == ([], 0)
        assert (sessions[0].agent, sessions[0].history) == (agent, [])
        async with sessions[0], sessions[1]:
            assert asked == ["Ann", "Bob"]
            assert sessions[0].model is not sessions[1].model
            assert isinstance(sessions[0].model, OpenAIRealtime)
        model = Falsy()
        async with RealtimeRunner(agent, model).run(model_config=config) as session:
            assert session.model is model
