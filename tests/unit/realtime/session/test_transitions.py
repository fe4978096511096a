"""From one agent to another: `update_agent` and handoffs, and what holds when the model refuses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from capsule_tasks import Agent, Handoff, RunContext, function_tool
from capsule_tasks.errors import (
    AgentReplaced,
    InvalidSetting,
    RealtimeClosed,
    RealtimeLost,
    RealtimeNoAnswer,
    RealtimeRefused,
)
from capsule_tasks.realtime.events import RealtimeErrorEvent, RealtimeEvent, RealtimeHandoff
from capsule_tasks.realtime.model import (
    Command,
    ResponseStarted,
    SendToolOutput,
    ToolCalled,
    UpdateSettings,
)
from capsule_tasks.realtime.runner import RealtimeRunner
from capsule_tasks.realtime.session.session import RealtimeSession
from capsule_tasks.realtime.settings import RealtimeConfig
from capsule_tasks.runs.engine.ports import UNCERTAIN
from tests.unit.realtime.session.fake_model import FakeModel, Gate

QUIET = RealtimeConfig(raw_model_events=False)

BILLING = Agent(name="Billing", instructions="Talk about money.")
SALES = Agent(name="Sales", instructions="Sell.")
SUPPORT = Agent(name="Support", instructions="Help.", handoffs=[BILLING, SALES])

REFUSED = RealtimeRefused("the settings", "no such voice")
NO_ANSWER = RealtimeNoAnswer("the settings", 10)


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


def session_of(model: FakeModel, agent: Agent = SUPPORT) -> RealtimeSession:
    return RealtimeRunner(agent, model, QUIET).run()


def instructions_told(model: FakeModel) -> list[str]:
    updates: list[Any] = model.told(UpdateSettings)
    return [update.settings.instructions for update in updates]


async def rest_of(session: RealtimeSession) -> list[RealtimeEvent]:
    """The events of a session that is closed first."""
    await session.close()
    return [event async for event in session]


async def sent(model: FakeModel, kind: type[Command], count: int) -> list[Any]:
    while len(model.told(kind)) < count:
        await asyncio.sleep(0)
    return model.told(kind)


async def test_the_agent_changes_once_the_model_has_accepted_it(model: FakeModel) -> None:
    gate = Gate()
    async with session_of(model) as session:
        model.steps["UpdateSettings"].append(gate)
        updating = asyncio.create_task(session.update_agent(BILLING))
        await gate.reached.wait()
        assert session.agent is SUPPORT
        gate.released.set()
        await updating
        assert session.agent is BILLING
        assert await rest_of(session) == [RealtimeHandoff(SUPPORT, BILLING)]
    assert instructions_told(model) == ["Talk about money."]


async def test_a_handoff_does_the_same_as_an_update(model: FakeModel) -> None:
    async with session_of(model) as session:
        model.says(ToolCalled("transfer_to_billing", "call_1", "{}"))
        [output] = await sent(model, SendToolOutput, 1)
        assert output.output == '{"assistant":"Billing"}'
        assert session.agent is BILLING
        handoffs = [each for each in await rest_of(session) if each.type == "handoff"]
        assert handoffs == [RealtimeHandoff(SUPPORT, BILLING)]
    assert instructions_told(model) == ["Talk about money."]


async def test_an_agent_is_asked_once_for_what_the_model_is_told_and_for_its_calls(
    model: FakeModel,
) -> None:
    asked: list[str] = []

    def is_enabled(context: RunContext, agent: Agent) -> bool:
        asked.append("is_enabled")
        return len(asked) == 1

    @function_tool(is_enabled=is_enabled)
    async def pay() -> str:
        return "paid"

    async with session_of(model) as session:
        await session.update_agent(BILLING.clone(tools=[pay]))
        model.says(ToolCalled("pay", "call_1", "{}"))
        [output] = await sent(model, SendToolOutput, 1)
    assert (output.output, asked) == ("paid", ["is_enabled"])


async def test_a_refusal_leaves_the_agent_as_it_was(model: FakeModel) -> None:
    async with session_of(model) as session:
        model.steps["UpdateSettings"].append(REFUSED)
        with pytest.raises(RealtimeRefused):
            await session.update_agent(BILLING)
        assert session.agent is SUPPORT
        assert model.told(UpdateSettings) == []
        assert await rest_of(session) == []


@pytest.mark.parametrize("error", [NO_ANSWER, OSError("unclear")])
async def test_without_an_answer_the_model_is_told_the_earlier_settings(
    model: FakeModel, error: Exception
) -> None:
    async with session_of(model) as session:
        model.steps["UpdateSettings"].append(error)
        with pytest.raises(type(error)):
            await session.update_agent(BILLING)
        assert session.agent is SUPPORT
        assert instructions_told(model) == ["Help."]
        await session.send_message("It is open still.")
        assert await rest_of(session) == []


async def test_a_model_that_may_be_either_agent_ends_the_session(model: FakeModel) -> None:
    session = session_of(model)
    await session.__aenter__()
    model.steps["UpdateSettings"] += [NO_ANSWER, REFUSED]
    with pytest.raises(RealtimeNoAnswer):
        await session.update_agent(BILLING)
    with pytest.raises(RealtimeRefused) as raised:
        await anext(aiter(session))
    assert "the model may work as another agent" in raised.value.__notes__[0]
    await session.close()
    assert not model.is_connected


async def test_a_handoff_that_is_refused_is_told_to_the_agent_that_goes_on(
    model: FakeModel,
) -> None:
    async with session_of(model) as session:
        model.steps["UpdateSettings"].append(REFUSED)
        model.says(ToolCalled("transfer_to_billing", "call_1", "{}"))
        [output] = await sent(model, SendToolOutput, 1)
        assert "was not handed over" in output.output
        assert session.agent is SUPPORT
        errors = [each for each in await rest_of(session) if isinstance(each, RealtimeErrorEvent)]
    assert [each.error for each in errors] == [REFUSED]


async def test_of_two_handoffs_of_one_answer_one_is_made(model: FakeModel) -> None:
    async with session_of(model) as session:
        model.says(
            ResponseStarted("r"),
            ToolCalled("transfer_to_billing", "call_1", "{}", response_id="r"),
            ToolCalled("transfer_to_sales", "call_2", "{}", response_id="r"),
        )
        outputs = await sent(model, SendToolOutput, 2)
        by_id = {each.call_id: each.output for each in outputs}
        assert by_id["call_1"] == '{"assistant":"Billing"}'
        assert "Billing" in by_id["call_2"]
        assert session.agent is BILLING
    assert instructions_told(model) == ["Talk about money."]


async def test_a_handoff_of_an_agent_that_was_replaced_is_not_made(model: FakeModel) -> None:
    async with session_of(model) as session:
        before = session.snapshot
        await session.update_agent(SALES)
        with pytest.raises(AgentReplaced, match="agent 'Sales' has taken over since"):
            await session.hand_over(BILLING, before)
        assert session.agent is SALES


async def test_a_call_of_an_answer_that_an_earlier_agent_began_is_one_of_its_tools(
    model: FakeModel,
) -> None:
    @function_tool
    async def look() -> str:
        return "seen"

    async with session_of(model, SUPPORT.clone(tools=[look])) as session:
        model.says(ResponseStarted("r"))
        await session.update_agent(BILLING)
        model.says(ToolCalled("look", "call_1", "{}", response_id="r"))
        [output] = await sent(model, SendToolOutput, 1)
    assert output.output == "seen"


async def test_updates_are_made_one_at_a_time(model: FakeModel) -> None:
    gate = Gate()
    async with session_of(model) as session:
        model.steps["UpdateSettings"].append(gate)
        first = asyncio.create_task(session.update_agent(BILLING))
        await gate.reached.wait()
        second = asyncio.create_task(session.update_agent(SALES))
        gate.released.set()
        await asyncio.gather(first, second)
        handoffs = [RealtimeHandoff(SUPPORT, BILLING), RealtimeHandoff(BILLING, SALES)]
        assert await rest_of(session) == handoffs


async def test_a_cancel_of_the_caller_does_not_cut_an_update(model: FakeModel) -> None:
    gate = Gate()
    async with session_of(model) as session:
        model.steps["UpdateSettings"].append(gate)
        updating = asyncio.create_task(session.update_agent(BILLING))
        await gate.reached.wait()
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        gate.released.set()
        assert await anext(aiter(session)) == RealtimeHandoff(SUPPORT, BILLING)
        assert session.agent is BILLING


async def test_an_error_after_a_cancel_of_the_caller_becomes_an_event(model: FakeModel) -> None:
    gate = Gate()

    async def refuse() -> None:
        await gate()
        raise REFUSED

    async with session_of(model) as session:
        model.steps["UpdateSettings"].append(refuse)
        updating = asyncio.create_task(session.update_agent(BILLING))
        await gate.reached.wait()
        updating.cancel()
        gate.released.set()
        event = await anext(aiter(session))
    assert isinstance(event, RealtimeErrorEvent)
    assert event.error is REFUSED


async def test_a_close_ends_an_update(model: FakeModel) -> None:
    gate = Gate()
    session = session_of(model)
    await session.__aenter__()
    model.steps["UpdateSettings"].append(gate)
    updating = asyncio.create_task(session.update_agent(BILLING))
    await gate.reached.wait()
    await session.close()
    with pytest.raises(RealtimeClosed):
        await updating
    assert (session.agent, len(asyncio.all_tasks())) == (SUPPORT, 1)


async def test_a_lost_connection_ends_an_update(model: FakeModel) -> None:
    session = session_of(model)
    await session.__aenter__()
    model.steps["UpdateSettings"] += [RealtimeLost("reset"), RealtimeLost("reset")]
    with pytest.raises(RealtimeLost):
        await session.update_agent(BILLING)
    with pytest.raises(RealtimeLost):
        await anext(aiter(session))
    await session.close()


async def test_an_update_that_somebody_cancels_is_taken_back(model: FakeModel) -> None:
    gate = Gate()
    async with session_of(model) as session:
        model.steps["UpdateSettings"].append(gate)
        updating = asyncio.create_task(session.update_agent(BILLING))
        await gate.reached.wait()
        [task] = [each for each in asyncio.all_tasks() if each.get_name() == "update of the agent"]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        assert session.agent is SUPPORT
        assert instructions_told(model) == ["Help."]
        await session.update_agent(BILLING)
        assert session.agent is BILLING


async def test_the_model_gets_an_output_of_a_tool_that_cancels_itself(model: FakeModel) -> None:
    @function_tool
    async def look() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return "seen"

    async with session_of(model, SUPPORT.clone(tools=[look])) as session:
        model.says(ToolCalled("look", "call_1", "{}"))
        [output] = await sent(model, SendToolOutput, 1)
        assert session.is_open
    assert output.output == UNCERTAIN


async def test_an_update_looks_anew_at_an_agent_that_was_changed(model: FakeModel) -> None:
    agent = Agent(name="Support", instructions="Help.")
    async with session_of(model, agent) as session:
        agent.handoffs.append(Handoff(BILLING, name="to_billing"))
        agent.instructions = "Help or hand over."
        await session.update_agent(agent)
        [update] = await sent(model, UpdateSettings, 1)
        assert [tool.name for tool in update.settings.tools] == ["to_billing"]
        model.says(ToolCalled("to_billing", "call_1", "{}"))
        await sent(model, SendToolOutput, 1)
        assert session.agent is BILLING


async def test_the_state_begins_with_an_agent_from_outside_the_graph(model: FakeModel) -> None:
    clerk = Agent(name="Clerk", handoffs=[Agent(name="Clerk's aide")])
    async with session_of(model) as session:
        await session.update_agent(clerk)
    assert (session.state.start_agent.name, session.state.agent.name) == ("Clerk", "Clerk")
    async with RealtimeRunner(clerk, model).run(state=session.state) as again:
        assert again.agent is clerk


async def test_what_is_no_agent_is_refused(model: FakeModel) -> None:
    async with session_of(model) as session:
        with pytest.raises(InvalidSetting, match="agent"):
            await session.update_agent("Billing")  # type: ignore[arg-type]
