"""Tool calls of sessions over a socket: what is shown, sent and stored, whatever fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import pytest

from capsule_tasks.errors import GuardrailTripped, RealtimeClosed, ToolFailed
from capsule_tasks.realtime import OpenAIRealtime, tool_calls
from capsule_tasks.realtime.model import Command, SendToolOutput
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import ToolContext
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.agents.guardrails import ToolGuardrail, ToolVerdict
from capsule_tasks.runs.engine.ports import UNCERTAIN
from capsule_tasks.testing.models import calls
from capsule_tasks.testing.realtime import Hold, RealtimeServer, writes
from tests.integration.realtime.openings import opened
from tests.unit.runs.engine.runs import MemorySession, spelled

PAY = calls("pay", {"euros": 5}, "c1")


class Shop:
    """A tool `pay`, and what it has paid."""

    def __init__(self, **options: Any) -> None:
        self.paid: list[int] = []

        @function_tool(**options)
        async def pay(euros: int) -> str:
            self.paid.append(euros)
            return f"paid {euros}"

        self.agent = Agent(name="Shop", tools=[pay])
        self.history = MemorySession()

    @property
    def stored(self) -> list[str]:
        return spelled(self.history.items)


async def test_a_tool_shows_what_it_does_from_its_thread(server: RealtimeServer) -> None:
    @function_tool
    def look(context: ToolContext) -> list[dict[str, str]]:
        assert context.publish is not None
        context.publish("tool_progress", {"done": 1})
        return [{"type": "input_text", "text": "a cat"}, {"type": "input_image", "image_url": "u"}]

    server.add([calls("look", {}, "c1")], "bye")
    async with opened(server, Agent(name="Eye", tools=[look])) as talk:
        end = await talk.until("tool_end")
        text = 'a cat\n{"type":"input_image","image_url":"u"}'
        assert end.output == await talk.output("c1") == text
    about_tool = [kind for kind in talk.kinds if kind.startswith("tool_")]
    assert about_tool == ["tool_start", "tool_update", "tool_end"]
    assert talk.of("tool_update")[0].data == {"done": 1}


class Unsteady(OpenAIRealtime):
    """A model that fails to send the first outputs."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    async def send_event_if(self, command: Command, condition: Callable[[], bool]) -> bool:
        if isinstance(command, SendToolOutput) and self.failures:
            self.failures -= 1
            raise ConnectionError("the line is noisy")
        return await super().send_event_if(command, condition)


async def test_an_output_is_sent_again_and_the_tool_is_not_called_again(
    server: RealtimeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_calls, "_FIRST_RETRY_S", 0.001)
    shop = Shop()
    server.add([PAY], "bye")
    async with opened(server, shop.agent, model=Unsteady(2), history=shop.history) as talk:
        await talk.until("tool_end")
        assert await talk.output("c1") == "paid 5"
        await talk.until("agent_end")
    assert shop.paid == [5]
    [error] = talk.of("error")
    assert isinstance(error.error, ConnectionError)
    assert shop.stored[1:3] == ["call c1", "output c1 paid 5"]


async def test_an_output_that_cannot_be_sent_is_stored_and_nothing_is_sent_after_the_close(
    server: RealtimeServer,
) -> None:
    shop = Shop()
    server.add([PAY])
    async with opened(server, shop.agent, model=Unsteady(1_000_000), history=shop.history) as talk:
        await talk.until("error")
        await talk.until("agent_end")
    await server.wait_for_open(0)
    assert talk.outputs() == []
    assert shop.stored == ["user hi", "call c1", "output c1 paid 5"]
    assert talk.session.state.calls == ()


