"""Approvals: scenarios of the SDK's tests of sessions, which `docs/realtime_sdk.md` lists."""

from __future__ import annotations

import asyncio

import pytest

from capsule_tasks.errors import UnknownCall
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import ToolContext
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.agents.guardrails import ToolGuardrail, ToolVerdict
from capsule_tasks.runs.approvals import DEFAULT_REJECTION
from tests.integration.realtime.scenarios import NotedTools, talk_to


class Checks:
    """A guardrail before calls that notes the ids of the calls it has checked."""

    def __init__(self, *, before_approval: bool = False, message: str | None = None) -> None:
        self.calls: list[str] = []
        self._message = message
        self.guardrail = ToolGuardrail(self._check, "checks", before_approval)

    def _check(self, context: ToolContext) -> ToolVerdict:
        self.calls.append(context.call_id)
        return ToolVerdict("reject" if self._message else "allow", self._message)


async def test_a_call_that_needs_an_approval_is_made_after_it() -> None:
    tools = NotedTools()
    agent = Agent(name="A", tools=[tools.make("pay", needs_approval=True)])
    async with talk_to(agent) as talk:
        await talk.call("pay", '{"euros": 5}', "c1")
        asked = await talk.event("tool_approval_required")
        assert (asked.agent, asked.tool, asked.call_id) == (agent, "pay", "c1")
        assert asked.arguments == '{"euros": 5}'
        assert (tools.calls, talk.outputs, talk.count("tool_start")) == ([], [], 0)
        await talk.session.approve_tool_call("c1")
        await talk.event("tool_start")
        await talk.event("tool_end")
        with pytest.raises(UnknownCall, match="c1"):
            await talk.session.reject_tool_call("c1")
        assert await talk.output("c1") == "ok"
    assert tools.calls == [("ok", "c1", '{"euros": 5}')]


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        '{"euros": 5',
        "null",
        "[]",
        *(f'{{"euros": {n}}}' for n in ("NaN", "Infinity", "-Infinity")),
    ],
)
async def test_wrong_arguments_are_told_and_nobody_is_asked(arguments: str) -> None:
    asked: list[str] = []

    def needs_approval(context: ToolContext) -> bool:
        asked.append(context.call_id)
        return True

    @function_tool(needs_approval=needs_approval)
    async def pay(euros: float) -> str:
        asked.append("made")
        return f"paid {euros}"

    async with talk_to(Agent(name="A", tools=[pay])) as talk:
        await talk.call("pay", arguments, "c1")
        assert "pay" in await talk.output("c1")
        assert talk.count("tool_approval_required") == 0
    assert "made" not in asked


@pytest.mark.parametrize("needed", [False, True])
async def test_a_function_decides_whether_people_are_asked(needed: bool) -> None:
    asked: list[tuple[str, str]] = []

    async def needs_approval(context: ToolContext) -> bool:
        asked.append((context.call_id, context.arguments))
        return needed

    tools = NotedTools()
    pay = tools.make("pay", needs_approval=needs_approval)
    async with talk_to(Agent(name="A", tools=[pay])) as talk:
        await talk.call("pay", '{"euros": 5}', "c1")
        if needed:
            await talk.event("tool_approval_required")
            await talk.session.approve_tool_call("c1")
        await talk.event("tool_end")
    assert asked == [("c1", '{"euros": 5}')]
    assert tools.calls == [("ok", "c1", '{"euros": 5}')]


@pytest.mark.parametrize("before_approval", [False, True])
async def test_guardrails_run_before_people_are_asked_if_they_say_so_and_after_it_always(
    before_approval: bool,
) -> None:
    tools = NotedTools()
    checks = Checks(before_approval=before_approval)
    pay = tools.make("pay", needs_approval=True, input_guardrails=[checks.guardrail])
    async with talk_to(Agent(name="A", tools=[pay])) as talk:
        await talk.call("pay", call_id="c1")
        await talk.event("tool_approval_required")
        assert (len(checks.calls), tools.calls) == (before_approval, [])
        await talk.session.approve_tool_call("c1")
        await talk.event("tool_end")
    assert len(checks.calls) == 1 + before_approval
    assert tools.calls == [("ok", "c1", "{}")]


