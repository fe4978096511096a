"""Outputs of tools: scenarios of the SDK's tests, which `docs/realtime_sdk.md` lists."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pydantic
import pytest

from capsule_tasks.errors import CallChanged, GuardrailFailed, GuardrailTripped
from capsule_tasks.realtime import OpenAIRealtime
from capsule_tasks.realtime.model import Command, SendToolOutput
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import ToolContext
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.agents.guardrails import ToolGuardrail, ToolVerdict
from tests.integration.realtime.scenarios import NotedTools, talk_to


class OutputsFail(OpenAIRealtime):
    """A model that cannot send outputs for some time."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts: list[str] = []
        self.is_broken = True

    async def send_event(self, command: Command) -> None:
        self._attempt(command)
        await super().send_event(command)

    async def send_event_if(self, command: Command, condition: Callable[[], bool]) -> bool:
        self._attempt(command)
        return await super().send_event_if(command, condition)

    def _attempt(self, command: Command) -> None:
        if isinstance(command, SendToolOutput):
            self.attempts.append(command.output)
            if self.is_broken:
                raise RuntimeError("cannot send")


# --- guardrails ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rejects", [False, True])
async def test_guardrails_check_the_output_in_order_until_one_rejects_it(rejects: bool) -> None:
    seen: list[tuple[str, str, str, Any]] = []

    def guardrail(name: str, verdict: ToolVerdict) -> ToolGuardrail:
        def check(context: ToolContext, output: Any) -> ToolVerdict:
            seen.append((name, context.call_id, context.agent.name, output))
            return verdict

        return ToolGuardrail(check, name)

    second = ToolVerdict("reject", "another output") if rejects else ToolVerdict()
    guardrails = [
        guardrail("first", ToolVerdict()),
        guardrail("second", second),
        guardrail("third", ToolVerdict()),
    ]
    tools = NotedTools()
    look = tools.make("look", {"value": 1}, output_guardrails=guardrails)
    async with talk_to(Agent(name="A", tools=[look])) as talk:
        await talk.call("look", call_id="c1")
        told = "another output" if rejects else '{"value":1}'
        assert (await talk.event("tool_end")).output == told
        assert await talk.output("c1") == told
    names = ["first", "second"] if rejects else ["first", "second", "third"]
    assert seen == [(name, "c1", "A", '{"value":1}') for name in names]


@pytest.mark.parametrize(
    ("verdict", "error"), [("raise", GuardrailTripped), ("error", GuardrailFailed)]
)
async def test_an_output_that_no_guardrail_lets_pass_ends_the_session(
    verdict: str, error: type[Exception]
) -> None:
    def check(_context: ToolContext, _output: Any) -> ToolVerdict:
        if verdict == "error":
            raise ValueError("unavailable")
        return ToolVerdict("raise")

    tools = NotedTools()
    look = tools.make("look", "secret", output_guardrails=[ToolGuardrail(check, "check")])
    async with talk_to(Agent(name="A", tools=[look])) as talk:
        await talk.call("look", call_id="c1")
        with pytest.raises(error, match="check"):
            await talk.event("tool_end")
    assert (len(tools.calls), talk.outputs) == (1, [])
    assert "secret" not in str(talk.session.history)


async def test_the_output_of_an_approved_call_is_checked_for_its_agent() -> None:
    begun, release = asyncio.Event(), asyncio.Event()
    agents: list[Agent] = []

    async def check(context: ToolContext, _output: Any) -> ToolVerdict:
        agents.append(context.agent)
        begun.set()
        await release.wait()
        return ToolVerdict("reject", "another output")

    tools = NotedTools()
    guardrails = [ToolGuardrail(check, "check")]
    look = tools.make("look", needs_approval=True, output_guardrails=guardrails)
    agent = Agent(name="A", tools=[look])
    async with talk_to(agent) as talk:
        await talk.call("look", call_id="c1")
        await talk.event("tool_approval_required")
        assert agents == []
        await talk.session.approve_tool_call("c1")
        await begun.wait()
        await talk.session.update_agent(Agent(name="B"))
        assert talk.outputs == []
        release.set()
        end = await talk.event("tool_end")
        assert (end.agent, end.output) == (agent, "another output")
        assert await talk.output("c1") == "another output"
    assert agents == [agent]


@pytest.mark.parametrize("resists", [False, True])
async def test_nothing_is_sent_of_an_output_that_is_checked_while_the_session_closes(
    resists: bool,
) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def check(_context: ToolContext, _output: Any) -> ToolVerdict:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            if not resists:
                raise
        return ToolVerdict()

    tools = NotedTools()
    look = tools.make("look", output_guardrails=[ToolGuardrail(check, "check")])
    async with talk_to(Agent(name="A", tools=[look])) as talk:
        await talk.call("look", call_id="c1")
        await begun.wait()
        await talk.session.close()
        assert cancelled.is_set()
    assert len(tools.calls) == 1
    assert talk.outputs == []
    assert talk.count("tool_end") == 0


