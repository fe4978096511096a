"""OpenAIRealtime over real sockets: conversations, settings, the order of writes, pauses."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import broadcast

from capsule_tasks.errors import (
    RealtimeLost,
    RealtimeNoAnswer,
    RealtimeRefused,
)
from capsule_tasks.realtime.model import (
    AudioDelta,
    AudioInterrupted,
    ConnectionEnded,
    Interrupt,
    ItemChanged,
    ItemTruncated,
    ModelErred,
    ModelEvent,
    ResponseEnded,
    ResponseStarted,
    SendAudio,
    SendItems,
    SendRaw,
    SendToolOutput,
    ServerEvent,
    TextDelta,
    ToolCalled,
    UpdateSettings,
)
from capsule_tasks.realtime.openai.websocket import OpenAIRealtime
from capsule_tasks.realtime.playback import PlaybackTracker
from capsule_tasks.testing.models import calls
from capsule_tasks.testing.realtime import Hold, RealtimeServer, speaks
from tests.integration.realtime.listeners import HI, LOOK, Heard, agent, config, opened, until

# --- conversations -------------------------------------------------------------------------------


async def test_a_message_is_answered_in_audio(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    server.add(speaks("Hello there, friend."))
    await opened(model, server)
    await model.send_event(HI)
    ended = await heard.wait(ResponseEnded)
    assert (ended.status, ended.spent and ended.spent.cached_tokens) == ("completed", 4)
    assert "".join(event.delta for event in heard.all(TextDelta)) == "Hello there, friend."
    assert sum(len(event.data) for event in heard.all(AudioDelta)) == 48 * 200
    mine, mine_done, answer, answer_done = heard.all(ItemChanged)
    assert (mine.item["content"][0]["text"], mine_done.is_final) == ("Hi", True)
    assert answer.after == mine.item["id"]
    assert (answer.is_final, answer_done.is_final) == (False, True)
    assert answer_done.item["content"][0]["transcript"] == "Hello there, friend."


async def test_a_call_of_a_tool_and_its_output(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    server.add([calls("look")], "A cat.")
    await opened(model, server, LOOK)
    await model.send_event(HI)
    call = await heard.wait(ToolCalled)
    told = heard.events[: heard.events.index(call)]
    assert [event.item["type"] for event in told if isinstance(event, ItemChanged)][
        -1
    ] == "function_call"
    await model.send_event(SendToolOutput(call.call_id, "a cat"))
    await heard.wait(ResponseEnded, 2)
    assert len(heard.all(ToolCalled)) == 1
    assert server.count("response.create") == 2


async def test_items_of_an_earlier_conversation(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    await opened(model, server)
    items = (
        {"id": "kept_1", "role": "user", "content": "Hi"},
        {"id": "kept_2", **calls("look"), "call_id": "c" * 50},
        {"id": "kept_3", "type": "function_call_output", "call_id": "c" * 50, "output": "a cat"},
        {"id": "kept_4", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    )
    await model.send_event(SendItems(items))
    await heard.wait(ItemChanged, 8)
    ids = [item["id"] for item in server.connection.conversation.items]
    assert ids == ["kept_1", "kept_2", "kept_3", "kept_4"]
    assert heard.all(ToolCalled) == [], "the call was made before"
    assert server.count("response.create") == 0


async def test_responses_never_overlap(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    held = Hold()
    server.add(["One", held], "Two", "Three")
    await opened(model, server)
    await model.send_event(HI)
    await held.reached()
    await asyncio.gather(*(model.send_event(HI) for _ in range(5)))
    await model.send_event(
        SendRaw({"type": "response.create", "response": {"instructions": "Count."}})
    )
    held.release()
    await heard.wait(ResponseEnded, 3)
    creates = server.find("response.create")
    assert [create.get("response") for create in creates] == [
        None,
        None,
        {"instructions": "Count."},
    ]
    assert [event.type for event in heard.events if "response" in event.type] == [
        "response_started",
        "response_ended",
    ] * 3


async def test_a_response_that_crosses_one_of_the_server_is_made_after_it(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    server.expect_errors("conversation_already_has_active_response")
    held = Hold()
    server.add(["Of the server", held], "Ours")
    await opened(model, server)
    crossing = asyncio.Event()
    server.delay("response.create", crossing)
    await model.send_event(HI)
    await server.user_speaks("Hello?")
    await held.reached()
    crossing.set()
    await server.wait_until(lambda: server.errors, "the refusal")
    held.release()
    await heard.wait(ResponseEnded, 2)
    assert heard.all(ModelErred) == [], "it was nobody's fault"


async def test_an_interruption(model: OpenAIRealtime, server: RealtimeServer, heard: Heard) -> None:
    held = Hold()
    server.add(speaks("Once upon a time", held, " there was a cat."), "Yes?")
    tracker = PlaybackTracker()
    await model.connect(config(server, playback_tracker=tracker), agent())
    await model.send_event(HI)
    delta = await heard.wait(AudioDelta)
    tracker.on_play_bytes(delta.item_id, 0, delta.data[: 48 * 50])
    await model.send_event(Interrupt(delta.response_id))
    ended = await heard.wait(ResponseEnded)
    truncated = await heard.wait(ItemTruncated)
    total_ms = sum(len(event.data) for event in heard.all(AudioDelta)) // 48
    assert heard.all(AudioInterrupted) == [AudioInterrupted(delta.item_id, 0, 50, total_ms)]
    assert ended.status == "cancelled"
    assert truncated == ItemTruncated(delta.item_id, 0, 50)
    assert server.find("response.cancel")[0]["response_id"] == delta.response_id
    assert server.errors == []


async def test_the_user_speaks_into_the_answer(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    held = Hold()
    server.add(speaks("Once upon a time", held), "Yes?")
    await opened(model, server)
    await model.send_event(HI)
    await heard.wait(AudioDelta)
    await server.user_speaks("Stop")
    await heard.wait(ResponseEnded, 2)
    await heard.wait(ItemTruncated)
    assert len(heard.all(AudioInterrupted)) == 1
    assert server.count("response.cancel") == 0


async def test_audio_is_sent(model: OpenAIRealtime, server: RealtimeServer) -> None:
    await opened(model, server)
    await model.send_event(SendAudio(bytes(4800)))
    append = await server.wait_for("input_audio_buffer.append")
    assert base64.b64decode(append["audio"]) == bytes(4800)


async def test_a_refused_item_is_told_with_its_error(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    server.expect_errors("invalid_tool_call_id")
    server.add("Hm.")
    await opened(model, server)
    await model.send_event(SendToolOutput("nobodys", "42"))
    erred = await heard.wait(ModelErred)
    assert erred.code == "invalid_tool_call_id"
    assert erred.event_id == server.find("conversation.item.create")[0]["event_id"]


# --- settings ------------------------------------------------------------------------------------


async def test_settings_are_updated(model: OpenAIRealtime, server: RealtimeServer) -> None:
    await model.connect(config(server), agent(LOOK, tool_choice="required"))
    await model.send_event(UpdateSettings(agent(instructions="Be brief.")))
    wire = server.connection.settings.wire
    assert (wire["instructions"], wire["tools"]) == ("Be brief.", [])
    assert wire["tool_choice"] == "auto", "what the agent before had asked for is taken back"


async def test_refused_settings_leave_the_earlier_ones(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    await opened(model, server)
    server.refuse("session.update", "no such voice", "invalid_value")
    with pytest.raises(RealtimeRefused, match="no such voice") as caught:
        await model.send_event(UpdateSettings(agent(instructions="Be brief.")))
    assert caught.value.code == "invalid_value"
    assert heard.all(ModelErred) == [], "whoever has sent it knows"
    assert server.connection.settings.wire["instructions"] == "Be kind."


async def test_a_late_answer_is_not_that_to_the_next_settings(server: RealtimeServer) -> None:
    model = OpenAIRealtime(answer_timeout_s=0.1)
    await opened(model, server)
    late = asyncio.Event()
    server.delay("session.update", late)
    with pytest.raises(RealtimeNoAnswer, match=r"within 0\.1 s"):
        await model.send_event(UpdateSettings(agent(instructions="Late.")))
    server.delay("session.update", asyncio.Event())
    again = asyncio.create_task(model.send_event(UpdateSettings(agent(instructions="Again."))))
    await server.wait_for("session.update", 3)
    late.set()
    with pytest.raises(RealtimeNoAnswer):
        await again
    await model.close()


async def test_settings_without_an_answer_are_followed_by_others(server: RealtimeServer) -> None:
    model = OpenAIRealtime(answer_timeout_s=0.1)
    await opened(model, server)
    server.ignore("session.update")
    with pytest.raises(RealtimeNoAnswer):
        await model.send_event(UpdateSettings(agent(instructions="Lost.")))
    await model.send_event(UpdateSettings(agent()))
    await model.close()


async def test_a_lost_connection_answers_settings(
    model: OpenAIRealtime, server: RealtimeServer
) -> None:
    await opened(model, server)
    server.ignore("session.update")
    updating = asyncio.create_task(model.send_event(UpdateSettings(agent())))
    await server.wait_for("session.update", 2)
    server.connection.abort()
    with pytest.raises(RealtimeLost):
        await updating


# --- conditions, and the order of writes ---------------------------------------------------------


async def test_a_command_is_sent_if_its_condition_holds(
    model: OpenAIRealtime, server: RealtimeServer
) -> None:
    server.add("Hello.")
    await opened(model, server)
    commands = (HI, SendAudio(b"12"), Interrupt(), UpdateSettings(agent()), SendItems(()))
    for command in commands:
        assert not await model.send_event_if(command, lambda: False)
    assert await model.send_event_if(HI, lambda: True)
    await server.wait_for("response.create")
    kinds = [message["type"] for message in server.received]
    assert kinds == ["session.update", "conversation.item.create", "response.create"]


async def test_items_that_are_no_json_are_not_sent_in_part(
    model: OpenAIRealtime, server: RealtimeServer
) -> None:
    await opened(model, server)
    parts = [{"type": "input_image", "image_url": object()}]
    items = ({"role": "user", "content": "Hi"}, {"role": "user", "content": parts})
    with pytest.raises(TypeError):
        await model.send_event(SendItems(items))
    await model.send_event(UpdateSettings(agent()))
    assert server.count("conversation.item.create") == 0


async def test_nothing_comes_between_a_condition_and_the_write(
    model: OpenAIRealtime, server: RealtimeServer
) -> None:
    """Each sees what was written before it: conditions and writes do not interleave."""
    await opened(model, server)
    numbers = range(20)
    written: list[int] = []

    def is_next(number: int) -> Callable[[], bool]:
        def condition() -> bool:
            written.append(number)
            return number % 3 != 0

        return condition

    def item(number: int) -> SendItems:
        return SendItems(({"role": "user", "content": str(number)},) * 2)

    sent = await asyncio.gather(*(model.send_event_if(item(n), is_next(n)) for n in numbers))
    assert sent == [number % 3 != 0 for number in numbers]
    expected = [str(number) for number in written if number % 3 for _ in range(2)]
    await server.wait_for("conversation.item.create", len(expected))
    creates = server.find("conversation.item.create")
    assert [create["item"]["content"][0]["text"] for create in creates] == expected


async def test_send_of_websockets_writes_before_it_waits(server: RealtimeServer) -> None:
    """`send_event_if` relies on this: a release that changes it must not be allowed."""
    async with connect(server.url, write_limit=0) as client:
        sending = client.send(b"{}", text=True)
        with pytest.raises(StopIteration):  # it has not waited for anything
            sending.send(None)
        server.connection.pause_reading()
        while client.transport.get_write_buffer_size() == 0:
            broadcast((client,), "x" * (1 << 20))
        buffered = client.transport.get_write_buffer_size()
        waiting = asyncio.create_task(client.send(b"x" * 100_000, text=True))
        await asyncio.sleep(0)  # the first step of the task
        assert not waiting.done()
        assert client.transport.get_write_buffer_size() >= buffered + 100_000
        waiting.cancel()
        client.transport.abort()


# --- pauses --------------------------------------------------------------------------------------


async def test_a_listener_that_asks_for_a_pause_holds_the_reader(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    server.add("Hello there, this is a text of several pieces.")
    await opened(model, server)
    room = asyncio.Event()
    heard.on = lambda event: room.wait() if isinstance(event, ResponseStarted) else None  # type: ignore[assignment, return-value]
    await model.send_event(HI)
    await heard.wait(ResponseStarted)
    await server.wait_until(lambda: server.connection.conversation.items[1:], "the answer")
    assert heard.events[-1].type == "response_started"
    room.set()
    await heard.wait(ResponseEnded)


async def test_a_pause_that_is_longer_than_a_server_may_take_to_answer_a_ping(
    server: RealtimeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers to pings wait behind messages that are not read meanwhile."""
    pings = 0

    async def ping(websocket: ClientConnection) -> Any:
        nonlocal pings
        pings += 1
        return await original(websocket)

    original = ClientConnection.ping
    monkeypatch.setattr(ClientConnection, "ping", ping)
    model, heard = OpenAIRealtime(ping_interval_s=0.01, ping_timeout_s=0.01), Heard()
    model.add_listener(heard)
    await opened(model, server)
    has_room = asyncio.Event()
    heard.on = lambda _: has_room.wait()  # type: ignore[assignment, return-value]
    for number in range(40):
        await server.send({"type": "of_tomorrow", "number": number})
    assert model._connection is not None
    transport = model._connection._websocket.transport
    await until(lambda: not transport.is_reading())
    unanswered = pings + 3
    await until(lambda: pings >= unanswered)
    has_room.set()
    await heard.wait(ServerEvent, 40)
    assert heard.all(ConnectionEnded) == []
    await model.close()


