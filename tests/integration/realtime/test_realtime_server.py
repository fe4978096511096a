"""The server of realtime tests, which plain WebSockets talk to: it is as strict as OpenAI's."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosedError, ConnectionClosedOK, InvalidStatus

from capsule_tasks.testing.models import calls, says
from capsule_tasks.testing.realtime import Answer, Hold, RealtimeServer, fails, speaks, writes

EVENTS: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
SESSION = {"type": "realtime", "instructions": "Be kind."}
HELLO = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "hello"}],
}
CREATE = {"type": "response.create"}
SECOND = base64.b64encode(bytes(48_000)).decode()


class Client:
    """A client that checks each event against OpenAI's types."""

    def __init__(self, websocket: ClientConnection) -> None:
        self.websocket = websocket

    async def send(self, message: dict[str, Any] | str) -> None:
        text = message if isinstance(message, str) else json.dumps(message)
        await self.websocket.send(text)

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(5):
            event: dict[str, Any] = json.loads(await self.websocket.recv())
        EVENTS.validate_python(event)
        assert event["event_id"]
        return event

    async def until(self, kind: str) -> list[dict[str, Any]]:
        """The events up to the first of this type."""
        events = [await self.next()]
        while events[-1]["type"] != kind:
            events.append(await self.next())
        return events

    async def ask(self, message: dict[str, Any] | str) -> dict[str, Any]:
        await self.send(message)
        return await self.next()

    async def create(self, item: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """The item, as the server has added it."""
        told = await self.ask({"type": "conversation.item.create", "item": item, **fields})
        assert told["type"] == "conversation.item.added", told
        done = await self.next()
        assert (done["type"], done["item"]) == ("conversation.item.done", told["item"])
        return told

    async def error(self, message: dict[str, Any] | str) -> str:
        """The code of the error that answers the message."""
        event = await self.ask(message)
        assert event["type"] == "error", event
        if isinstance(message, dict):
            assert event["error"]["event_id"] == message.get("event_id")
        return str(event["error"]["code"])


@asynccontextmanager
async def opened(server: RealtimeServer, query: str = "") -> AsyncIterator[Client]:
    """A client that has been told of its session."""
    async with connect(server.url + query) as websocket:
        client = Client(websocket)
        assert (await client.next())["type"] == "session.created"
        yield client


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


async def update_session(client: Client, **session: Any) -> None:
    answer = await client.ask(
        {"type": "session.update", "session": {"type": "realtime", **session}}
    )
    assert answer["type"] == "session.updated", answer


async def test_settings_are_merged_into_those_of_the_session(server: RealtimeServer) -> None:
    async with opened(server, "?model=gpt-realtime-2") as client:
        detection = {"type": "semantic_vad", "interrupt_response": False}
        session = {**SESSION, "audio": {"input": {"turn_detection": detection}}}
        told = (await client.ask({"type": "session.update", "session": session}))["session"]
        assert (told["model"], told["instructions"]) == ("gpt-realtime-2", "Be kind.")
        assert told["audio"]["output"]["voice"] == "marin"
        detection = told["audio"]["input"]["turn_detection"]
        assert (detection["create_response"], detection["interrupt_response"]) == (True, False)
        await update_session(client, audio={"input": {"turn_detection": None}})
        assert server.connection.settings.turn_detection is None


async def test_a_written_response_is_told_from_its_creation_to_its_usage(
    server: RealtimeServer,
) -> None:
    server.add(says("A sentence of two deltas."))
    async with opened(server) as client:
        await client.create(HELLO)
        await client.send(CREATE)
        events = await client.until("response.done")
    assert kinds(events) == [
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "conversation.item.done",
        "response.output_item.done",
        "response.done",
    ]
    response = events[-1]["response"]
    assert response["status"] == "completed"
    assert response["usage"]["total_tokens"] == 15
    assert response["output"] == [events[-2]["item"]]
    assert events[-2]["item"]["content"][0]["text"] == "A sentence of two deltas."


async def test_a_spoken_response_has_audio_and_its_transcript(server: RealtimeServer) -> None:
    audio = bytes(range(256)) * 40
    server.add(speaks("Audio with two deltas", audio=audio), speaks("Silence"))
    async with opened(server) as client:
        await client.send(CREATE)
        events = await client.until("response.done")
        deltas = [event for event in events if event["type"] == "response.output_audio.delta"]
        assert b"".join(base64.b64decode(event["delta"]) for event in deltas) == audio
        assert len(deltas) == 2
        names = ("output_audio_transcript.done", "output_audio.done", "content_part.done")
        assert {f"response.{name}" for name in names} <= set(kinds(events))
        content = [{"type": "output_audio", "transcript": "Audio with two deltas"}]
        assert events[-1]["response"]["output"][0]["content"] == content
        await client.until("rate_limits.updated")
        await client.send(CREATE)
        await client.until("response.output_audio.delta")
        assert list(server.connection.conversation.audio_ms.values())[1] == 70


async def test_a_call_is_told_with_its_arguments_and_its_output_is_taken(
    server: RealtimeServer,
) -> None:
    server.add(["Let me see.", calls("look", {"where": "under the table"}, "call_1")], "A cat.")
    async with opened(server) as client:
        await client.send(CREATE)
        events = await client.until("response.done")
        deltas = [e["delta"] for e in events if e["type"].endswith("function_call_arguments.delta")]
        assert json.loads("".join(deltas)) == {"where": "under the table"}
        message, call = events[-1]["response"]["output"]
        assert (call["call_id"], call["status"]) == ("call_1", "completed")
        await client.until("rate_limits.updated")
        output = {"type": "function_call_output", "call_id": "call_1", "output": "a cat"}
        assert (await client.create(output))["previous_item_id"] == call["id"]
        server.expect_errors("invalid_tool_call_id")
        strange = {**output, "call_id": "call_2"}
        message = {"type": "conversation.item.create", "item": strange, "event_id": "mine"}
        assert await client.error(message) == "invalid_tool_call_id"


async def test_a_response_is_held_open_until_the_test_lets_it_go_on(server: RealtimeServer) -> None:
    hold, last = Hold(), Hold()
    server.add([writes("before", hold, "after"), last])
    server.expect_errors("conversation_already_has_active_response")
    async with opened(server) as client:
        await client.send(CREATE)
        await hold.reached()
        events = await client.until("response.output_text.delta")
        assert events[-1]["delta"] == "before"
        code = await client.error({**CREATE, "event_id": "second"})
        assert code == "conversation_already_has_active_response"
        hold.release()
        await last.reached()
        assert kinds(await client.until("response.output_item.done"))[0].endswith("text.delta")
        last.release()
        assert kinds(await client.until("response.done")) == ["response.done"]


async def test_a_cancelled_response_ends_with_what_was_said(server: RealtimeServer) -> None:
    server.expect_errors("response_cancel_not_active")
    server.add([speaks("said", Hold(), "unsaid"), calls("never")], "next")
    async with opened(server) as client:
        await client.send(CREATE)
        response_id = (await client.until("response.output_audio.delta"))[0]["response"]["id"]
        cancel = {"type": "response.cancel", "response_id": response_id}
        other = {"type": "response.cancel", "response_id": "another"}
        assert await client.error(other) == "response_cancel_not_active"
        await client.send(cancel)
        response = (await client.until("response.done"))[-1]["response"]
        assert response["status_details"]["reason"] == "client_cancelled"
        (item,) = response["output"]
        assert (item["status"], item["content"][0]["transcript"]) == ("incomplete", "said")
        await client.until("rate_limits.updated")
        assert await client.error({"type": "response.cancel"}) == "response_cancel_not_active"


async def test_a_response_ends_as_the_script_says(server: RealtimeServer) -> None:
    incomplete = Answer("cut", status="incomplete", reason="max_output_tokens", usage=None)

    async def counted(connection: Any) -> str:
        return f"{len(connection.conversation.items)} items"

    server.add(fails("no luck", after="half"), incomplete, counted)
    async with opened(server) as client:
        responses = []
        for _ in range(3):
            await client.send(CREATE)
            responses.append((await client.until("response.done"))[-1]["response"])
            await client.until("rate_limits.updated")
    failed, cut, done = responses
    assert (failed["status"], failed["status_details"]["error"]["message"]) == ("failed", "no luck")
    assert (cut["status"], cut["usage"]) == ("incomplete", None)
    assert done["output"][0]["content"][0]["text"] == "2 items"


async def test_items_keep_their_ids_and_their_places(server: RealtimeServer) -> None:
    server.expect_errors(
        "item_create_duplicate_item_id",
        "item_create_invalid_previous_item_id",
        "item_retrieve_invalid_item_id",
        "item_delete_invalid_item_id",
    )
    async with opened(server) as client:
        assert (await client.create({**HELLO, "id": "one"}))["previous_item_id"] is None
        told = await client.create({**HELLO, "id": "three"})
        assert told["previous_item_id"] == "one"
        told = await client.create({**HELLO, "id": "two"}, previous_item_id="one")
        assert told["previous_item_id"] == "one"
        await client.create({**HELLO, "id": "zero"}, previous_item_id="root")
        ids = [item["id"] for item in server.connection.conversation.items]
        assert ids == ["zero", "one", "two", "three"]
        create = {"type": "conversation.item.create", "item": {**HELLO, "id": "one"}}
        assert await client.error(create) == "item_create_duplicate_item_id"
        astray = {**create, "item": HELLO, "previous_item_id": "nowhere"}
        assert await client.error(astray) == "item_create_invalid_previous_item_id"
        got = await client.ask({"type": "conversation.item.retrieve", "item_id": "two"})
        assert (got["type"], got["item"]["id"]) == ("conversation.item.retrieved", "two")
        gone = await client.ask({"type": "conversation.item.delete", "item_id": "two"})
        assert (gone["type"], gone["item_id"]) == ("conversation.item.deleted", "two")
        for doing in ("retrieve", "delete"):
            message = {"type": f"conversation.item.{doing}", "item_id": "two"}
            assert await client.error(message) == f"item_{doing}_invalid_item_id"


async def test_only_audio_that_exists_is_truncated(server: RealtimeServer) -> None:
    server.add(speaks("0123456789"), "text")
    server.expect_errors("item_truncate_invalid_item_id", "invalid_value")
    async with opened(server) as client:
        await client.send(CREATE)
        item_id = (await client.until("rate_limits.updated"))[1]["item"]["id"]
        cut = {"type": "conversation.item.truncate", "item_id": item_id, "content_index": 0}
        assert await client.error({**cut, "audio_end_ms": 101}) == "invalid_value"
        strange = {**cut, "item_id": "strange", "audio_end_ms": 1}
        assert await client.error(strange) == "item_truncate_invalid_item_id"
        told = await client.ask({**cut, "audio_end_ms": 40})
        assert (told["type"], told["audio_end_ms"]) == ("conversation.item.truncated", 40)
        got = await client.ask({"type": "conversation.item.retrieve", "item_id": item_id})
        assert "transcript" not in got["item"]["content"][0]
        assert await client.error({**cut, "audio_end_ms": 41}) == "invalid_value"
        await client.send(CREATE)
        text_id = (await client.until("rate_limits.updated"))[1]["item"]["id"]
        text = {**cut, "item_id": text_id, "audio_end_ms": 0}
        assert await client.error(text) == "invalid_value"


async def test_audio_that_is_committed_becomes_an_item_with_a_transcript() -> None:
    transcripts = ["Hello.", ValueError("noise")]
    async with RealtimeServer(transcripts=transcripts) as server, opened(server) as client:
        server.expect_errors("input_audio_buffer_commit_empty")
        append = {"type": "input_audio_buffer.append", "audio": SECOND}
        commit = {"type": "input_audio_buffer.commit"}
        assert await client.error(commit) == "input_audio_buffer_commit_empty"
        await client.send(append)
        assert (await client.ask({"type": "input_audio_buffer.clear"}))["type"].endswith("cleared")
        assert await client.error(commit) == "input_audio_buffer_commit_empty"
        await update_session(client, audio={"input": {"transcription": {"model": "whisper-1"}}})
        for ending in ("completed", "failed"):
            await client.send(append)
            await client.send(commit)
            told = await client.until(f"conversation.item.input_audio_transcription.{ending}")
            kind = "input_audio_buffer.committed"
            steps = [kind, "conversation.item.added", "conversation.item.done"]
            assert kinds(told[:-1]) == steps
            assert {event.get("item_id", told[0]["item_id"]) for event in told} == {
                told[0]["item_id"]
            }
        await client.send(append)
        await client.send(commit)
        item_id = (await client.until("conversation.item.done"))[0]["item_id"]
        await server.connection.transcribe(item_id, "Later.")
        assert (await client.next())["transcript"] == "Later."


async def test_the_server_hears_the_user_and_answers(server: RealtimeServer) -> None:
    server.add("First.", ["Second.", Hold()], "Third.", "Are you there?")
    async with opened(server) as client:
        await update_session(client, audio={"input": {"transcription": {"model": "whisper-1"}}})
        item_id = await server.user_speaks("A question?")
        events = await client.until("rate_limits.updated")
        assert kinds(events)[:7] == [
            "input_audio_buffer.speech_started",
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
            "conversation.item.input_audio_transcription.completed",
            "response.created",
        ]
        assert events[1]["audio_end_ms"] == 1000
        assert {event["item_id"] for event in events[:3]} == {item_id}
        await server.user_speaks("And another?")
        await client.until("response.output_item.done")
        await server.user_speaks("Stop!")
        response = (await client.until("response.done"))[-1]["response"]
        assert response["status_details"]["reason"] == "turn_detected"
        await client.until("rate_limits.updated")
        assert (await client.until("rate_limits.updated"))[-2]["response"]["status"] == "completed"
        await server.connection.input_times_out()
        events = await client.until("response.done")
        assert events[0]["type"] == "input_audio_buffer.timeout_triggered"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", "invalid_json"),
        ("[]", "invalid_value"),
        ({"type": "response.make"}, "invalid_value"),
        ({**CREATE, "colour": "red"}, "unknown_parameter"),
        ({**CREATE, "response": {"modalities": ["text"]}}, "unknown_parameter"),
        ({"type": "session.update"}, "missing_required_parameter"),
        ({"type": "session.update", "session": {}}, "missing_required_parameter"),
        ({"type": "session.update", "session": {**SESSION, "voice": "ash"}}, "unknown_parameter"),
        ({"type": "session.update", "session": {**SESSION, "model": "other"}}, "invalid_value"),
        ({"type": "input_audio_buffer.append", "audio": "?"}, "invalid_value"),
        ({"type": "input_audio_buffer.append", "audio": 1}, "invalid_type"),
        (
            {"type": "conversation.item.create", "item": {**HELLO, "id": "x" * 33}},
            "string_above_max_length",
        ),
        (
            {"type": "conversation.item.create", "item": {**HELLO, "role": "assistant"}},
            "invalid_value",
        ),
        ({"type": "conversation.item.create", "item": says("Hi")}, "unknown_parameter"),
        (
            {
                "type": "session.update",
                "session": {**SESSION, "tools": [{"type": "function", "name": "a b"}]},
            },
            "invalid_value",
        ),
    ],
)
async def test_a_wrong_message_is_refused_and_fails_the_test(message: Any, code: str) -> None:
    with pytest.raises(AssertionError, match=rf"\({code}\)"):
        async with RealtimeServer() as server, opened(server) as client:
            assert await client.error(message) == code


