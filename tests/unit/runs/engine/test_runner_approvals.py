"""Runs that wait for people: approvals, rejections, resumes, and agents used as tools."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from capsule_tasks.errors import (
    CallbackFailed,
    CallChanged,
    InvalidRunState,
    ModelFailed,
    RunStopped,
)
from capsule_tasks.runs import RunState
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import ToolContext
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.agents.guardrails import ToolGuardrail, ToolVerdict
from capsule_tasks.runs.agents.handoffs import Handoff
from capsule_tasks.runs.agents.run_config import RunConfig
from capsule_tasks.runs.agents.tools import Tool
from capsule_tasks.runs.engine.runner import Runner
from capsule_tasks.runs.identity import AgentId
from capsule_tasks.runs.models.model import ModelSettings
from capsule_tasks.testing.models import ScriptedModel, calls, hands_over
from tests.unit.runs.engine.runs import MODES, MemorySession, Mode, spelled

PAY = calls("pay", {"euros": 5}, "c1")
PAY_MORE = calls("pay", {"euros": 9}, "c2")
LOOK = calls("look", {}, "c3")


class Shop:
    """An agent whose payments need an approval, and what it has paid."""

    def __init__(self, *replies: Any, **options: Any) -> None:
        self.paid: list[int] = []
        self.looks = 0
        self.model = ScriptedModel(replies)

        @function_tool(needs_approval=True, **options)
        async def pay(euros: int) -> str:
            """Pay."""
            self.paid.append(euros)
            return f"paid {euros}"

        @function_tool
        async def look() -> str:
            """Look."""
            self.looks += 1
            return "seen"

        self.agent = Agent(name="Shop", model=self.model, tools=[pay, look])
        self.session = MemorySession()

    async def run(self, mode: Mode, given: Any) -> Any:
        return (await mode.run(self.agent, given, session=self.session)).result


def copied(state: RunState) -> RunState:
    """The state as another process has it."""
    return RunState.from_string(state.to_string())


@pytest.mark.parametrize("mode", MODES)
async def test_calls_without_approval_are_made_before_the_run_waits(mode: Mode) -> None:
    shop = Shop([PAY, LOOK], "done")
    first = await shop.run(mode, "hi")
    assert [call.call_id for call in first.interruptions] == ["c1"]
    assert spelled(shop.session.items) == ["user hi", "call c1", "call c3", "output c3 seen"]
    assert (shop.paid, shop.looks, first.final_output) == ([], 1, None)

    second = await shop.run(mode, copied(first.state).approve("c1"))
    assert second.final_output == "done"
    assert spelled(shop.session.items)[4:] == ["output c1 paid 5", "says done"]
    assert (shop.paid, shop.looks) == ([5], 1)
    assert spelled(list(shop.model.requests[1].input))[-1] == "output c1 paid 5"
    assert second.state.turn == 2


@pytest.mark.parametrize("mode", MODES)
async def test_decisions_one_after_the_other(mode: Mode) -> None:
    shop = Shop([PAY, PAY_MORE], "done")
    first = await shop.run(mode, "hi")
    again = await shop.run(mode, copied(first.state))
    assert len(again.interruptions) == 2
    second = await shop.run(mode, copied(again.state).reject("c2", message="too much"))
    assert [call.call_id for call in second.interruptions] == ["c1"]
    third = await shop.run(mode, copied(second.state).approve("c1"))
    assert third.final_output == "done"
    assert spelled(shop.session.items) == [
        *("user hi", "call c1", "call c2"),
        *("output c2 too much", "output c1 paid 5", "says done"),
    ]
    assert shop.paid == [5]


@pytest.mark.parametrize("mode", MODES)
async def test_a_standing_decision_holds_for_later_calls_and_an_exact_one_beats_it(
    mode: Mode,
) -> None:
    shop = Shop(PAY, [PAY_MORE], "done")
    first = await shop.run(mode, "hi")
    last = await shop.run(mode, copied(first.state).approve("c1", always=True))
    assert (last.final_output, shop.paid) == ("done", [5, 9])

    shop = Shop([PAY, PAY_MORE], "done")
    first = await shop.run(mode, "hi")
    state = copied(first.state).reject("c2").approve("c1", always=True)
    last = await shop.run(mode, state)
    assert (last.final_output, shop.paid) == ("done", [5])


async def test_a_standing_decision_for_one_namespace_does_not_cover_another() -> None:
    made: list[str] = []

    def pay_in(namespace: str) -> Tool:
        @function_tool(name="pay", namespace=namespace, needs_approval=True)
        async def pay() -> str:
            """Pay."""
            made.append(namespace)
            return "paid"

        return pay

    a1, a2, b1 = (
        {**calls("pay", {}, call_id), "namespace": call_id[0]} for call_id in ("a1", "a2", "b1")
    )
    model = ScriptedModel([a1, [a2, b1], "done"])
    agent = Agent(name="Agent", model=model, tools=[pay_in("a"), pay_in("b")])
    first = await Runner.run(agent, "hi")
    second = await Runner.run(agent, copied(first.state).approve("a1", always=True))
    assert [call.call_id for call in second.interruptions] == ["b1"]
    assert made == ["a", "a"]


async def test_agents_of_one_name_stay_apart_when_the_graph_is_in_another_order() -> None:
    done: list[str] = []

    def desk(instructions: str, *replies: Any) -> Agent:
        @function_tool(needs_approval=True)
        async def pay() -> str:
            """Pay."""
            done.append(instructions)
            return "paid"

        model = ScriptedModel(replies)
        return Agent(name="Desk", instructions=instructions, model=model, tools=[pay])

    def front(*order: int) -> Agent:
        handoffs = [
            Handoff(agent=desk("first", "one"), name="to_first"),
            Handoff(agent=desk("second", calls("pay", {}, "c1")), name="to_second"),
        ]
        model = ScriptedModel([calls("to_second", {}, "h1")])
        return Agent(name="Front", model=model, handoffs=[handoffs[each] for each in order])

    first = await Runner.run(front(0, 1), "hi")
    agent = front(1, 0)
    desks = {each.agent.instructions: each.agent for each in agent.handoffs}  # type: ignore[union-attr]
    desks["second"].model = ScriptedModel(["two"])
    last = await Runner.run(agent, copied(first.state).approve("c1"))
    assert (last.final_output, done) == ("two", ["second"])
    assert last.agent is desks["second"]


@pytest.mark.parametrize("mode", MODES)
async def test_items_of_others_that_came_while_it_waited_stay(mode: Mode) -> None:
    shop = Shop(PAY, "done")
    first = await shop.run(mode, "hi")
    other = {"role": "user", "content": "and hurry"}
    await shop.session.add_items([other])
    last = await shop.run(mode, copied(first.state).approve("c1"))
    assert last.final_output == "done"
    assert spelled(shop.session.items) == [
        *("user hi", "call c1", "user and hurry", "output c1 paid 5", "says done")
    ]
    assert "user and hurry" in spelled(list(shop.model.requests[1].input))


async def test_other_arguments_than_those_decided_about_fail_before_any_effect() -> None:
    shop = Shop([PAY, LOOK], "done")
    first = await Runner.run(shop.agent, "hi", session=shop.session)
    data = first.state.approve("c1").to_json()
    data["calls"][0]["arguments"] = '{"euros": 500}'
    with pytest.raises(CallChanged) as caught:
        await Runner.run(shop.agent, RunState.from_json(data), session=shop.session)
    assert shop.paid == []
    assert caught.value.state.calls[0].call_id == "c1"


async def test_an_id_of_an_earlier_turn_with_other_arguments_is_refused() -> None:
    shop = Shop(calls("pay", {"euros": 5}, "c1"), calls("pay", {"euros": 6}, "c1"))
    first = await Runner.run(shop.agent, "hi", session=shop.session)
    state = first.state.approve("c1", always=True)
    with pytest.raises(CallChanged):
        await Runner.run(shop.agent, state, session=shop.session)
    assert shop.paid == [5]


@pytest.mark.parametrize("with_session", [True, False])
async def test_an_id_of_a_turn_in_another_process_with_other_arguments_is_refused(
    with_session: bool,
) -> None:
    """Also where the same session has the id in an earlier run, which may be another call."""
    shop = Shop(
        calls("look", {}, "c2"), "one", PAY, LOOK, PAY_MORE, calls("pay", {"euros": 6}, "c1")
    )
    session = shop.session if with_session else None
    await Runner.run(shop.agent, "hi", session=session)
    first = await Runner.run(shop.agent, "hi", session=session)
    state = copied(first.state).approve("c1")
    second = await Runner.run(shop.agent, state, session=session)
    state = copied(second.state).approve("c2", always=True)
    with pytest.raises(CallChanged) as caught:
        await Runner.run(shop.agent, state, session=session)
    assert shop.paid == [5, 9]
    assert caught.value.state.turn == 3


async def test_guardrails_run_before_people_are_asked_if_they_say_so_and_after_it_always() -> None:
    asked: list[str] = []

    def check(context: ToolContext) -> ToolVerdict:
        asked.append(context.call_id)
        return ToolVerdict("reject", "no") if "9" in context.arguments else ToolVerdict()

    def check_late(context: ToolContext) -> ToolVerdict:
        asked.append(f"late {context.call_id}")
        return ToolVerdict()

    guardrails = [
        ToolGuardrail(check, "guard", before_approval=True),
        ToolGuardrail(check_late, "late"),
    ]
    shop = Shop([PAY, PAY_MORE], "done", input_guardrails=guardrails)
    first = await Runner.run(shop.agent, "hi", session=shop.session)
    assert [call.call_id for call in first.interruptions] == ["c1"]
    assert asked == ["c1", "c2"]
    assert [each.call_id for each in first.state.guardrails] == ["c1"]
    last = await Runner.run(shop.agent, copied(first.state).approve("c1"), session=shop.session)
    assert (last.final_output, asked, shop.paid) == (
        "done",
        ["c1", "c2", "c1", "late c1"],
        [5],
    )
    assert last.state.guardrails == ()


async def test_wrong_arguments_are_told_and_nobody_is_asked() -> None:
    shop = Shop(calls("pay", {"euros": "many"}, "c1"), "sorry")
    result = await Runner.run(shop.agent, "hi", session=shop.session)
    assert (result.final_output, shop.paid) == ("sorry", [])


async def test_a_handoff_beside_a_call_that_waits_comes_after_it() -> None:
    shop = Shop([PAY, hands_over("Other", call_id="h1")], "done")
    shop.agent.handoffs.append(Agent(name="Other", model=shop.model))
    first = await Runner.run(shop.agent, "hi", session=shop.session)
    assert first.agent.name == "Shop"
    assert len(first.interruptions) == 1
    last = await Runner.run(shop.agent, copied(first.state).approve("c1"), session=shop.session)
    assert (last.final_output, last.agent.name) == ("done", "Other")
    assert spelled(shop.session.items)[3:] == [
        *("output c1 paid 5", 'output h1 {"assistant":"Other"}', "says done")
    ]


async def test_the_outputs_of_a_turn_that_waited_are_all_there_after_it() -> None:
    shop = Shop([PAY, LOOK])
    shop.agent.after_tools = lambda _run, results: [each.output for each in results]
    first = await Runner.run(shop.agent, "hi", session=shop.session)
    last = await Runner.run(shop.agent, first.state.approve("c1"), session=shop.session)
    assert last.final_output == ["seen", "paid 5"]


async def test_the_tool_choice_is_reset_after_a_resume_too() -> None:
    shop = Shop(PAY, "done")
    shop.agent.model_settings = ModelSettings(tool_choice="required")
    first = await Runner.run(shop.agent, "hi", session=shop.session)
    await Runner.run(shop.agent, copied(first.state).approve("c1"), session=shop.session)
    choices = [request.settings.tool_choice for request in shop.model.requests]
    assert choices == ["required", None]


async def test_what_a_resumed_turn_has_done_is_stored_though_it_fails_then() -> None:
    shop = Shop([PAY, LOOK])
    shop.agent.after_tools = lambda _run, _results: 1 // 0
    first = await Runner.run(shop.agent, "hi", session=shop.session)
    with pytest.raises(CallbackFailed) as caught:
        await Runner.run(shop.agent, copied(first.state).approve("c1"), session=shop.session)
    assert spelled(shop.session.items)[-1] == "output c1 paid 5"
    shop.model = shop.agent.model = ScriptedModel(["done"])
    last = await Runner.run(shop.agent, copied(caught.value.state), session=shop.session)
    assert (last.final_output, shop.paid) == ("done", [5])


# --- agents as tools -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_an_agent_used_as_a_tool_waits_and_goes_on_through_its_parent(mode: Mode) -> None:
    shop = Shop([PAY, LOOK], "inner done")
    outer = ScriptedModel([[calls("shop", {"input": "buy"}, "o1")], "outer done"])
    agent = Agent(name="Boss", model=outer, tools=[shop.agent.as_tool()])
    session = MemorySession()
    first = (await mode.run(agent, "hi", session=session)).result
    assert [call.call_id for call in first.interruptions] == ["c1"]
    assert spelled(session.items) == ["user hi", "call o1"]
    assert (shop.paid, shop.looks) == ([], 1)
    again = (await mode.run(agent, copied(first.state), session=session)).result
    assert (len(again.interruptions), shop.looks) == (1, 1)
    last = (await mode.run(agent, copied(again.state).approve("c1"), session=session)).result
    assert last.final_output == "outer done"
    assert spelled(session.items)[2:] == ["output o1 inner done", "says outer done"]
    assert (shop.paid, shop.looks) == ([5], 1)
    assert last.usage.requests == 4
    assert last.state.nested == {}


async def test_an_agent_as_a_tool_that_needs_an_approval_itself() -> None:
    shop = Shop(PAY, "inner done")
    outer = ScriptedModel([calls("shop", {"input": "buy"}, "o1"), "outer done"])
    agent = Agent(name="Boss", model=outer, tools=[shop.agent.as_tool(needs_approval=True)])
    session = MemorySession()
    first = await Runner.run(agent, "hi", session=session)
    assert [call.call_id for call in first.interruptions] == ["o1"]
    assert shop.model.requests == []
    second = await Runner.run(agent, copied(first.state).approve("o1"), session=session)
    assert [call.call_id for call in second.interruptions] == ["c1"]
    last = await Runner.run(agent, copied(second.state).approve("c1"), session=session)
    assert (last.final_output, shop.paid) == ("outer done", [5])


@pytest.mark.parametrize("mode", MODES)
async def test_an_inner_run_that_fails_or_is_resumed_makes_no_call_again(mode: Mode) -> None:
    shop = Shop(LOOK, PAY, OSError("down"), "inner done")
    outer = ScriptedModel([[calls("shop", {"input": "buy"}, "o1")], "outer done"])
    agent = Agent(name="Boss", model=outer, tools=[shop.agent.as_tool()])
    session = MemorySession()
    first = (await mode.run(agent, "hi", session=session)).result
    state = copied(first.state).approve("c1")
    failed = (await mode.run(agent, state, session=session)).error
    assert isinstance(failed, ModelFailed)
    assert failed.state.total_usage().requests == 3
    last = (await mode.run(agent, copied(failed.state), session=session)).result
    assert (last.final_output, shop.paid, shop.looks) == ("outer done", [5], 1)
    assert spelled(session.items) == [
        *("user hi", "call o1", "output o1 inner done", "says outer done")
    ]
    assert last.usage.requests == 5


async def test_an_inner_run_that_has_called_tools_is_not_begun_again() -> None:
    shop = Shop(LOOK, OSError("down"), "inner done")
    outer = ScriptedModel([[calls("shop", {"input": "buy"}, "o1"), LOOK], "outer done"])
    agent = Agent(name="Boss", model=outer, tools=[shop.agent.as_tool(), *shop.agent.tools[1:]])
    session = MemorySession()
    with pytest.raises(ModelFailed) as caught:
        await Runner.run(agent, "hi", session=session)
    assert spelled(session.items) == ["user hi", "call o1", "call c3", "output c3 seen"]
    last = await Runner.run(agent, copied(caught.value.state), session=session)
    assert (last.final_output, shop.looks) == ("outer done", 2)
    assert spelled(session.items)[4:] == ["output o1 inner done", "says outer done"]


async def test_standing_decisions_hold_in_later_runs_of_an_agent_used_as_a_tool() -> None:
    shop = Shop(PAY, "one", PAY_MORE, "two")
    outer = ScriptedModel([calls("shop", {"input": each}, each) for each in ("o1", "o2")] + ["ok"])
    agent = Agent(name="Boss", model=outer, tools=[shop.agent.as_tool()])
    first = await Runner.run(agent, "hi")
    last = await Runner.run(agent, copied(first.state).approve("c1", always=True))
    assert (last.final_output, shop.paid) == ("ok", [5, 9])


async def test_the_failures_of_an_inner_run_are_told_or_end_the_run() -> None:
    inner = Agent(name="Inner", model=ScriptedModel([calls("look", {}, "i1")] * 3))
    outer = ScriptedModel([calls("inner", {"input": "x"}, "o1"), "sorry"])
    tool = inner.as_tool(max_turns=1)
    result = await Runner.run(Agent(name="Boss", model=outer, tools=[tool]), "hi")
    assert result.final_output == "sorry"
    assert "has made its 1 turns" in spelled(result.items)[1]

    inner.model = ScriptedModel([OSError("down")])
    outer = ScriptedModel([calls("inner", {"input": "x"}, "o1")])
    with pytest.raises(RunStopped, match="down"):
        await Runner.run(Agent(name="Boss", model=outer, tools=[tool]), "hi")


async def test_guardrails_of_the_configuration_are_for_the_outer_run() -> None:
    from capsule_tasks.runs.agents.guardrails import InputGuardrail, Verdict

    given: list[Any] = []

    def check(_run: Any, agent: Agent, about: Any) -> Verdict:
        given.append((agent.name, about))
        return Verdict()

    inner = Agent(name="Inner", model=ScriptedModel(["inner"]))
    outer = ScriptedModel([calls("inner", {"input": "x"}, "o1"), "outer"])
    agent = Agent(name="Boss", model=outer, tools=[inner.as_tool()])
    config = RunConfig(input_guardrails=[InputGuardrail(check, "guard")])
    await Runner.run(agent, "hi", run_config=config)
    assert given == [("Boss", "hi")]


async def test_a_state_whose_call_was_made_since_is_refused_before_any_effect() -> None:
    shop = Shop(PAY, "paid", "again")
    waiting = await Runner.run(shop.agent, "hi", session=shop.session)
    approved = waiting.state.approve("c1")
    assert (await Runner.run(shop.agent, approved, session=shop.session)).final_output == "paid"
    before = list(shop.session.items)
    with pytest.raises(InvalidRunState, match="call 'c1' was made since"):
        await Runner.run(shop.agent, copied(approved), session=shop.session)
    assert (shop.paid, shop.session.items) == ([5], before)


async def test_a_call_of_another_run_with_the_same_id_is_another_call() -> None:
    shop = Shop(PAY, calls("look", {}, "c1"), "looked", "paid")
    waiting = await Runner.run(shop.agent, "hi", session=shop.session)
    await Runner.run(shop.agent, "look", session=shop.session)
    approved = waiting.state.approve("c1")
    assert (await Runner.run(shop.agent, approved, session=shop.session)).final_output == "paid"
    assert shop.paid == [5]


@pytest.mark.parametrize("approved", [True, False])
async def test_a_call_is_made_by_the_agent_that_made_it_where_another_one_has_taken_over(
    approved: bool,
) -> None:
    """As after a realtime session, which may hand over while a call waits."""
    shop = Shop(PAY)
    state = copied((await Runner.run(shop.agent, "hi", session=shop.session)).state)
    clerk = Agent(name="Clerk", model=ScriptedModel(["done"]), handoffs=[shop.agent])
    state = replace(state, agent=AgentId("Clerk"))
    state = state.approve("c1") if approved else state.reject("c1", message="no")
    last = await Runner.run(clerk, state, session=shop.session)
    assert (last.final_output, shop.paid) == ("done", [5] if approved else [])
    assert spelled(shop.session.items)[2:] == [
        *(["output c1 paid 5"] if approved else ["output c1 no"]),
        "says done",
    ]
