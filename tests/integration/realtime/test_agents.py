"""Agents of a session: their tool choice, and what becomes of one that another one replaces."""

from __future__ import annotations

import asyncio

import pytest

from capsule_tasks import Runner
from capsule_tasks.errors import CallbackFailed, SessionStateError
from capsule_tasks.realtime import RealtimeSettings
from capsule_tasks.realtime.call_table import ABANDONED
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import RunContext
from capsule_tasks.runs.models.model import ModelSettings
from capsule_tasks.runs.state import RunState
from capsule_tasks.testing.models import ScriptedModel, calls
from tests.integration.realtime.scenarios import NotedTools, talk_to

# --- the choice of tools -------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", "look"])
@pytest.mark.parametrize("where", ["agent", "session"])
async def test_a_tool_choice_holds_until_a_tool_was_used_and_again_for_the_next_input(
    choice: str, where: str
) -> None:
    of_agent = ModelSettings(tool_choice=choice if where == "agent" else None)
    of_session = RealtimeSettings(tool_choice=choice if where == "session" else None)
    agent = Agent(name="A", tools=[NotedTools().make("look")], model_settings=of_agent)
    async with talk_to(agent, settings=of_session) as talk:
        for call_id in ("c1", "c2"):
            await talk.call("look", call_id=call_id)
            assert await talk.choice() is None, "the user has said something"
            assert await talk.choice() == "auto", "the model has the output"
            await talk.model_event("response_ended")
            await talk.model_event("response_ended")


@pytest.mark.parametrize(
    ("choice", "resets"), [("required", False), ("auto", True), ("none", True), (None, True)]
)
async def test_a_tool_choice_that_is_not_reset(choice: str | None, resets: bool) -> None:
    settings = ModelSettings(tool_choice=choice)
    tools = [NotedTools().make("look")]
    agent = Agent(name="A", tools=tools, model_settings=settings, reset_tool_choice=resets)
    async with talk_to(agent) as talk:
        await talk.call("look")
        assert [await talk.choice(), await talk.choice()] == [None, None]


async def test_an_agent_that_takes_over_begins_with_its_own_tool_choice() -> None:
    forced = ModelSettings(tool_choice="required")
    second = Agent(name="Second", tools=[NotedTools().make("look")], model_settings=forced)
    first = Agent(name="First", handoffs=[second], model_settings=forced)
    async with talk_to(first) as talk:
        await talk.call("transfer_to_second")
        assert [await talk.choice(), await talk.choice()] == [None, None]
        await talk.call("look", call_id="c2")
        assert [await talk.choice(), await talk.choice()] == [None, "auto"]


# --- changes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_a_task", [False, True])
async def test_a_change_of_the_agent_cannot_ask_for_another_one(in_a_task: bool) -> None:
    first, third = Agent(name="First"), Agent(name="Third")

    async def instructions(_context: RunContext, _agent: Agent) -> str:
        update = talk.session.update_agent(third)
        await (asyncio.create_task(update) if in_a_task else update)
        return "Help."

    async with talk_to(first) as talk:
        with pytest.raises(CallbackFailed, match="while the session is changing") as raised:
            await talk.session.update_agent(Agent(name="Second", instructions=instructions))
        assert isinstance(raised.value.__cause__, SessionStateError)
        assert talk.session.agent is first
        await talk.session.update_agent(third)
        assert talk.session.agent is third


async def test_a_decision_about_a_waiting_call_is_not_one_about_a_namesake_of_its_agent() -> None:
    tools = NotedTools()
    first = Agent(name="A", tools=[tools.make("pay", "first", needs_approval=True)])
    second = Agent(name="A", tools=[tools.make("pay", "second", needs_approval=True)])
    async with talk_to(first) as talk:
        await talk.call("pay", call_id="c1")
        await talk.event("tool_approval_required")
        await talk.session.update_agent(second)
        await talk.call("pay", call_id="c2")
        await talk.event("tool_approval_required")
        await talk.session.approve_tool_call("c1", always=True)
        assert await talk.output("c1") == "first"
        await talk.call("pay", call_id="c1")  # the model repeats it, as the namesake
        await talk.call("pay", call_id="c3")
        assert (await talk.event("tool_approval_required")).call_id == "c3"
    assert tools.calls == [("first", "c1", "{}")]


async def test_a_decision_within_an_agent_used_as_a_tool_is_not_one_about_its_namesakes() -> None:
    tools = NotedTools()

    def desk(output: str) -> Agent:
        pay = tools.make("pay", output, needs_approval=True)
        model = ScriptedModel([calls("pay", {}, f"pay_{output}"), "done"])
        inner = Agent(name="Inner", model=model, tools=[pay])
        return Agent(name="A", tools=[inner.as_tool()])

    async with talk_to(desk("first")) as talk:
        await talk.call("inner", '{"input": "pay"}', "c1")
        await talk.event("tool_approval_required")
        await talk.session.approve_tool_call("pay_first", always=True)
        assert await talk.output("c1") == "done"
        await talk.session.update_agent(desk("second"))
        await talk.call("inner", '{"input": "pay"}', "c2")
        assert (await talk.event("tool_approval_required")).call_id == "pay_second"
    assert tools.calls == [("first", "pay_first", "{}")]


async def test_a_waiting_call_of_an_earlier_graph_ends_with_the_session() -> None:
    tools = NotedTools()
    pay = tools.make("pay", needs_approval=True)
    model = ScriptedModel(["Goodbye."])
    second = Agent(name="A", tools=[pay], model=model)
    async with talk_to(Agent(name="A", tools=[pay])) as talk:
        await talk.call("pay", call_id="c1")
        await talk.event("tool_approval_required")
        await talk.session.update_agent(second)
        await talk.call("pay", call_id="c2")
        await talk.event("tool_approval_required")
    session = talk.session
    assert [call.call_id for call in session.abandoned] == ["c1"]
    outputs = [item for item in session.history if item["type"] == "function_call_output"]
    assert [(item["call_id"], item["output"]) for item in outputs] == [("c1", ABANDONED)]
    state = RunState.from_string(session.state.to_string())
    assert [call.call_id for call in state.calls] == ["c2"]
    result = await Runner.run(second, state.approve("c2"))
    assert result.final_output == "Goodbye."
    assert [call[1] for call in tools.calls] == ["c2"]