@pytest.mark.parametrize("needs_approval", [False, True])
async def test_a_guardrail_rejects_a_call_before_it_is_made_or_asked_about(
    needs_approval: bool,
) -> None:
    tools = NotedTools()
    checks = Checks(before_approval=needs_approval, message="not today")
    pay = tools.make("pay", needs_approval=needs_approval, input_guardrails=[checks.guardrail])
    async with talk_to(Agent(name="A", tools=[pay])) as talk:
        await talk.call("pay", call_id="c1")
        assert await talk.output("c1") == "not today"
        await talk.hear("response.create")
        assert talk.count("tool_approval_required") == 0
    assert (tools.calls, checks.calls) == ([], ["c1"])


@pytest.mark.parametrize("message", [None, "too much"])
async def test_a_rejection_is_told_once(message: str | None) -> None:
    tools = NotedTools()
    told = message or DEFAULT_REJECTION
    async with talk_to(Agent(name="A", tools=[tools.make("pay", needs_approval=True)])) as talk:
        await talk.call("pay", call_id="c1")
        await talk.event("tool_approval_required")
        await talk.session.reject_tool_call("c1", message=message)
        await talk.call("pay", call_id="c1")
        assert (await talk.event("tool_end")).output == told
        assert await talk.output("c1") == told
        await talk.hear("response.create")
        await talk.settled()
        assert talk.outputs == [("c1", told)]
    assert tools.calls == []


@pytest.mark.parametrize("name", ["First", "Second"], ids=["one name", "two names"])
@pytest.mark.parametrize("approved", [True, False], ids=["approved", "rejected"])
async def test_a_standing_decision_stays_with_its_agent(approved: bool, name: str) -> None:
    tools = NotedTools()
    first = Agent(name="First", tools=[tools.make("pay", "first", needs_approval=True)])
    second = Agent(name=name, tools=[tools.make("pay", "second", needs_approval=True)])
    first.handoffs.append(second)  # agents of one name are told apart in one graph
    async with talk_to(first) as talk:
        await talk.call("pay", call_id="c1")
        await talk.event("tool_approval_required")
        if approved:
            await talk.session.approve_tool_call("c1", always=True)
        else:
            await talk.session.reject_tool_call("c1", always=True, message="not by first")
        await talk.session.update_agent(second)
        await talk.call("pay", call_id="c2")
        await talk.event("tool_approval_required")
        await talk.session.reject_tool_call("c2", always=True, message="not by second")
        await talk.session.update_agent(first)
        await talk.call("pay", call_id="c3")
        by_first = "first" if approved else "not by first"
        assert await talk.output("c3") == by_first
        assert sorted(talk.outputs) == [
            ("c1", by_first),
            ("c2", "not by second"),
            ("c3", by_first),
        ]
        assert talk.count("tool_approval_required") == 2


async def test_a_standing_rejection_is_told_to_later_calls_that_need_an_approval() -> None:
    asked: list[str] = []

    def needs_approval(context: ToolContext) -> bool:
        asked.append(context.call_id)
        return True

    tools = NotedTools()
    pay = tools.make("pay", needs_approval=needs_approval)
    async with talk_to(Agent(name="A", tools=[pay])) as talk:
        await talk.call("pay", call_id="c1")
        await talk.event("tool_approval_required")
        await talk.session.reject_tool_call("c1", always=True)
        await talk.call("pay", call_id="c2")
        assert await talk.output("c2") == DEFAULT_REJECTION
        assert talk.count("tool_approval_required") == 1
    assert (asked, tools.calls) == (["c1", "c2"], [])


