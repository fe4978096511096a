"""Runner: its arguments, its errors, and sessions that fail."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest

from capsule_tasks.errors import (
    ContextNotRestorable,
    InvalidSetting,
    LoopIsRunning,
    MaxTurnsExceeded,
    ModelFailed,
    NotRewound,
    RunStopped,
    ToolTimeout,
    TurnNotStored,
)
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import RunContext, ToolContext
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.agents.handoffs import Handoff
from capsule_tasks.runs.agents.run_config import ModelInput, RunConfig
from capsule_tasks.runs.engine.ports import UNCERTAIN
from capsule_tasks.runs.engine.runner import Runner
from capsule_tasks.testing.models import ScriptedModel, calls
from tests.unit.runs.engine.runs import MODES, MemorySession, Mode, spelled


@function_tool
async def look(order: int) -> str:
    """Look an order up."""
    return f"order {order}"


CALL = calls("look", {"order": 1}, "c1")


def agent_of(*replies: Any, **options: Any) -> Agent:
    return Agent(name="Agent", model=ScriptedModel(replies), tools=[look], **options)


@pytest.mark.parametrize(
    "options",
    [{"max_turns": 0}, {"max_turns": True}, {"session": "s1"}, {"run_config": {"model": "x"}}],
    ids=str,
)
async def test_wrong_arguments_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=next(iter(options))):
        await Runner.run(agent_of("done"), "hi", **options)


async def test_an_agent_and_an_input_are_needed() -> None:
    wrong: Any = "agent"
    with pytest.raises(InvalidSetting, match="agent"):
        await Runner.run(wrong, "hi")
    with pytest.raises(InvalidSetting, match="input"):
        await Runner.run(agent_of("done"), wrong.encode())
    with pytest.raises(InvalidSetting, match="model"):
        await Runner.run(Agent(name="Agent"), "hi")


async def test_names_of_models_are_for_the_provider() -> None:
    models = {"big": ScriptedModel(["done"])}
    config = RunConfig(model_provider=models.__getitem__)
    result = await Runner.run(Agent(name="Agent", model="big"), "hi", run_config=config)
    assert result.final_output == "done"


async def test_a_history_and_a_conversation_of_the_server_have_two_owners() -> None:
    with pytest.raises(InvalidSetting, match="session"):
        await Runner.run(
            agent_of("done"), "hi", session=MemorySession(), previous_response_id="resp_1"
        )


async def test_a_conversation_that_the_server_keeps_is_never_replayed() -> None:
    agent = agent_of(CALL, "done", "more")
    model: Any = agent.model
    config = RunConfig(auto_previous_response_id=True)
    first = await Runner.run(agent, "hi", run_config=config)
    seen = [(spelled(list(each.input)), each.previous_response_id) for each in model.requests]
    assert seen[0] == (["user hi"], None)
    assert seen[1][0] == ["output c1 order 1"]
    assert str(seen[1][1]).startswith("resp_")
    server = first.state.conversation
    assert server is not None
    assert server.previous_response_id not in (None, seen[1][1])
    await Runner.run(agent, "more", previous_response_id=server.previous_response_id)
    assert spelled(list(model.requests[2].input)) == ["user more"]


async def test_the_context_reaches_callbacks_and_never_the_items() -> None:
    seen: list[Any] = []

    @function_tool
    async def show(context: ToolContext) -> str:
        """Show."""
        seen.append((context.context, context.turn, context.call_id, context.key))
        return "ok"

    def instructions(run: RunContext, agent: Agent) -> str:
        seen.append((run.context, run.session_id, agent.name))
        return "Help."

    model = ScriptedModel([calls("show", {}, "c1"), "done"])
    agent = Agent(name="Agent", model=model, tools=[show], instructions=instructions)
    session = MemorySession()
    context = {"user": 7, "password": "x"}
    result = await Runner.run(agent, "hi", session=session, context=context)
    assert seen == [
        (context, "memory", "Agent"),
        (context, 0, "c1", "c1"),
        (context, "memory", "Agent"),
    ]
    assert model.requests[0].instructions == "Help."
    assert "user" not in str([item for item in session.items if "role" not in item])
    assert result.state.context.value == {"user": 7}
    assert result.usage.requests == 2


async def test_a_context_that_cannot_be_stored_is_given_again() -> None:
    @function_tool(needs_approval=True)
    async def pay() -> str:
        """Pay."""
        return "paid"

    model = ScriptedModel([calls("pay", {}, "c1"), "done"])
    agent = Agent(name="Agent", model=model, tools=[pay])
    result = await Runner.run(agent, "hi", context=object())
    state = result.state.approve("c1")
    with pytest.raises(ContextNotRestorable):
        await Runner.run(agent, state)
    assert (await Runner.run(agent, state, context=object())).final_output == "done"


@pytest.mark.parametrize("mode", MODES)
async def test_a_failed_run_goes_on_from_its_state_or_is_rewound(mode: Mode) -> None:
    agent = agent_of(CALL, OSError("down"), "done")
    session = MemorySession()
    error = (await mode.run(agent, "hi", session=session)).error
    assert isinstance(error, ModelFailed)
    assert isinstance(error.__cause__, OSError)
    last = await mode.run(agent, error.state, session=session)
    assert last.result.final_output == "done"
    assert spelled(session.items) == ["user hi", "call c1", "output c1 order 1", "says done"]
    # Items that came after it stay, and so do all that came before.
    assert not (await error.rewind()).removed
    assert len(session.items) == 4
    assert (await last.result.rewind()).removed
    assert (await error.rewind()).removed
    assert session.items == []


async def test_more_turns_for_a_run_that_had_too_few() -> None:
    agent = agent_of(CALL, "done")
    with pytest.raises(MaxTurnsExceeded) as caught:
        await Runner.run(agent, "hi", max_turns=1)
    with pytest.raises(MaxTurnsExceeded):
        await Runner.run(agent, caught.value.state)
    assert (await Runner.run(agent, caught.value.state, max_turns=2)).final_output == "done"


async def test_a_run_after_a_rewind_that_was_not_confirmed_is_refused() -> None:
    session = MemorySession()
    result = await Runner.run(agent_of("done"), "hi", session=session)
    session.fails_with = OSError("lost")
    with pytest.raises(OSError, match="lost"):
        await result.rewind()
    with pytest.raises(NotRewound):
        await Runner.run(agent_of("done"), "hi", session=session)
    session.fails_with = None
    assert (await result.rewind()).removed
    # The rewind was one operation, so that a history that has removed the items removes no others.
    first, again = session.operations
    assert first == again is not None
    await Runner.run(agent_of("done"), "hi", session=session)
    assert spelled(session.items) == ["user hi", "says done"]


async def test_without_a_session_nothing_can_be_rewound() -> None:
    result = await Runner.run(agent_of("done"), "hi")
    with pytest.raises(NotRewound):
        await result.rewind()


@pytest.mark.parametrize("mode", MODES)
async def test_a_turn_that_cannot_be_stored_is_told_with_its_items(mode: Mode) -> None:
    session = MemorySession()
    session.fails_with = OSError("full")
    error = (await mode.run(agent_of(CALL, "done"), "hi", session=session)).error
    assert isinstance(error, TurnNotStored)
    assert spelled(list(error.unsaved)) == ["user hi", "call c1", "output c1 order 1"]
    assert (error.items, error.state.turn) == ([], 0)


async def test_errors_of_runs_travel_without_what_lives_in_one_process() -> None:
    with pytest.raises(RunStopped) as caught:
        await Runner.run(agent_of(OSError("down")), "hi", session=MemorySession())
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.state.run_id == caught.value.state.run_id
    with pytest.raises(NotRewound):
        await error.rewind()


def test_a_call_that_blocks() -> None:
    assert Runner.run_sync(agent_of("done"), "hi").final_output == "done"


async def test_a_call_that_blocks_within_a_loop_is_refused() -> None:
    with pytest.raises(LoopIsRunning, match="await"):
        Runner.run_sync(agent_of("done"), "hi")


async def test_tools_that_are_switched_off_are_not_there() -> None:
    from dataclasses import replace

    enabled = [True]
    tool = replace(look, is_enabled=lambda _run, _agent: enabled[0])
    model = ScriptedModel(["one", "two"])
    agent = Agent(name="Agent", model=model, tools=[tool])
    await Runner.run(agent, "hi")
    enabled[0] = False
    await Runner.run(agent, "hi")
    assert [len(request.tools) for request in model.requests] == [1, 0]


async def test_a_filter_may_return_items_that_utf8_cannot_write() -> None:
    made = [{"role": "user", "content": text} for text in ("\ud800", "hi")]
    config = RunConfig(input_filter=lambda _run, _agent, _found: ModelInput(made, None))
    assert (await Runner.run(agent_of("done"), "hi", run_config=config)).final_output == "done"


async def test_a_function_hears_of_a_handoff_with_what_the_model_gave() -> None:
    heard: list[Any] = []

    class Reason(msgspec.Struct):
        why: str

    def hear(run: RunContext, reason: Reason) -> None:
        heard.append((run.context, run.turn, reason.why))

    other = Agent(name="Other", model=ScriptedModel(["done"]))
    handoff = Handoff(agent=other, name="to_other", input_type=Reason, on_handoff=hear)
    agent = agent_of(CALL, calls("to_other", {"why": "late"}, "h1"), handoffs=[handoff])
    result = await Runner.run(agent, "hi", context={"user": 7})
    assert (result.final_output, heard) == ("done", [({"user": 7}, 1, "late")])


async def test_callbacks_may_be_objects_whose_call_is_a_coroutine() -> None:
    class Callback:
        def __init__(self, result: Any) -> None:
            self.result, self.calls = result, 0

        async def __call__(self, *_about: Any) -> Any:
            self.calls += 1
            return self.result

    callbacks = [Callback("Help."), Callback(True), Callback(None)]
    instructions, is_enabled, on_handoff = callbacks
    other = Agent(name="Other", model=ScriptedModel(["done"]))
    handoff = Handoff(agent=other, is_enabled=is_enabled, on_handoff=on_handoff)
    replies = [calls("transfer_to_other", {}, "h1")]
    agent = agent_of(*replies, handoffs=[handoff], instructions=instructions)
    assert (await Runner.run(agent, "hi")).final_output == "done"
    assert agent.model.requests[0].instructions == "Help."  # type: ignore[union-attr]
    assert [each.calls for each in callbacks] == [1, 1, 1]


@pytest.mark.parametrize("on_uncertain", ["tell", "fail"])
async def test_a_call_that_took_too_long_is_uncertain(on_uncertain: Any) -> None:
    @function_tool(on_uncertain=on_uncertain)
    async def slow() -> str:
        """Take long."""
        raise ToolTimeout("slow", 1.0)  # as the limit of a tool does

    session = MemorySession()
    model = ScriptedModel([calls("slow", {}, "c1"), "done"])
    agent = Agent(name="Agent", model=model, tools=[slow])
    try:
        result = await Runner.run(agent, "hi", session=session)
    except ToolTimeout:
        assert on_uncertain == "fail"
    else:
        assert (on_uncertain, result.final_output) == ("tell", "done")
    assert spelled(session.items)[:3] == ["user hi", "call c1", f"output c1 {UNCERTAIN}"]
