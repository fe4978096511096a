"""Guardrails of sessions over a socket: what is still played, what is sent, and in which order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from capsule_tasks.realtime import (
    OpenAIRealtime,
    PlaybackTracker,
    RealtimeConfig,
    RealtimeSettings,
)
from capsule_tasks.realtime.model import Command, Interrupt, RealtimeModel
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.agents.guardrails import InputGuardrail, OutputGuardrail, Verdict
from capsule_tasks.testing.models import calls
from capsule_tasks.testing.realtime import Hold, speaks, writes
from tests.integration.realtime.scenarios import Talk, talk_to
from tests.unit.realtime.noted_guardrails import Guardrail

TRANSCRIBED = RealtimeSettings(transcription={"model": "gpt-4o-transcribe"})
LONG = "x" * 300
"""Takes 3 s to say, so that it is still played when a test looks."""


class StopsLate(OpenAIRealtime):
    """A model that stops an answer only once the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_stop = asyncio.Event()

    async def send_event_if(self, command: Command, condition: Callable[[], bool]) -> bool:
        if isinstance(command, Interrupt):
            await self.may_stop.wait()
        return await super().send_event_if(command, condition)


@asynccontextmanager
async def guarded(
    agent: Agent | None = None,
    *,
    every: int = 10,
    model: RealtimeModel | None = None,
    playback: PlaybackTracker | None = None,
    settings: RealtimeSettings | None = None,
    **config: Any,
) -> AsyncIterator[Talk]:
    given = RealtimeConfig(guardrail_debounce_chars=every, **config)
    about: dict[str, Any] = {"model": model, "playback": playback, "settings": settings}
    async with talk_to(agent or Agent(name="Agent"), config=given, **about) as talk:
        yield talk


def messages(talk: Talk) -> list[str]:
    """The texts of the messages of the user that the server has got."""
    items = [each["item"] for each in talk.server.find("conversation.item.create")]
    return [item["content"][0]["text"] for item in items if item["type"] == "message"]


def order(talk: Talk, *kinds: str) -> list[str]:
    """The messages of some types that the server has got, in order."""
    return [each["type"] for each in talk.server.received if each["type"] in kinds]


# --- answers -------------------------------------------------------------------------------------


async def test_a_spoken_answer_is_stopped_where_it_was_played_up_to() -> None:
    guardrail, tracker, model = Guardrail(), PlaybackTracker(), StopsLate()
    guardrails = [guardrail.held().of_output()]
    hold, end = Hold(), Hold()
    async with guarded(model=model, playback=tracker, output_guardrails=guardrails) as talk:
        talk.replies += [
            speaks("This is a secret", hold, " that nobody may know", end),
            writes("No."),
        ]
        await talk.session.send_message("hi")
        audio = await talk.event("audio")
        tracker.on_play_ms(audio.item_id, audio.content_index, 60)
        guardrail.may_answer.set()
        trip = await talk.event("guardrail_tripped")
        hold.release()
        for _ in range(3):  # the audio before the trip, and what comes while the answer goes on
            await talk.model_event("audio_delta")
        model.may_stop.set()
        cut = await talk.hear("conversation.item.truncate")
        stopped = await talk.event("agent_end")
        answered = await talk.event("agent_end")
        interrupted = await talk.event("audio_interrupted")
    assert (cut["item_id"], cut["audio_end_ms"]) == (audio.item_id, 60)
    assert trip.response_id == audio.response_id == stopped.response_id
    assert (stopped.status, answered.status) == ("cancelled", "completed")
    assert interrupted.item_id == audio.item_id
    after = talk.seen[talk.seen.index(trip) :]
    assert [each for each in after if each.type == "audio"] == []
    assert talk.count("guardrail_tripped") == 1
    assert "guardrail: no_secrets" in messages(talk)[1]