async def test_a_standing_decision_does_not_hold_for_an_agent_of_the_same_name_from_elsewhere() -> (
    None
):
    tools = NotedTools()
    first, second, third = (
        Agent(name="A", tools=[tools.make("pay", output, needs_approval=True)])
        for output in ("first", "second", "third")
    )
    async with talk_to(first) as talk:
        await talk.call("pay", call_id="c1")
        await talk.event("tool_approval_required")
        await talk.session.approve_tool_call("c1", always=True)
        for call_id, agent in (("c2", second), ("c3", third)):
            await talk.session.update_agent(agent)
            await talk.call("pay", call_id=call_id)
            assert (await talk.event("tool_approval_required")).call_id == call_id
            await talk.session.reject_tool_call(call_id, always=True, message="no")
            assert await talk.output(call_id) == "no"
        await talk.session.update_agent(first)
        await talk.call("pay", call_id="c4")
        assert await talk.output("c4") == "first"
    assert [call[:2] for call in tools.calls] == [("first", "c1"), ("first", "c4")]


async def test_a_call_that_needs_no_approval_is_made_after_a_standing_rejection() -> None:
    tools = NotedTools()
    pay = tools.make("pay", needs_approval=lambda context: context.call_id == "c1")
    async with talk_to(Agent(name="A", tools=[pay])) as talk:
        await talk.call("pay", call_id="c1")
        await talk.event("tool_approval_required")
        await talk.session.reject_tool_call("c1", always=True)
        await talk.call("pay", call_id="c2")
        assert await talk.output("c2") == "ok"


@pytest.mark.parametrize("approved", [True, False], ids=["approved", "rejected"])
@pytest.mark.parametrize("awaited", ["needs_approval", "guardrail", "guardrail that rejects"])
async def test_a_standing_decision_counts_for_a_call_that_is_being_looked_at(
    awaited: str, approved: bool
) -> None:
    looked_at, release = asyncio.Event(), asyncio.Event()
    checked: list[str] = []

    async def held(context: ToolContext) -> bool:
        checked.append(context.call_id)
        if context.call_id != "c2":
            return True
        looked_at.set()
        await release.wait()
        return not awaited.endswith("rejects")

    async def needs_approval(context: ToolContext) -> bool:
        return awaited != "needs_approval" or await held(context)

    async def check(context: ToolContext) -> ToolVerdict:
        if awaited == "needs_approval" or await held(context):
            return ToolVerdict()
        return ToolVerdict("reject", "not today")

    tools = NotedTools()
    guardrail = ToolGuardrail(check, "check", before_approval=True)
    pay = tools.make("pay", needs_approval=needs_approval, input_guardrails=[guardrail])
    async with talk_to(Agent(name="A", tools=[pay])) as talk:
        await talk.call("pay", call_id="c1")
        await talk.event("tool_approval_required")
        await talk.call("pay", call_id="c2")
        await looked_at.wait()
        if approved:
            await talk.session.approve_tool_call("c1", always=True)
        else:
            await talk.session.reject_tool_call("c1", always=True, message="never")
        release.set()
        output = await talk.output("c2")
        assert talk.count("tool_approval_required") == 1
    made = [call_id for _, call_id, _ in tools.calls]
    if awaited.endswith("rejects"):
        assert (output, made) == ("not today", ["c1"] if approved else [])
    else:
        assert output == ("ok" if approved else "never")
        assert sorted(made) == (["c1", "c2"] if approved else [])
    assert checked[:2] == ["c1", "c2"]


async def test_a_repetition_does_not_overtake_an_approved_call() -> None:
    tools = NotedTools()
    first = Agent(name="First", tools=[tools.make("pay", "first", needs_approval=True)])
    second = Agent(name="Second", tools=[tools.make("pay", "second")])
    async with talk_to(first) as talk:
        await talk.call("pay", call_id="c1")
        await talk.event("tool_approval_required")
        await talk.session.update_agent(second)
        await talk.session.approve_tool_call("c1")
        await talk.call("pay", call_id="c1")
        await talk.event("tool_end")
        await talk.settled()
        assert talk.outputs == [("c1", "first")]
    assert tools.calls == [("first", "c1", "{}")]
