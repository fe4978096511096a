"""What becomes of each event of a model: events of the session, items, usage and calls."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from capsule_tasks import Agent, Verdict, function_tool, input_guardrail, output_guardrail
from capsule_tasks.errors import InvalidSetting, ModelFailed, RealtimeRefused
from capsule_tasks.realtime.events import (
    RealtimeAgentEnd,
    RealtimeAgentStart,
    RealtimeAudio,
    RealtimeAudioEnd,
    RealtimeAudioInterrupted,
    RealtimeErrorEvent,
    RealtimeEvent,
    RealtimeGuardrailTripped,
    RealtimeHistoryAdded,
    RealtimeHistoryUpdated,
    RealtimeInputAudioTimeout,
    RealtimeRawModelEvent,
    RealtimeTextDelta,
    RealtimeToolUpdate,
)
from capsule_tasks.realtime.model import (
    AudioDelta,
    AudioDone,
    AudioInterrupted,
    InputTimedOut,
    InputTranscribed,
    Interrupt,
    ItemChanged,
    ItemDeleted,
    ModelErred,
    ModelEvent,
    ResponseEnded,
    ResponseStarted,
    SendAudio,
    SendMessage,
    ServerEvent,
    TextDelta,
    UpdateSettings,
)
from capsule_tasks.realtime.runner import RealtimeRunner
from capsule_tasks.realtime.session.session import RealtimeSession
from capsule_tasks.realtime.settings import RealtimeConfig
from capsule_tasks.runs import Spent
from tests.unit.realtime.session.fake_model import FakeModel

QUIET = RealtimeConfig(raw_model_events=False)
SUPPORT, BILLING = Agent(name="Support"), Agent(name="Billing")


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


def session_of(
    model: FakeModel, agent: Agent = SUPPORT, config: RealtimeConfig = QUIET
) -> RealtimeSession:
    return RealtimeRunner(agent, model, config).run()


async def shown(model: FakeModel, *events: ModelEvent) -> list[RealtimeEvent]:
    """The events of a session for those of its model."""
    async with session_of(model) as session:
        model.says(*events)
    return [event async for event in session]


def message(role: str, item_id: str, *parts: dict[str, Any], status: str) -> dict[str, Any]:
    about = {"id": item_id, "type": "message", "role": role}
    return {**about, "status": status, "content": list(parts)}


async def test_an_answer_is_shown_from_its_start_to_its_end(model: FakeModel) -> None:
    spent = Spent(requests=1, input_tokens=3)
    events = await shown(
        model,
        ResponseStarted("r"),
        AudioDelta(b"ab", "r", "item"),
        TextDelta("Hi", "r", "item", is_transcript=True),
        AudioDone("r", "item"),
        ResponseEnded("r", spent=spent),
    )
    assert [each for each in events if not each.type.startswith("history")] == [
        RealtimeAgentStart(SUPPORT, "r"),
        RealtimeAudio(b"ab", "r", "item", 0),
        RealtimeTextDelta("Hi", "r", "item", is_transcript=True),
        RealtimeAudioEnd("r", "item", 0),
        RealtimeAgentEnd(SUPPORT, "r", "completed", spent),
    ]


async def test_the_agent_that_began_an_answer_ends_it_and_has_its_usage(model: FakeModel) -> None:
    async with session_of(model, Agent(name="Support", handoffs=[BILLING])) as session:
        support = session.agent
        model.says(ResponseStarted("r"))
        await session.update_agent(BILLING)
        model.says(ResponseEnded("r", spent=Spent(output_tokens=2)))
        model.says(ResponseStarted("s"), ResponseEnded("s", spent=Spent(output_tokens=3)))
    ends = [each async for each in session if isinstance(each, RealtimeAgentEnd)]
    assert [end.agent for end in ends] == [support, BILLING]
    assert session.usage.output_tokens == session.context.usage.output_tokens == 5
    by_agent = {each.agent.name: each.output_tokens for each in session.state.usage}
    assert by_agent == {"Support": 2, "Billing": 3}


async def test_an_answer_that_fails_is_an_error_in_the_words_of_the_server(
    model: FakeModel,
) -> None:
    data = {"code": "overloaded"}
    events = await shown(
        model, ResponseStarted("r"), ResponseEnded("r", status="failed", error=data)
    )
    [error] = [each for each in events if isinstance(each, RealtimeErrorEvent)]
    assert isinstance(error.error, ModelFailed)
    assert error.data == data


async def test_an_error_of_the_server_names_the_message_that_it_is_about(
    model: FakeModel,
) -> None:
    events = await shown(model, ModelErred("bad", "no such item", "event_1", {"code": "bad"}))
    [error] = events
    assert isinstance(error, RealtimeErrorEvent)
    assert isinstance(error.error, RealtimeRefused)
    assert (error.error.code, error.data) == ("bad", {"code": "bad"})
    assert str(error.error) == "the realtime model refused the message 'event_1': no such item"


async def test_items_are_shown_when_they_come_and_when_they_change(model: FakeModel) -> None:
    audio = {"type": "input_audio", "transcript": None}
    item = message("user", "item", audio, status="completed")
    events = await shown(
        model,
        ItemChanged(item, is_final=True),
        InputTranscribed("item", transcript="Good morning"),
        ItemDeleted("item"),
    )
    added, updated, deleted = events
    assert isinstance(added, RealtimeHistoryAdded)
    assert added.item["id"] == "item"
    assert isinstance(updated, RealtimeHistoryUpdated)
    assert isinstance(deleted, RealtimeHistoryUpdated)
    assert deleted.history == []


async def test_a_transcription_that_fails_is_an_error(model: FakeModel) -> None:
    item = message("user", "item", {"type": "input_audio"}, status="completed")
    failed = InputTranscribed("item", error={"code": "unclear"})
    events = await shown(model, ItemChanged(item, is_final=True), failed)
    assert [each.data for each in events if isinstance(each, RealtimeErrorEvent)] == [
        {"code": "unclear"}
    ]


async def test_audio_that_is_interrupted_is_removed_from_what_waits(model: FakeModel) -> None:
    events = await shown(
        model,
        ResponseStarted("r"),
        AudioDelta(b"abc", "r", "item"),
        AudioDelta(b"xy", "r", "other"),
        AudioInterrupted("item", played_ms=0, total_ms=10),
        InputTimedOut("item_2"),
    )
    assert events[1:] == [
        RealtimeAudio(b"xy", "r", "other", 0),
        RealtimeAudioInterrupted("item", 0, discarded_bytes=3),
        RealtimeInputAudioTimeout("item_2"),
    ]


# --- raw events ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_model", "of_server", "shown_types"),
    [
        (True, True, ["server_event", "input_timed_out"]),
        (True, False, ["server_event", "input_timed_out"]),
        (False, True, ["server_event"]),
        (False, False, []),
    ],
)
async def test_raw_events_are_those_that_the_configuration_wants(
    model: FakeModel, of_model: bool, of_server: bool, shown_types: list[str]
) -> None:
    """A model sends no message that it knows unless it is asked to; others are rare."""
    config = RealtimeConfig(raw_model_events=of_model, raw_server_events=of_server)
    async with session_of(model, config=config) as session:
        model.says(ServerEvent(b"{}"), InputTimedOut())
    raw = [each async for each in session if isinstance(each, RealtimeRawModelEvent)]
    assert [each.data.type for each in raw] == shown_types


# --- slow consumers ------------------------------------------------------------------------------


async def test_the_model_is_paused_for_a_slow_consumer_but_not_during_a_command(
    model: FakeModel,
) -> None:
    async with session_of(model, config=RealtimeConfig(event_limit=4)) as session:
        [pause] = model.says(InputTimedOut(), InputTimedOut())
        waiting = asyncio.ensure_future(pause)
        await asyncio.sleep(0)
        assert not waiting.done()
        await session.update_agent(BILLING)  # the model reads its answer
        await waiting
        assert len(model.told(UpdateSettings)) == 1
        [pause] = model.says(InputTimedOut())
        waiting = asyncio.ensure_future(pause)
        for _ in range(4):
            await anext(aiter(session))
        await waiting


async def test_control_events_come_whole_and_raw_ones_are_missing_visibly(
    model: FakeModel,
) -> None:
    async with session_of(model, config=RealtimeConfig(event_limit=4)) as session:
        for pause in model.says(*(InputTimedOut(str(number)) for number in range(5))):
            pause.close()  # type: ignore[attr-defined]
    events = [event async for event in session]
    timeouts = [each.item_id for each in events if isinstance(each, RealtimeInputAudioTimeout)]
    assert timeouts == ["0", "1", "2", "3", "4"]
    raw = sum(isinstance(each, RealtimeRawModelEvent) for each in events)
    missing = sum(getattr(each, "other_events", 0) for each in events)
    assert (raw, missing) == (2, 3)


async def test_updates_of_a_tool_in_a_thread_come_in_order(model: FakeModel) -> None:
    async with session_of(model) as session:

        def publish() -> None:
            for number in range(3):
                session.emit(RealtimeToolUpdate(SUPPORT, "call_1", "tool_text", number))

        thread = threading.Thread(target=publish)
        thread.start()
        updates: list[Any] = [await anext(aiter(session)) for _ in range(3)]
        thread.join()
    assert [update.data for update in updates] == [0, 1, 2]


# --- commands ------------------------------------------------------------------------------------

PART = {"type": "input_text", "text": "Hello"}


@pytest.mark.parametrize(
    "given",
    [
        "Hello",
        [PART],
        {"role": "user", "content": "Hello"},
        {"type": "message", "role": "user", "content": [PART]},
    ],
)
async def test_a_message_is_a_text_or_parts_or_an_item_of_the_user(
    model: FakeModel, given: Any
) -> None:
    async with session_of(model) as session:
        await session.send_message(given)
    assert model.commands == [SendMessage((PART,))]


@pytest.mark.parametrize(
    "given",
    [
        *("", [], b"Hello", 5, None, {}, [5], ["Hello"], [{}], [{"type": "input_text"}]),
        {"role": "assistant", "content": "Hello"},
        {"type": "function_call", "role": "user", "content": "Hello"},
    ],
)
async def test_what_is_no_message_is_refused(model: FakeModel, given: Any) -> None:
    async with session_of(model) as session:
        with pytest.raises(InvalidSetting, match="message"):
            await session.send_message(given)
    assert model.commands == []


async def test_audio_is_bytes(model: FakeModel) -> None:
    async with session_of(model) as session:
        await session.send_audio(b"ab")
        await session.send_audio(bytearray(b"cd"), commit=True)
        with pytest.raises(InvalidSetting, match="data"):
            await session.send_audio("audio")  # type: ignore[arg-type]
        await session.interrupt()
    assert model.commands == [SendAudio(b"ab"), SendAudio(b"cd", commit=True), Interrupt()]


async def test_a_message_that_a_guardrail_refuses_is_not_sent(model: FakeModel) -> None:
    @input_guardrail(parallel=False)
    async def polite(context: Any, agent: Agent, given: Any) -> Verdict:
        return Verdict(tripped="please" not in given)

    async with session_of(model, Agent(name="Support", input_guardrails=[polite])) as session:
        await session.send_message("Go away")
        await session.send_message("Go away, please")
    tripped = [each async for each in session if isinstance(each, RealtimeGuardrailTripped)]
    assert [each.message for each in tripped] == ["Go away"]
    assert len(model.commands) == 1


async def test_a_stopped_answer_is_heard_and_read_no_further(model: FakeModel) -> None:
    @output_guardrail
    async def discreet(context: Any, agent: Agent, output: str) -> Verdict:
        return Verdict(tripped="secret" in output)

    config = RealtimeConfig(raw_model_events=False, guardrail_debounce_chars=6)
    agent = Agent(name="Support", output_guardrails=[discreet])
    async with session_of(model, agent, config) as session:
        model.says(ResponseStarted("r"), TextDelta("secret", "r", "item"))
        while not model.told(SendMessage):
            await asyncio.sleep(0)
        model.says(TextDelta(" is", "r", "item"), AudioDelta(b"ab", "r", "item"))
    events = [event async for event in session]
    deltas = [each.delta for each in events if isinstance(each, RealtimeTextDelta)]
    assert deltas == ["secret"]
    assert not [each for each in events if isinstance(each, RealtimeAudio)]
    assert model.told(Interrupt) == [Interrupt("r")]


@function_tool
async def look() -> str:
    return "seen"