async def test_a_written_answer_is_stopped() -> None:
    hold = Hold()
    async with guarded(output_guardrails=[Guardrail().of_output()]) as talk:
        talk.replies += [writes("This is a secret", hold), writes("No.")]
        await talk.session.send_message("hi")
        trip = await talk.event("guardrail_tripped")
        ends = [await talk.event("agent_end") for _ in range(2)]
        await talk.settled()
    assert [end.status for end in ends] == ["cancelled", "completed"]
    (cancel,) = talk.server.find("response.cancel")
    assert cancel["response_id"] == trip.response_id == ends[0].response_id
    assert talk.server.count("conversation.item.truncate") == 0
    assert talk.server.count("response.create") == 2


async def test_a_trip_at_the_end_stops_what_is_still_played() -> None:
    async with guarded(every=1000, output_guardrails=[Guardrail().of_output()]) as talk:
        talk.replies += [speaks(f"This is a secret: {LONG}"), writes("No.")]
        await talk.session.send_message("hi")
        trip = await talk.event("guardrail_tripped")
        ends = [await talk.event("agent_end") for _ in range(2)]
        cut = await talk.hear("conversation.item.truncate")
    assert trip.message == f"This is a secret: {LONG}"
    assert cut["audio_end_ms"] < 3000
    assert [end.status for end in ends] == ["completed", "completed"]
    assert talk.server.count("response.cancel") == 0
    assert len(messages(talk)) == 2


async def test_a_trip_of_an_older_answer_does_not_touch_the_newer_one() -> None:
    guardrail, hold = Guardrail().held(), Hold()
    async with guarded(output_guardrails=[guardrail.of_output()]) as talk:
        talk.replies += [speaks(f"This is a secret: {LONG}"), speaks("This is ", hold, "fine.")]
        await talk.session.send_message("hi")
        old = await talk.event("agent_end")
        await talk.session.send_message("Something else.")
        await hold.reached()
        new = [await talk.event("agent_start") for _ in range(2)][1]
        guardrail.may_answer.set()
        trip = await talk.event("guardrail_tripped")
        cut = await talk.hear("conversation.item.truncate")
        hold.release()
        end = await talk.event("agent_end")
        await talk.settled()
    assert trip.response_id == old.response_id
    items = {each.response_id: each.item_id for each in talk.seen if each.type == "audio"}
    assert cut["item_id"] == items[old.response_id]
    assert (end.response_id, end.status) == (new.response_id, "completed")
    assert talk.server.count("response.cancel") == 0
    assert len(messages(talk)) == 2
    spoken = [each for each in talk.seen if each.type == "audio"]
    assert [each for each in spoken if each.response_id == new.response_id]


async def test_concurrent_checks_stop_an_answer_once() -> None:
    guardrail, hold = Guardrail().held(), Hold()
    async with guarded(output_guardrails=[guardrail.of_output()]) as talk:
        talk.replies += [
            speaks("This is a secret", ", and so is what follows", hold),
            writes("No."),
        ]
        await talk.session.send_message("hi")
        await guardrail.was_asked(times=3)
        guardrail.may_answer.set()
        ends = [await talk.event("agent_end") for _ in range(2)]
        await talk.settled()
    assert [end.status for end in ends] == ["cancelled", "completed"]
    assert talk.count("guardrail_tripped") == 1
    assert len(messages(talk)) == 2
    asked = order(talk, "response.create", "response.cancel", "conversation.item.truncate")
    assert asked.count("response.cancel") == asked.count("conversation.item.truncate") == 1
    assert asked.count("response.create") == 2


async def test_what_follows_a_trip_and_a_tool_call_does_not_overlap() -> None:
    @function_tool
    def look() -> str:
        return "a cat"

    agent = Agent(name="Agent", tools=[look])
    async with guarded(agent, every=1000, output_guardrails=[Guardrail().of_output()]) as talk:
        talk.replies += [[writes("This is a secret."), calls("look")]]
        await talk.session.send_message("hi")
        await talk.event("guardrail_tripped")
        await talk.event("tool_end")
        await talk.event("agent_end")
        await talk.event("agent_end")
        await talk.settled()
    # The server refuses a response while another one is active, which would fail this test.
    assert len(messages(talk)) == 2
    assert len(talk.outputs) == 1