async def test_no_response_is_asked_for_while_tools_end_after_the_close(
    server: RealtimeServer,
) -> None:
    hold, runs, is_cancelled, may_end = Hold(), asyncio.Event(), asyncio.Event(), asyncio.Event()

    @function_tool
    async def dig() -> None:
        runs.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()
            await may_end.wait()

    server.add([calls("dig"), writes("I dig", hold, " now.")], "Not asked for.")
    async with opened(server, Agent(name="Digger", tools=[dig])) as talk:
        model: Any = talk.session.model
        await runs.wait()
        await hold.reached()
        await talk.session.send_message("Are you there?")  # to be answered after the first answer
        closing = asyncio.create_task(talk.session.close())
        await is_cancelled.wait()
        hold.release()
        async with asyncio.timeout(5):
            while model._connection._protocol._gate.state != "requested":  # the answer has ended
                await asyncio.sleep(0)
        may_end.set()
        await closing
    await server.wait_for_open(0)
    assert server.count("response.create") == 1


async def test_a_call_that_the_close_cancels_is_uncertain(server: RealtimeServer) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    @function_tool
    async def pay(euros: int) -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return f"paid {euros}"

    shop = Shop()
    shop.agent.tools = [pay]
    server.add([PAY])
    async with opened(server, shop.agent, history=shop.history) as talk:
        await begun.wait()
        await talk.until("agent_end")
    assert cancelled.is_set()
    assert shop.stored == ["user hi", "call c1", f"output c1 {UNCERTAIN}"]
    assert (talk.outputs(), talk.session.state.calls) == ([], ())


async def test_a_tool_that_closes_its_session_is_cancelled_and_uncertain(
    server: RealtimeServer,
) -> None:
    sessions: list[Any] = []

    @function_tool
    async def pay(euros: int) -> str:
        await sessions[0].close()
        return f"paid {euros}"

    shop = Shop()
    shop.agent.tools = [pay]
    server.add([PAY])
    async with opened(server, shop.agent, says=None, history=shop.history) as talk:
        sessions.append(talk.session)
        await talk.session.send_message("hi")
        await talk.rest()
        with pytest.raises(RealtimeClosed):
            await talk.session.send_message("hello?")
    assert shop.stored[:2] == ["user hi", "call c1"]
    assert shop.stored[2:] == [f"output c1 {UNCERTAIN}"]


async def test_an_error_that_is_not_for_the_model_ends_the_session_and_is_stored(
    server: RealtimeServer,
) -> None:
    @function_tool(on_error="raise")
    async def pay(euros: int) -> str:
        raise ValueError(f"{euros} is too much")

    shop = Shop()
    shop.agent.tools = [pay]
    server.add([PAY])
    async with opened(server, shop.agent, history=shop.history) as talk:
        with pytest.raises(ToolFailed):
            await talk.rest()
    assert shop.stored[2] == "output c1 The tool failed: ValueError: 5 is too much"
    assert talk.outputs() == []


@pytest.mark.parametrize("kind", ["input_guardrails", "output_guardrails"])
@pytest.mark.parametrize("behavior", ["allow", "reject", "raise"])
async def test_guardrails_of_tools_have_their_say(
    server: RealtimeServer,
    kind: str,
    behavior: Literal["allow", "reject", "raise"],
) -> None:
    guardrail = ToolGuardrail(lambda *_: ToolVerdict(behavior, "not now"), "careful")
    shop = Shop(**{kind: [guardrail]})
    server.add([PAY])
    async with opened(server, shop.agent, history=shop.history) as talk:
        if behavior == "raise":
            with pytest.raises(GuardrailTripped):
                await talk.rest()
            output = f"This call was {'not made' if kind.startswith('in') else 'made'}"
            assert talk.outputs() == []
        else:
            server.add("bye")
            output = "paid 5" if behavior == "allow" else "not now"
            assert (await talk.until("tool_end")).output == output
            await talk.until("agent_end")
    is_called = behavior == "allow" or kind == "output_guardrails"
    assert shop.paid == ([5] if is_called else [])
    assert shop.stored[2].startswith(f"output c1 {output}")
    [found] = [event.data for event in talk.of("tool_update") if event.kind == "guardrail"]
    assert (found["name"], found["behavior"]) == ("careful", behavior)
