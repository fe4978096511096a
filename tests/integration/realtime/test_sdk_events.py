"""Events and errors: scenarios of the SDK's tests, which `docs/realtime_sdk.md` lists."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest

from capsule_tasks.errors import RealtimeLost
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.testing.realtime import Hold, speaks, writes
from tests.integration.realtime.scenarios import talk_to


async def test_a_message_and_audio_and_an_interruption_reach_the_server() -> None:
    async with talk_to(Agent(name="A")) as talk:
        session = talk.session
        await session.send_message("hi")
        item = (await talk.hear("conversation.item.create"))["item"]
        assert (item["role"], item["content"]) == ("user", [{"type": "input_text", "text": "hi"}])
        await talk.hear("response.create")
        await session.send_audio(bytes(4800), commit=True)
        await talk.hear("input_audio_buffer.append")
        await talk.hear("input_audio_buffer.commit")
        await session.interrupt()


async def test_an_interruption_stops_the_answer() -> None:
    async with talk_to(Agent(name="A")) as talk:
        hold = Hold()
        talk.replies.append(writes("An answer that ", hold, " is cut."))
        await talk.session.send_message("hi")
        await hold.reached()
        await talk.session.interrupt()
        await talk.hear("response.cancel")
        assert (await talk.event("agent_end")).status == "cancelled"


ANSWERED = ["agent_start", "history_added", "history_updated", "text_delta", "agent_end"]


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [(writes("Hello"), ANSWERED), (speaks("Hello"), [*ANSWERED, "audio", "audio_end"])],
    ids=["text", "audio"],
)
async def test_an_answer_becomes_events_of_the_session(answer: Any, kinds: list[str]) -> None:
    agent = Agent(name="A")
    async with talk_to(agent) as talk:
        talk.replies.append(answer)
        await talk.session.send_message("hi")
        start, end = await talk.event("agent_start"), await talk.event("agent_end")
        assert (start.agent, end.agent, end.status) == (agent, agent, "completed")
        assert start.response_id == end.response_id
        seen = {each.type for each in talk.seen} - {"raw_model_event"}
        assert seen == set(kinds)
        raw = [each.data.type for each in talk.seen if each.type == "raw_model_event"]
        assert {"response_started", "text_delta", "response_ended"} <= set(raw)
        # An event of the model is shown before what the session makes of it.
        kinds = [
            each.data.type if each.type == "raw_model_event" else each.type for each in talk.seen
        ]
        assert kinds.index("response_started") < kinds.index("agent_start")


async def test_an_error_of_the_server_is_an_event_and_the_session_goes_on() -> None:
    async with talk_to(Agent(name="A")) as talk:
        error = {"type": "server_error", "code": "oops", "message": "Test error"}
        await talk.server.connection.send({"type": "error", "error": error})
        event = await talk.event("error")
        assert "Test error" in str(event.error)
        assert (event.error.code, event.data["message"]) == ("oops", "Test error")
        await talk.session.send_message("hi")
        await talk.event("agent_end")


async def test_usage_adds_up() -> None:
    async with talk_to(Agent(name="A")) as talk:
        for _ in range(2):
            await talk.session.send_message("hi")
            end = await talk.event("agent_end")
        spent = talk.session.usage
        assert (spent.requests, spent.input_tokens, spent.output_tokens) == (2, 20, 10)
        assert end.usage.input_tokens == 10


async def take(session: Any, types: list[str]) -> None:
    async for event in session:
        types.append(event.type)  # noqa: PERF401  the iteration ends with an error


@pytest.mark.parametrize("how", ["regular", "lost"])
async def test_the_end_of_the_connection_comes_after_the_events_before_it(how: str) -> None:
    async with talk_to(Agent(name="A"), collects=False) as talk:
        await talk.session.send_message("hi")
        await talk.model_event("response_ended")
        if how == "regular":
            await talk.server.connection.close()
        else:
            talk.server.connection.abort()
        found: list[str] = []
        for _ in range(2):  # whoever iterates later is told as well
            with pytest.raises(RealtimeLost) if how == "lost" else nullcontext():
                await take(talk.session, found)
            assert found.count("agent_end") == 1
        await talk.session.close()


async def test_a_session_that_fails_cancels_its_tasks_and_tells_the_first_error() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    @function_tool
    async def look() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise RuntimeError("an error after the first one") from None

    async with talk_to(Agent(name="A", tools=[look])) as talk:
        await talk.call("look", call_id="c1")
        await begun.wait()
        talk.server.connection.abort()
        with pytest.raises(RealtimeLost):
            await talk.event("tool_end")
        await cancelled.wait()
        await talk.session.close()


BROKEN: Mapping[str, bytes] = {"no json": b"{", "no object": b"[]", "no type": b"{}"}


@pytest.mark.parametrize("message", BROKEN.values(), ids=BROKEN.keys())
async def test_a_message_that_is_none_is_an_error_event_and_the_session_goes_on(
    message: bytes,
) -> None:
    async with talk_to(Agent(name="A")) as talk:
        await talk.server.connection.send(message)
        await talk.event("error")
        await talk.session.send_message("hi")
        await talk.event("agent_end")