# --- sending -------------------------------------------------------------------------------------


@pytest.mark.parametrize("always", [False, True])
async def test_an_output_that_could_not_be_sent_is_kept_for_its_call_alone(always: bool) -> None:
    checked: list[Any] = []

    def check(_context: ToolContext, output: Any) -> ToolVerdict:
        checked.append(output)
        return ToolVerdict("reject", "another output")

    tools = NotedTools()
    guardrails = [ToolGuardrail(check, "check")]
    look = tools.make("look", needs_approval=True, output_guardrails=guardrails)
    agent = Agent(name="A", tools=[look, tools.make("other")])
    model = OutputsFail()
    async with talk_to(agent, model=model) as talk:
        await talk.call("look", call_id="c1")
        await talk.event("tool_approval_required")
        await talk.session.approve_tool_call("c1", always=always)
        error = (await talk.event("error")).error
        assert "cannot send" in f"{error} {error.__cause__}"
        assert talk.count("tool_end") == 0
        for name, arguments in (("look", '{"other": 1}'), ("other", "{}")):
            await talk.call(name, arguments, "c1")
            assert isinstance((await talk.event("error")).error, CallChanged)
        model.is_broken = False
        await talk.call("look", call_id="c1")
        assert (await talk.event("tool_end")).output == "another output"
        await talk.settled()
        assert talk.outputs == [("c1", "another output")]
        assert talk.count("error") == 3
    assert set(model.attempts) == {"another output"}
    assert (tools.calls, checked) == ([("ok", "c1", "{}")], ["ok"])


class OutputsWait(OpenAIRealtime):
    """A model whose outputs wait for the test before they are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.release = asyncio.Event(), asyncio.Event()

    async def send_event_if(self, command: Command, condition: Callable[[], bool]) -> bool:
        if isinstance(command, SendToolOutput):
            self.begun.set()
            await self.release.wait()
        return await super().send_event_if(command, condition)

    async def send_event(self, command: Command) -> None:
        if isinstance(command, SendToolOutput):
            self.begun.set()
            await self.release.wait()
        await super().send_event(command)


@pytest.mark.parametrize("rejected", [False, True])
async def test_a_call_that_is_repeated_while_its_output_is_sent_has_one_output(
    rejected: bool,
) -> None:
    tools = NotedTools()
    model = OutputsWait()
    agent = Agent(name="A", tools=[tools.make("look", needs_approval=rejected)])
    async with talk_to(agent, model=model) as talk:
        await talk.call("look", call_id="c1")
        if rejected:
            await talk.event("tool_approval_required")
            await talk.session.reject_tool_call("c1", message="no")
        await model.begun.wait()
        await talk.call("look", call_id="c1")
        model.release.set()
        await talk.event("tool_end")
        await talk.settled()
        assert talk.outputs == [("c1", "no" if rejected else "ok")]
        assert talk.count("tool_end") == 1


# --- what a tool returns -------------------------------------------------------------------------


@dataclasses.dataclass
class Score:
    label: str
    values: list[int]


class Page(pydantic.BaseModel):
    name: str
    score: int


class Broken(pydantic.BaseModel):
    value: int

    def model_dump(self, *_args: Any, **_options: Any) -> dict[str, Any]:
        raise ValueError("cannot dump")

    model_dump_json = model_dump  # type: ignore[assignment]


@dataclasses.dataclass
class Locked:
    lock: Any


@pytest.mark.parametrize(
    ("value", "output"),
    [
        ({"result": "data", "count": 42}, '{"result":"data","count":42}'),
        (Page(name="demo", score=7), '{"name":"demo","score":7}'),
        (Score("demo", [1, 2]), '{"label":"demo","values":[1,2]}'),
        (["hello", 1, True, None], '["hello",1,true,null]'),
        (None, "null"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_what_is_no_text_is_sent_as_json(value: Any, output: str) -> None:
    tools = NotedTools()
    async with talk_to(Agent(name="A", tools=[tools.make("look", value)])) as talk:
        await talk.call("look", call_id="c1")
        assert (await talk.event("tool_end")).output == output
        assert await talk.output("c1") == output


@pytest.mark.parametrize(
    "value",
    [object(), Locked(threading.Lock()), Broken(value=1)],
    ids=lambda value: type(value).__name__,
)
async def test_what_is_not_json_is_an_error_of_the_tool(value: Any) -> None:
    made = 0

    @function_tool
    async def look() -> Any:
        nonlocal made
        made += 1
        return value

    async with talk_to(Agent(name="A", tools=[look])) as talk:
        for _ in range(2):
            await talk.call("look", call_id="c1")
        assert (await talk.output("c1")).startswith("The tool failed: OutputNotStorable")
        await talk.settled()
        assert len(talk.outputs) == 1
    assert made == 1