async def test_a_response_beyond_the_script_fails_the_test_and_the_client() -> None:
    server = RealtimeServer()
    await server.start()
    async with opened(server) as client:
        await client.send(CREATE)
        with pytest.raises(ConnectionClosedError):
            await client.next()
        with pytest.raises(AssertionError, match="no more replies"):
            await server.wait_for("session.update")
    with pytest.raises(AssertionError, match="no more replies"):
        await server.__aexit__(None, None, None)


async def test_messages_are_refused_ignored_and_delayed_as_the_script_says(
    server: RealtimeServer,
) -> None:
    update = {"type": "session.update", "session": SESSION, "event_id": "mine"}
    server.refuse("session.update", "not now", "busy")
    server.ignore("session.update")
    gate = asyncio.Event()
    server.delay(lambda message: message["type"] == "session.update", until=gate)
    async with opened(server) as client:
        assert await client.error(update) == "busy"
        await client.send(update)
        await client.send(update)
        await client.create(HELLO)
        gate.set()
        assert (await client.next())["type"] == "session.updated"
        assert (await client.ask(update))["type"] == "session.updated"
    assert server.errors == []
    assert [message["type"] for message in server.received].count("session.update") == 4


async def test_each_connection_has_its_own_conversation_and_may_have_its_own_script() -> None:
    async with (
        RealtimeServer(lambda number: [f"from {number}"]) as server,
        opened(server) as first,
        opened(server) as second,
    ):
        assert len(server.open_connections) == 2
        for number, client in ((1, second), (0, first)):
            await client.send(CREATE)
            item = (await client.until("response.done"))[-1]["response"]["output"][0]
            assert item["content"][0]["text"] == f"from {number}"
        assert [len(connection.received) for connection in server.connections] == [1, 1]
        await first.websocket.close()
        await server.wait_for_open(1)
        assert server.connections[0].close_code == 1000
        server.forget()
        assert (len(server.connections), server.received) == (1, [])