async def test_an_answer_is_checked_by_the_agent_that_began_it() -> None:
    first, second, hold = Guardrail("first"), Guardrail("second"), Hold()
    agents = [
        Agent(name=each.name, output_guardrails=[each.of_output()]) for each in (first, second)
    ]
    async with guarded(agents[0]) as talk:
        talk.replies += [writes("This ", hold, "is a secret"), writes("This is fine.")]
        await talk.session.send_message("hi")
        await hold.reached()
        await talk.session.update_agent(agents[1])
        hold.release()
        trip = await talk.event("guardrail_tripped")
        ends = [await talk.event("agent_end") for _ in range(2)]
    assert trip.agent is agents[0]
    assert [end.agent for end in ends] == agents
    assert {name for name, _ in first.asked} == {"first"}
    assert {text for _, text in second.asked} == {"This is fine."}


async def test_a_guardrail_that_fails_does_not_end_the_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(_run: Any, _agent: Agent, text: Any) -> Verdict:
        raise asyncio.CancelledError if "cancel" in text else ValueError("no model")

    guardrails = [OutputGuardrail(fail, "broken"), Guardrail().of_output()]
    async with guarded(every=1000, output_guardrails=guardrails) as talk:
        talk.replies += [writes("Hello."), writes("You may cancel."), writes("A secret."), "No."]
        with caplog.at_level(logging.WARNING):
            for text in ("hi", "and now?", "what is it?"):
                await talk.session.send_message(text)
                await talk.event("agent_end")
            await talk.event("guardrail_tripped")
            await talk.event("agent_end")
    lines = [each.getMessage() for each in caplog.records if "skipped" in each.getMessage()]
    assert len(lines) == 4
    assert all("'broken'" in line for line in lines)
    assert talk.count("error") == 0


async def test_a_stop_that_fails_is_an_error_event_and_the_session_goes_on() -> None:
    class CannotStop(OpenAIRealtime):
        async def send_event_if(self, command: Command, condition: Callable[[], bool]) -> bool:
            if isinstance(command, Interrupt):
                raise OSError("no stop")
            return await super().send_event_if(command, condition)

    guardrails = [Guardrail().of_output()]
    async with guarded(model=CannotStop(), output_guardrails=guardrails) as talk:
        talk.replies += [writes("This is a secret."), writes("Hello again.")]
        await talk.session.send_message("hi")
        await talk.event("guardrail_tripped")
        error = await talk.event("error")
        await talk.session.send_message("hi")
        ends = [await talk.event("agent_end") for _ in range(2)]
    assert str(error.error) == "no stop"
    assert [end.status for end in ends] == ["completed", "completed"]


async def test_a_close_cancels_running_checks_and_nothing_is_sent_afterwards() -> None:
    guardrail, hold = Guardrail().held(), Hold()
    async with guarded(output_guardrails=[guardrail.of_output()]) as talk:
        talk.replies += [writes("This is a secret", hold)]
        await talk.session.send_message("hi")
        await guardrail.was_asked()
        await talk.session.close()
        guardrail.may_answer.set()
        await talk.hung_up()
    assert talk.count("guardrail_tripped") == 0
    assert talk.server.count("response.cancel") == 0
    assert len(messages(talk)) == 1


async def test_a_guardrail_may_close_the_session() -> None:
    closed = asyncio.Event()

    async def check(_run: Any, _agent: Agent, _text: Any) -> Verdict:
        try:
            await talk.session.close()
        finally:
            closed.set()
        return Verdict(True)

    async with guarded(output_guardrails=[OutputGuardrail(check, "closes")]) as talk:
        talk.replies += [writes("This is a secret")]
        await talk.session.send_message("hi")
        await asyncio.wait_for(closed.wait(), 5)
        await talk.session.close()
        await talk.hung_up()
    assert talk.count("guardrail_tripped") == 0


# --- inputs of the user --------------------------------------------------------------------------


