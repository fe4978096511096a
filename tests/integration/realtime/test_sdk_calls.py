"""Tool calls: scenarios of the SDK's tests of sessions, which `docs/realtime_sdk.md` lists."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from capsule_tasks.errors import CallChanged, RealtimeRefused, ToolFailed
from capsule_tasks.realtime import RealtimeSettings
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import ToolContext
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.agents.handoffs import Handoff
from capsule_tasks.runs.engine.ports import UNCERTAIN
from capsule_tasks.testing.models import calls
from capsule_tasks.testing.realtime import Hold, writes
from tests.integration.realtime.scenarios import NotedTools, talk_to


@pytest.mark.parametrize(
    "arguments", ["{}", '{"nested": {"data": [1, 2, 3]}, "bool": true, "null": null}']
)
async def test_a_tool_is_called_and_its_output_answered(arguments: str) -> None:
    tools = NotedTools()
    made: list[Any] = [tools.make("one", "1"), tools.make("two", "2")]
    agent = Agent(name="A", tools=made, handoffs=[Agent(name="B")])
    async with talk_to(agent) as talk:
        await talk.call("two", arguments, "c1")
        start, end = await talk.event("tool_start"), await talk.event("tool_end")
        for event in (start, end):
            assert (event.tool, event.agent) == (made[1], agent)
            assert (event.call_id, event.arguments) == ("c1", arguments)
        assert end.output == "2"
        assert await talk.output("c1") == "2"
        await talk.hear("response.create")
    assert tools.calls == [("2", "c1", arguments)]


async def test_a_session_reads_on_while_a_tool_runs() -> None:
    tools = NotedTools()
    release = asyncio.Event()
    slow = tools.make("slow", before=release.wait)
    async with talk_to(Agent(name="A", tools=[slow, tools.make("fast")])) as talk:
        await talk.call("slow", call_id="c1")
        await talk.call("fast", call_id="c2")
        assert (await talk.event("tool_end")).call_id == "c2"
        release.set()
        assert (await talk.event("tool_end")).call_id == "c1"


@pytest.mark.parametrize("needs_approval", [False, True])
async def test_a_call_is_made_under_the_agent_of_its_event(needs_approval: bool) -> None:
    tools = NotedTools()
    begun, release = asyncio.Event(), asyncio.Event()

    async def held() -> None:
        begun.set()
        await release.wait()

    tool = tools.make("look", "first", before=held, needs_approval=needs_approval)
    first = Agent(name="First", tools=[tool])
    second = Agent(name="Second", tools=[tools.make("look", "second")])
    async with talk_to(first) as talk:
        await talk.call("look", call_id="c1")
        if needs_approval:
            assert (await talk.event("tool_approval_required")).agent is first
        else:
            await begun.wait()
        await talk.session.update_agent(second)
        if needs_approval:
            await talk.session.approve_tool_call("c1")
        release.set()
        end = await talk.event("tool_end")
        assert (end.agent, end.tool, end.output) == (first, tool, "first")
        assert talk.session.agent is second


async def test_a_call_is_one_of_the_agent_that_began_its_answer() -> None:
    tools, hold = NotedTools(), Hold()
    first, second = (Agent(name=name, tools=[tools.make("look", name)]) for name in ("1st", "2nd"))
    async with talk_to(first) as talk:
        talk.replies.append([writes("Let me see", hold, "."), calls("look", call_id="c1")])
        await talk.session.send_message("hi")
        await hold.reached()
        await talk.session.update_agent(second)
        hold.release()
        end = await talk.event("tool_end")
    assert (end.agent, end.output) == (first, "1st")


@pytest.mark.parametrize("moment", ["running", "waiting", "answered"])
async def test_a_repeated_call_is_made_once_and_a_changed_one_not_at_all(moment: str) -> None:
    tools = NotedTools()
    begun, release = asyncio.Event(), asyncio.Event()

    async def held() -> None:
        begun.set()
        await release.wait()

    look = tools.make("look", before=held, needs_approval=moment == "waiting")
    async with talk_to(Agent(name="A", tools=[look, tools.make("other")])) as talk:
        await talk.call("look", call_id="c1")
        if moment == "running":
            await begun.wait()
        elif moment == "waiting":
            await talk.event("tool_approval_required")
        else:
            release.set()
            await talk.event("tool_end")
        await talk.call("look", call_id="c1")
        await talk.call("look", '{"other": 1}', "c1")
        assert isinstance((await talk.event("error")).error, CallChanged)
        await talk.call("other", call_id="c1")
        assert isinstance((await talk.event("error")).error, CallChanged)
        if moment == "waiting":
            await talk.session.approve_tool_call("c1")
        release.set()
        if moment != "answered":
            await talk.event("tool_end")
        await talk.settled()
        assert talk.outputs == [("c1", "ok")]
        assert talk.count("tool_approval_required") == (moment == "waiting")
    assert tools.calls == [("ok", "c1", "{}")]


async def test_a_call_that_was_a_tools_is_not_made_as_a_handoff() -> None:
    tools = NotedTools()
    first = Agent(name="First", tools=[tools.make("transfer_to_target")])
    second = Agent(name="Second", handoffs=[Agent(name="Target")])
    async with talk_to(first) as talk:
        await talk.call("transfer_to_target", call_id="c1")
        await talk.event("tool_end")
        await talk.session.update_agent(second)
        await talk.call("transfer_to_target", call_id="c1")
        await talk.settled()
        assert talk.session.agent is second
        assert talk.outputs == [("c1", "ok")]


async def test_a_call_that_takes_too_long_is_uncertain() -> None:
    @function_tool(timeout_s=0.001, on_error="raise")
    async def slow() -> None:
        await asyncio.Event().wait()

    async with talk_to(Agent(name="A", tools=[slow])) as talk:
        await talk.call("slow", call_id="c1")
        assert (await talk.event("tool_end")).output == UNCERTAIN
        assert await talk.output("c1") == UNCERTAIN


@pytest.mark.parametrize(
    ("on_error", "output"),
    [
        ("tell", "The tool failed: ValueError: no such order"),
        (lambda context, error: f"{context.call_id} {error}", "c1 no such order"),
    ],
    ids=["tell", "function"],
)
async def test_an_error_of_a_tool_is_told(on_error: Any, output: str) -> None:
    @function_tool(on_error=on_error)
    async def look() -> None:
        raise ValueError("no such order")

    async with talk_to(Agent(name="A", tools=[look])) as talk:
        await talk.call("look", call_id="c1")
        await talk.event("tool_start")
        assert (await talk.event("tool_end")).output == output
        assert await talk.output("c1") == output


@pytest.mark.parametrize("needs_approval", [False, True])
async def test_an_error_that_is_not_for_the_model_ends_the_session(needs_approval: bool) -> None:
    made: list[str] = []

    @function_tool(on_error="raise", needs_approval=needs_approval)
    async def look(context: ToolContext) -> None:
        made.append(context.call_id)
        raise ValueError("no such order")

    async with talk_to(Agent(name="A", tools=[look])) as talk:
        await talk.call("look", call_id="c1")
        if needs_approval:
            await talk.event("tool_approval_required")
            await talk.session.approve_tool_call("c1")
        await talk.event("tool_start")
        with pytest.raises(ToolFailed, match="'look' failed: ValueError: no such order") as failed:
            await talk.event("tool_end")
        assert isinstance(failed.value.__cause__, ValueError)
    assert made == ["c1"]
    assert talk.outputs == []
    assert talk.session.history[-1]["output"] == "The tool failed: ValueError: no such order"


async def test_an_unknown_tool_is_told() -> None:
    tools = NotedTools()
    async with talk_to(Agent(name="A", tools=[tools.make("look")])) as talk:
        await talk.call("shoot", call_id="c1")
        told = "There is no tool 'shoot'. The tools are: look."
        assert "'shoot'" in str((await talk.event("error")).error)
        assert await talk.output("c1") == told
        await talk.hear("response.create")
        await talk.hear("response.create")  # the model may try again
    assert tools.calls == []


async def test_a_call_without_an_id_is_an_error() -> None:
    tools = NotedTools()
    async with talk_to(Agent(name="A", tools=[tools.make("look")])) as talk:
        await talk.call("look", call_id="")
        assert "''" in str((await talk.event("error")).error)
    assert (tools.calls, talk.outputs) == ([], [])


async def test_a_handoff_makes_another_agent_the_current_one() -> None:
    second = Agent(name="Second", instructions="Second.")
    first = Agent(name="First", instructions="First.", handoffs=[second])
    settings = RealtimeSettings(voice="verse")
    async with talk_to(first, settings=settings) as talk:
        await talk.hear("session.update")
        hold = Hold()
        talk.replies.append([calls("transfer_to_second"), hold])
        await talk.session.send_message("hi")
        handoff = await talk.event("handoff")
        assert (handoff.from_agent, handoff.to_agent) == (first, second)
        update = await talk.hear("session.update")
        assert update["session"]["instructions"] == "Second."
        assert update["session"]["audio"]["output"]["voice"] == "verse"
        assert talk.session.agent is second
        hold.release()
        start, end = await talk.event("agent_start"), await talk.event("agent_end")
        # The answer was begun by the first agent; the handoff is about the next one.
        assert (start.agent, end.agent) == (first, first)
        assert start.response_id == end.response_id
        assert (await talk.event("agent_start")).agent is second
        assert len(talk.outputs) == talk.count("handoff") == 1


async def test_a_handoff_that_is_refused_is_told_and_not_repeated() -> None:
    heard: list[str] = []
    second = Agent(name="Second")
    handoff = Handoff(second, on_handoff=lambda _context: heard.append("c1"))
    first = Agent(name="First", handoffs=[handoff])
    async with talk_to(first) as talk:
        talk.server.refuse("session.update", "no such voice")
        await talk.call("transfer_to_second", call_id="c1")
        assert "no such voice" in await talk.output("c1")
        assert talk.session.agent is first
        await talk.call("transfer_to_second", call_id="c1")
        await talk.settled()
        assert len(talk.outputs) == 1
        assert talk.count("handoff") == 0
        talk.server.refuse("session.update", "no such voice")
        with pytest.raises(RealtimeRefused, match="no such voice"):
            await talk.session.update_agent(second)
        assert talk.session.agent is first
    assert heard == ["c1"]


async def test_tools_of_a_session_share_its_context() -> None:
    seen: list[ToolContext] = []

    @function_tool
    async def look(context: ToolContext) -> str:
        seen.append(context)
        return "ok"

    context = {"user": 7}
    async with talk_to(Agent(name="A", tools=[look]), context=context) as talk:
        for call_id in ("c1", "custom_call_id_12345"):
            await talk.call("look", call_id=call_id)
            await talk.event("tool_end")
    assert [each.context is context for each in seen] == [True, True]
    assert [each.call_id for each in seen] == ["c1", "custom_call_id_12345"]
    assert {each.run_id for each in seen} == {seen[0].run_id}
