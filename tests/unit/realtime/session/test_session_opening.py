"""Opening a session: what the model is told, and what is left when it fails on the way."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

import pytest

from capsule_tasks import Agent, Handoff, ModelSettings, function_tool
from capsule_tasks.errors import (
    CallbackFailed,
    InvalidSetting,
    RealtimeClosed,
    RealtimeLost,
    UnknownAgent,
)
from capsule_tasks.realtime.events import RealtimeRawModelEvent
from capsule_tasks.realtime.model import (
    ConnectionEnded,
    SendItems,
    ToolCalled,
)
from capsule_tasks.realtime.runner import RealtimeRunner
from capsule_tasks.realtime.settings import RealtimeConfig, RealtimeModelConfig, RealtimeSettings
from capsule_tasks.runs import HostedTool, only_last
from tests.unit.realtime.session.fake_model import FakeModel, Gate

colour = ContextVar[str]("colour", default="none")


class ItemList:
    """A history in memory."""

    def __init__(self, *items: dict[str, Any]) -> None:
        self.items = list(items)

    async def get_items(self, limit: int | None = None) -> list[dict[str, Any]]:
        return self.items[-limit:] if limit else list(self.items)

    async def add_items(self, items: list[dict[str, Any]]) -> None:
        self.items += items


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


AGENT = Agent(name="Support", instructions="Help.")


async def test_nothing_is_done_before_the_session_is_entered(model: FakeModel) -> None:
    made: list[FakeModel] = []

    def make() -> FakeModel:
        made.append(model)
        return model

    history = ItemList()
    session = RealtimeRunner(AGENT, make).run(history=history)
    assert (made, model.listeners, session.agent, session.history) == ([], [], AGENT, [])
    with pytest.raises(RealtimeClosed, match="not open yet"):
        await session.send_message("Hello")
    with pytest.raises(RealtimeClosed, match="not open yet"):
        aiter(session)
    await session.close()
    assert (made, model.closes) == ([], 0)
    with pytest.raises(RealtimeClosed, match="closed"):
        await session.__aenter__()


async def test_settings_of_the_connection_precede_those_of_the_session_and_of_the_agent(
    model: FakeModel,
) -> None:
    of_agent = ModelSettings(tool_choice="auto", max_output_tokens=1, parallel_tool_calls=False)
    agent = AGENT.clone(model_settings=of_agent)
    config = RealtimeConfig(settings=RealtimeSettings(max_output_tokens=2, voice="ash", speed=2))
    over = RealtimeModelConfig(settings=RealtimeSettings(speed=3, tool_choice="required"))
    async with RealtimeRunner(agent, model, config).run(model_config=over):
        assert model.settings is not None
        assert model.settings.instructions == "Help."
        assert model.settings.settings == RealtimeSettings(
            tool_choice="required",
            max_output_tokens=2,
            parallel_tool_calls=False,
            voice="ash",
            speed=3,
        )


async def test_the_model_is_told_the_history_once_it_is_connected(model: FakeModel) -> None:
    history = ItemList({"role": "user", "content": "Hello"})
    async with RealtimeRunner(AGENT, model).run(history=history) as session:
        [command] = model.told(SendItems)
        assert isinstance(command, SendItems)
        assert [item["role"] for item in command.items] == ["user"]
        assert [item["role"] for item in session.history] == ["user"]
    assert len(history.items) == 1


async def test_a_session_is_entered_once(model: FakeModel) -> None:
    session = RealtimeRunner(AGENT, model).run()
    async with session:
        with pytest.raises(RealtimeClosed, match="open"):
            await session.__aenter__()
        await session.send_message("It is open still.")
    with pytest.raises(RealtimeClosed, match="closed"):
        await session.__aenter__()
    assert model.closes == 1


async def test_tools_see_the_context_of_whoever_has_entered_the_session(model: FakeModel) -> None:
    seen = asyncio.Queue[str]()

    @function_tool
    async def look() -> str:
        await seen.put(colour.get())
        colour.set("green")
        return "done"

    colour.set("white")
    session = RealtimeRunner(AGENT.clone(tools=[look]), model).run()
    colour.set("red")
    async with session:
        colour.set("blue")
        for call_id in ("1", "2"):
            model.says(ToolCalled("look", call_id, "{}"))
            assert await seen.get() == "red"
    assert colour.get() == "blue"


# --- what a realtime model cannot honour ---------------------------------------------------------

REFUSED = [
    (
        AGENT.clone(tools=[HostedTool({"type": "web_search"})]),
        "a tool of agent 'Support' = 'web_search'",
    ),
    (
        AGENT.clone(tools=[function_tool(name="look", namespace="crm")(lambda: None)]),
        "the namespace of tool 'look' of agent 'Support' = 'crm'",
    ),
    (AGENT.clone(output_type=int), "output_type of agent 'Support'"),
    (
        AGENT.clone(handoffs=[Handoff(Agent(name="Sales"), input_filter=only_last(1))]),
        "input_filter of handoff 'transfer_to_sales' of agent 'Support'",
    ),
]


@pytest.mark.parametrize(("agent", "named"), REFUSED)
async def test_an_agent_that_cannot_be_honoured_is_refused_before_the_model_is_told_anything(
    model: FakeModel, agent: Agent, named: str
) -> None:
    with pytest.raises(InvalidSetting, match=named):
        async with RealtimeRunner(agent, model).run():
            pass
    async with RealtimeRunner(AGENT, model).run() as session:
        with pytest.raises(InvalidSetting, match=named):
            await session.update_agent(agent)
        assert session.agent is AGENT
    assert model.commands == []


async def test_a_state_of_other_agents_is_refused(model: FakeModel) -> None:
    async with RealtimeRunner(AGENT, model).run() as session:
        pass
    with pytest.raises(UnknownAgent):
        RealtimeRunner(Agent(name="Sales"), model).run(state=session.state)


@pytest.mark.parametrize(("argument", "value"), [("model", 5), ("config", {})])
def test_wrong_arguments_of_a_runner_are_named(argument: str, value: Any) -> None:
    with pytest.raises(InvalidSetting, match=argument):
        RealtimeRunner(AGENT, **{argument: value})


@pytest.mark.parametrize(
    ("argument", "value"), [("model_config", {}), ("history", []), ("state", {})]
)
def test_wrong_arguments_of_a_session_are_named(argument: str, value: Any) -> None:
    with pytest.raises(InvalidSetting, match=argument):
        RealtimeRunner(AGENT, FakeModel()).run(**{argument: value})


def test_an_async_function_that_makes_models_is_refused() -> None:
    async def make() -> FakeModel:
        return FakeModel()

    model: Any = make
    with pytest.raises(InvalidSetting, match=r"model = .*not an async one"):
        RealtimeRunner(AGENT, model)


async def test_a_function_that_makes_no_model_is_named(model: FakeModel) -> None:
    make: Any = dict
    with pytest.raises(InvalidSetting, match="what the function model makes = "):
        await RealtimeRunner(AGENT, make).run().__aenter__()


# --- failures on the way -------------------------------------------------------------------------


async def broken(*_: Any) -> Any:
    raise ValueError("broken")


class BrokenHistory(ItemList):
    async def get_items(self, limit: int | None = None) -> list[dict[str, Any]]:
        raise OSError("no disk")


@function_tool(is_enabled=broken)
def moody() -> str:
    """A tool of which nobody can say whether it is enabled."""
    return ""


@pytest.mark.parametrize(
    ("agent", "history", "error"),
    [
        (AGENT.clone(instructions=broken), None, CallbackFailed),
        (AGENT.clone(tools=[moody]), None, CallbackFailed),
        (AGENT.clone(handoffs=[Handoff(AGENT, is_enabled=broken)]), None, CallbackFailed),
        (AGENT, BrokenHistory(), OSError),
    ],
)
async def test_a_failure_before_the_connection_leaves_nothing(
    model: FakeModel, agent: Agent, history: Any, error: type[Exception]
) -> None:
    session = RealtimeRunner(agent, model).run(history=history)
    with pytest.raises(error):
        await session.__aenter__()
    assert (model.listeners, model.closes, len(asyncio.all_tasks())) == ([], 0, 1)
    with pytest.raises(RealtimeClosed, match="closed"):
        await session.send_message("Hello")


async def test_a_failed_connection_leaves_no_listener(model: FakeModel) -> None:
    model.steps["connect"].append(RealtimeLost("refused"))
    with pytest.raises(RealtimeLost, match="refused"):
        await RealtimeRunner(AGENT, model).run().__aenter__()
    assert (model.listeners, model.closes, len(asyncio.all_tasks())) == ([], 0, 1)


async def test_a_session_hears_nothing_of_another_one_whose_model_it_may_not_have(
    model: FakeModel,
) -> None:
    async with RealtimeRunner(AGENT, model).run() as first:
        model.steps["connect"].append(RealtimeLost("in use"))
        second = RealtimeRunner(AGENT, model).run()
        entering = asyncio.create_task(second.__aenter__())
        while model.steps["connect"]:
            await asyncio.sleep(0)
        assert len(model.listeners) == 1
        with pytest.raises(RealtimeLost):
            await entering
        await first.send_message("It is open still.")
        assert model.closes == 0


async def test_a_failure_after_the_connection_closes_it(model: FakeModel) -> None:
    model.steps["SendItems"].append(RealtimeLost("too slow"))
    history = ItemList({"role": "user", "content": "Hello"})
    with pytest.raises(RealtimeLost, match="too slow"):
        await RealtimeRunner(AGENT, model).run(history=history).__aenter__()
    assert (model.listeners, model.closes, len(asyncio.all_tasks())) == ([], 1, 1)
    assert len(history.items) == 1


@pytest.mark.parametrize("step", ["connect", "SendItems"])
async def test_a_cancel_on_the_way_leaves_nothing(model: FakeModel, step: str) -> None:
    gate = Gate()
    model.steps[step].append(gate)
    history = ItemList({"role": "user", "content": "Hello"})
    session = RealtimeRunner(AGENT, model).run(history=history)
    entering = asyncio.create_task(session.__aenter__())
    await gate.reached.wait()
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert (model.listeners, model.is_connected, len(asyncio.all_tasks())) == ([], False, 1)


async def test_a_close_ends_the_opening(model: FakeModel) -> None:
    gate = Gate()
    model.steps["connect"].append(gate)
    session = RealtimeRunner(AGENT, model).run()
    entering = asyncio.create_task(session.__aenter__())
    await gate.reached.wait()
    await session.close()
    with pytest.raises(RealtimeClosed):
        await entering
    assert (model.listeners, model.is_connected, len(asyncio.all_tasks())) == ([], False, 1)


async def test_a_connection_that_ends_during_the_opening_is_what_the_opening_raises(
    model: FakeModel,
) -> None:
    gate = Gate()
    model.steps["SendItems"].append(gate)
    history = ItemList({"role": "user", "content": "Hello"})
    session = RealtimeRunner(AGENT, model).run(history=history)
    entering = asyncio.create_task(session.__aenter__())
    await gate.reached.wait()
    model.says(ConnectionEnded(OSError("reset")))
    with pytest.raises(RealtimeLost, match="reset"):
        await entering
    events = aiter(session)
    assert isinstance(await anext(events), RealtimeRawModelEvent)
    with pytest.raises(RealtimeLost, match="reset"):
        await anext(events)
    assert (model.listeners, model.closes, len(asyncio.all_tasks())) == ([], 1, 1)


async def test_an_error_of_the_cleanup_is_a_note_of_the_one_that_caused_it(
    model: FakeModel,
) -> None:
    model.steps["SendItems"].append(RealtimeLost("too slow"))
    model.steps["close"].append(OSError("stuck"))
    history = ItemList({"role": "user", "content": "Hello"})
    session = RealtimeRunner(AGENT, model).run(history=history)
    with pytest.raises(RealtimeLost, match="too slow") as raised:
        await session.__aenter__()
    assert raised.value.__notes__ == ["closing the session failed, too: stuck"]
    await session.close()
    assert (model.closes, model.is_connected) == (2, False)


async def test_a_session_that_fails_to_open_gives_up_no_call(model: FakeModel) -> None:
    @function_tool(needs_approval=True)
    async def pay() -> str:
        return "paid"

    agent = AGENT.clone(tools=[pay])
    history = ItemList({"role": "user", "content": "Pay!"})
    config = RealtimeConfig(open_approvals="abandon")
    async with RealtimeRunner(agent, model).run(history=history) as session:
        model.says(ToolCalled("pay", "call_1", "{}"))
        while (await anext(aiter(session))).type != "tool_approval_required":
            pass
    model.steps["SendItems"].append(RealtimeLost("too slow"))
    again = RealtimeRunner(agent, model, config).run(history=history, state=session.state)
    with pytest.raises(RealtimeLost):
        await again.__aenter__()
    assert (again.state.calls, again.abandoned) == (session.state.calls, ())
    assert len(again.state.calls) == 1
