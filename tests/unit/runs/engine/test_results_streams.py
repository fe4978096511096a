"""Runs that are watched: their events, readers that are slow or leave, and stops."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from capsule_tasks.errors import ModelFailed, RunCancelled
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import ToolContext
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.engine.ports import UNCERTAIN
from capsule_tasks.runs.engine.runner import Runner
from capsule_tasks.runs.models.model import ModelRetries, ModelSettings
from capsule_tasks.runs.records import Item
from capsule_tasks.testing.models import ScriptedModel, breaks_off, calls, hands_over
from tests.unit.runs.engine.runs import MemorySession, spelled


@function_tool
async def look(order: int) -> str:
    """Look an order up."""
    return f"order {order}"


CALL = calls("look", {"order": 1}, "c1")


async def test_the_events_of_a_run() -> None:
    other = Agent(name="Other", model=ScriptedModel(["done"]))
    replies = [CALL, hands_over("Other", call_id="h1")]
    agent = Agent(name="First", model=ScriptedModel(replies), tools=[look], handoffs=[other])
    stream = Runner.run_streamed(agent, "hi", session=MemorySession())
    events = [(event.kind, event.agent) async for event in stream.events()]
    assert events == [
        ("agent", "First"),
        ("arguments_delta", "First"),
        ("usage", "First"),
        ("item", "First"),
        ("tool_started", "First"),
        ("item", "First"),
        ("arguments_delta", "First"),
        ("usage", "First"),
        ("item", "First"),
        ("item", "First"),
        ("agent", "Other"),
        ("text_delta", "Other"),
        ("usage", "Other"),
        ("item", "Other"),
    ]
    assert stream.is_over
    assert (stream.final_output, stream.agent) == ("done", other)


async def test_deltas_of_an_attempt_that_failed_are_taken_back() -> None:
    error = ModelFailed("model", "busy", is_retryable=True)
    settings = ModelSettings(retries=ModelRetries(attempts=2, pause_s=0.0))
    model = ScriptedModel([breaks_off("wrong", error), "right"])
    session = MemorySession()
    agent = Agent(name="Agent", model=model, model_settings=settings)
    stream = Runner.run_streamed(agent, "hi", session=session)
    kinds = [event.kind async for event in stream.events()]
    assert kinds == ["agent", "text_delta", "attempt_discarded", "text_delta", "usage", "item"]
    assert spelled(session.items) == ["user hi", "says right"]


async def test_a_run_does_not_wait_for_its_reader_and_goes_on_without_it() -> None:
    session = MemorySession()
    agent = Agent(name="Agent", model=ScriptedModel([CALL, "done"]), tools=[look])
    stream = Runner.run_streamed(agent, "hi", session=session)
    async for _ in stream.events():
        break
    await stream.result()
    assert [spelled(batch) for batch in session.batches] == [
        ["user hi", "call c1", "output c1 order 1"],
        ["says done"],
    ]
    # Those events that were not read are still there.
    assert [event.kind async for event in stream.events()][-1] == "item"


async def test_the_error_comes_after_the_events() -> None:
    agent = Agent(name="Agent", model=ScriptedModel([CALL, OSError("down")]), tools=[look])
    stream = Runner.run_streamed(agent, "hi")
    events = stream.events()
    kinds = [(await anext(events)).kind for _ in range(6)]
    assert kinds[-1] == "item"
    with pytest.raises(ModelFailed):
        await anext(events)
    with pytest.raises(ModelFailed):
        await stream.result()


async def test_a_run_that_stops_after_its_turn_goes_on_later() -> None:
    session = MemorySession()
    agent = Agent(name="Agent", model=ScriptedModel([CALL, "done"]), tools=[look])
    stream = Runner.run_streamed(agent, "hi", session=session)
    async for event in stream.events():
        if event.kind == "tool_started":
            stream.cancel(mode="after_turn")
    result = await stream.result()
    assert (result.final_output, result.state.turn) == (None, 1)
    last = await Runner.run(agent, result.state, session=session)
    assert last.final_output == "done"
    assert spelled(session.items) == ["user hi", "call c1", "output c1 order 1", "says done"]


async def test_a_cancelled_run_ends_its_tools_and_says_so() -> None:
    entered, ended = asyncio.Event(), []

    @function_tool
    async def wait() -> str:
        """Wait."""
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("wait")
        return ""

    session = MemorySession()
    replies = [[CALL, calls("wait", {}, "c2")]]
    agent = Agent(name="Agent", model=ScriptedModel(replies), tools=[look, wait])
    stream = Runner.run_streamed(agent, "hi", session=session)
    await entered.wait()
    stream.cancel()
    stream.cancel()
    with pytest.raises(RunCancelled):
        await stream.result()
    assert {event.kind async for event in stream.events()} >= {"agent", "tool_started"}
    assert ended == ["wait"]
    # The tool that was cut may have done something: nobody makes its call again unawares.
    assert spelled(session.items) == [
        *("user hi", "call c1", "call c2", "output c1 order 1", f"output c2 {UNCERTAIN}")
    ]
    stream.cancel()
    assert (await stream.rewind()).removed
    assert session.items == []


async def test_a_run_that_is_cancelled_before_it_has_begun_ends() -> None:
    session = MemorySession()
    stream = Runner.run_streamed(
        Agent(name="Agent", model=ScriptedModel([])), "hi", session=session
    )
    stream.cancel()
    assert [event async for event in stream.events()] == []
    with pytest.raises(RunCancelled):
        await stream.result()
    assert session.items == []


async def test_tools_publish_events_from_any_thread() -> None:
    @function_tool
    def work(context: ToolContext) -> str:
        """Work in a thread."""
        assert context.publish is not None
        context.publish("progress", threading.get_ident())
        return "ok"

    model = ScriptedModel([calls("work", {}, "c1"), "done"])
    stream = Runner.run_streamed(Agent(name="Agent", model=model, tools=[work]), "hi")
    [ident] = [event.data async for event in stream.events() if event.kind == "progress"]
    assert ident != threading.get_ident()


async def test_nothing_is_published_where_nobody_watches() -> None:
    seen: list[Any] = []

    @function_tool
    async def work(context: ToolContext) -> str:
        """Work."""
        seen.append(context.publish)
        return "ok"

    model = ScriptedModel([calls("work", {}, "c1"), "done"])
    await Runner.run(Agent(name="Agent", model=model, tools=[work]), "hi")
    assert seen == [None]


async def test_a_cancel_while_the_final_output_is_stored_comes_too_late() -> None:
    class CancelledWhenStored(MemorySession):
        async def add_items(self, items: list[Item]) -> None:
            stream.cancel()
            await super().add_items(items)

    agent = Agent(name="Agent", model=ScriptedModel(["done"]))
    stream = Runner.run_streamed(agent, "hi", session=CancelledWhenStored())
    assert (await stream.result()).final_output == "done"