async def test_a_pause_that_fails_is_over(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    async def fail() -> None:
        raise ValueError

    server.add("Hello.")
    await opened(model, server)
    heard.on = lambda _: fail()
    await model.send_event(HI)
    await heard.wait(ResponseEnded)


async def test_a_listener_that_fails_ends_nothing(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    class Failing:
        def on_event(self, event: ModelEvent) -> None:
            raise ValueError(event.type)

    model.remove_listener(heard)
    model.add_listener(Failing())
    model.add_listener(heard)
    server.add("Hello.")
    await opened(model, server)
    await model.send_event(HI)
    await heard.wait(ResponseEnded)


async def test_listeners_come_and_go(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    other = Heard()
    model.add_listener(other, server_events=True)
    model.add_listener(heard)  # again
    model.remove_listener(Heard())
    server.add("Hello.", "Bye.")
    await opened(model, server)
    await model.send_event(HI)
    await heard.wait(ResponseEnded)
    assert len(heard.all(ResponseStarted)) == 1
    assert heard.all(ServerEvent) == []
    raw = [event.data["type"] for event in other.all(ServerEvent)]
    assert raw[:2] == ["session.created", "session.updated"]
    await server.send({"type": "of_tomorrow"})
    await heard.wait(ServerEvent)
    await other.wait(ServerEvent, len(raw) + 1)
    model.remove_listener(other)
    count = len(other.events)
    await model.send_event(HI)
    await heard.wait(ResponseEnded, 2)
    assert len(other.events) == count
    assert len(heard.all(ServerEvent)) == 1


async def test_invalid_messages_end_nothing(
    model: OpenAIRealtime, server: RealtimeServer, heard: Heard
) -> None:
    await opened(model, server)
    await server.send(b"{not json")
    await server.send({"type": "response.created", "response": 7})
    await heard.wait(ModelErred, 2)
    server.add("Hello.")
    await model.send_event(HI)
    await heard.wait(ResponseEnded)