async def test_a_refused_message_is_not_sent() -> None:
    guardrail = Guardrail().of_input(parallel=False)
    async with guarded(input_guardrails=[guardrail]) as talk:
        await talk.session.send_message("a secret")
        trip = await talk.event("guardrail_tripped")
        await talk.session.send_message("hello")
        await talk.event("agent_end")
    assert (trip.message, trip.response_id) == ("a secret", None)
    assert messages(talk) == ["hello"]


async def test_the_answer_to_a_refused_message_is_stopped() -> None:
    guardrail, hold = Guardrail().held(), Hold()
    async with guarded(input_guardrails=[guardrail.of_input()]) as talk:
        talk.replies += [speaks("Well, ", hold), writes("No.")]
        await talk.session.send_message("a secret")
        await hold.reached()
        start = await talk.event("agent_start")
        guardrail.may_answer.set()
        trip = await talk.event("guardrail_tripped")
        ends = [await talk.event("agent_end") for _ in range(2)]
    assert trip.response_id == start.response_id
    assert [end.status for end in ends] == ["cancelled", "completed"]
    assert "guardrail: no_secrets" in messages(talk)[1]


async def test_the_next_answer_is_stopped_if_its_question_was_refused_before() -> None:
    may_answer, hold = asyncio.Event(), Hold()
    async with guarded(input_guardrails=[Guardrail().of_input()]) as talk:
        talk.server.delay("response.create", may_answer)
        talk.replies += [speaks("Well, ", hold), writes("No.")]
        await talk.session.send_message("a secret")
        trip = await talk.event("guardrail_tripped")
        may_answer.set()
        ends = [await talk.event("agent_end") for _ in range(2)]
    assert trip.response_id is None
    assert [end.status for end in ends] == ["cancelled", "completed"]
    assert talk.count("guardrail_tripped") == 1
    assert talk.count("audio") == 0
    assert len(messages(talk)) == 2


@pytest.mark.parametrize("parallel", [True, False])
async def test_the_answer_to_refused_audio_is_stopped(parallel: bool) -> None:
    hold = Hold()
    guardrail = Guardrail().of_input(parallel)
    async with guarded(input_guardrails=[guardrail], settings=TRANSCRIBED) as talk:
        talk.replies += [speaks("Well, ", hold), writes("No.")]
        item_id = await talk.server.user_speaks()
        await hold.reached()
        start = await talk.event("agent_start")
        await talk.server.connection.transcribe(item_id, "a secret")
        trip = await talk.event("guardrail_tripped")
        ends = [await talk.event("agent_end") for _ in range(2)]
    assert (trip.message, trip.response_id) == ("a secret", start.response_id)
    assert [end.status for end in ends] == ["cancelled", "completed"]


async def test_a_late_transcript_does_not_stop_the_answer_to_a_newer_question() -> None:
    hold = Hold()
    guardrail = Guardrail().of_input()
    async with guarded(input_guardrails=[guardrail], settings=TRANSCRIBED) as talk:
        talk.replies += [speaks("Well."), speaks("This is ", hold, "fine.")]
        item_id = await talk.server.user_speaks()
        await talk.event("agent_end")
        await talk.server.user_speaks()
        await hold.reached()
        await talk.server.connection.transcribe(item_id, "a secret")
        trip = await talk.event("guardrail_tripped")
        hold.release()
        end = await talk.event("agent_end")
        await talk.settled()
    assert (trip.message, trip.response_id) == ("a secret", None)
    assert end.status == "completed"
    assert messages(talk) == []


async def test_an_input_guardrail_that_fails_lets_the_message_pass() -> None:
    def fail(_run: Any, _agent: Agent, _text: Any) -> Verdict:
        raise ValueError("no model")

    guardrails = [InputGuardrail(fail, "broken", parallel) for parallel in (True, False)]
    async with guarded(input_guardrails=guardrails) as talk:
        talk.replies += [writes("Hello.")]
        await talk.session.send_message("hi")
        end = await talk.event("agent_end")
    assert end.status == "completed"
    assert talk.count("error") == talk.count("guardrail_tripped") == 0