async def test_connections_are_closed_and_reset(server: RealtimeServer) -> None:
    async with opened(server) as client:
        await server.connection.close(1001, "gone")
        with pytest.raises(ConnectionClosedOK):
            await client.next()
    async with opened(server) as client:
        server.connection.abort()
        with pytest.raises(ConnectionClosedError):
            await client.next()
    await server.wait_for_open(0)


async def test_a_server_that_does_not_read_makes_the_client_wait() -> None:
    async with RealtimeServer(receive_buffer_bytes=4096) as server, opened(server) as client:
        server.connection.pause_reading()
        append = {"type": "input_audio_buffer.append", "audio": SECOND}

        async def fill() -> None:
            for _ in range(150):
                await client.send(append)

        filling = asyncio.create_task(fill())
        for _ in range(200):
            await asyncio.sleep(0)
        assert not filling.done()
        assert server.received == []
        server.connection.resume_reading()
        await filling
        await server.wait_for("input_audio_buffer.append", 150)


async def test_handshakes_are_refused_and_delayed(server: RealtimeServer) -> None:
    server.refuse_handshakes(401)
    with pytest.raises(InvalidStatus):
        async with opened(server):
            pass
    gate = asyncio.Event()
    server.delay_handshakes(gate)
    connecting = asyncio.create_task(connect(server.url).__aenter__())
    await server.wait_until(lambda: server.handshakes == 2, "a second handshake")
    assert not connecting.done()
    gate.set()
    await (await connecting).close()
