"""Messages of the server as events of the model."""

from __future__ import annotations

import random
from typing import Any, get_args

import msgspec
import pytest
from openai.types.realtime import RealtimeServerEvent

from capsule_tasks.realtime.model import (
    AudioDelta,
    AudioDone,
    InputTimedOut,
    InputTranscribed,
    ItemChanged,
    ItemDeleted,
    ModelErred,
    ModelEvent,
    ResponseEnded,
    ResponseStarted,
    SendMessage,
    ServerEvent,
    TextDelta,
    ToolCalled,
)
from capsule_tasks.realtime.openai.protocol import Protocol
from capsule_tasks.realtime.openai.wire import IGNORED
from capsule_tasks.runs.records import Spent
from tests.unit.realtime.openai.servers import Server

KINDS = {*Protocol._HANDLERS, *IGNORED}


@pytest.fixture
def server() -> Server:
    return Server()


MESSAGE = {"id": "item_1", "type": "message", "role": "assistant"}
CALL = {
    "id": "item_2",
    "object": "realtime.item",
    "type": "function_call",
    "status": "completed",
    "name": "look",
    "call_id": "call_1",
    "arguments": '{"at":"cats"}',
}


# --- responses -----------------------------------------------------------------------------------


def test_a_response_begins_and_ends_with_its_usage(server: Server) -> None:
    usage = {
        "total_tokens": 150,
        "input_tokens": 100,
        "output_tokens": 50,
        "input_token_details": {"text_tokens": 20, "audio_tokens": 80, "cached_tokens": 30},
        "output_token_details": {"text_tokens": 10, "audio_tokens": 40},
    }
    assert server.response("created") == [ResponseStarted("resp_1")]
    spent = Spent(requests=1, input_tokens=100, cached_tokens=30, output_tokens=50)
    ended = ResponseEnded("resp_1", "completed", spent)
    assert server.response("done", status="completed", usage=usage) == [ended]


@pytest.mark.parametrize("usage", [{"input_tokens": None}, {"input_token_details": None}, {}])
def test_a_usage_may_say_little(server: Server, usage: dict[str, Any]) -> None:
    [ended] = server.response("done", usage=usage)
    assert ended.spent == Spent(requests=1)


def test_a_response_has_ended_however_oddly_that_is_told(server: Server) -> None:
    server.response("created")
    server.do(SendMessage(()))
    odd = {"status": 7, "status_details": "x", "usage": [1], "output": 3, "conversation_id": "c"}
    ended, asked = server.say("response.done", is_typed=False, response={"id": "resp_1", **odd})
    assert ended == ResponseEnded("resp_1", "completed", Spent(requests=1))
    assert asked["type"] == "response.create"


def test_a_response_may_end_without_usage_or_status(server: Server) -> None:
    assert server.response("done") == [ResponseEnded("resp_1", "completed", None)]


def test_a_response_fails(server: Server) -> None:
    error = {"type": "server_error", "code": "overloaded", "message": "too much"}
    details = {"type": "failed", "error": error}
    ended = ResponseEnded("resp_1", "failed", None, {"code": "overloaded", **error})
    assert server.response("done", status="failed", status_details=details) == [ended]


def test_a_response_is_incomplete(server: Server) -> None:
    details = {"type": "incomplete", "reason": "max_output_tokens"}
    ended = ResponseEnded("resp_1", "incomplete", None, details)
    assert server.response("done", status="incomplete", status_details=details) == [ended]


def test_a_response_was_cancelled(server: Server) -> None:
    details = {"type": "cancelled", "reason": "turn_detected"}
    ended = ResponseEnded("resp_1", "cancelled")
    assert server.response("done", status="cancelled", status_details=details) == [ended]


def test_a_response_without_an_id_is_the_active_one_at_its_end(server: Server) -> None:
    server.response("created")
    assert server.say("response.done", response={}) == [ResponseEnded("resp_1")]


# --- audio and text ------------------------------------------------------------------------------


def test_audio_is_bytes(server: Server) -> None:
    assert server.speaks(b"\x00\x01\xff") == [AudioDelta(b"\x00\x01\xff", "resp_1", "item_1", 0)]


def test_audio_ends(server: Server) -> None:
    ids = {"response_id": "resp_1", "item_id": "item_1", "content_index": 1, "output_index": 0}
    assert server.say("response.output_audio.done", **ids) == [AudioDone("resp_1", "item_1", 1)]


@pytest.mark.parametrize(("kind", "is_transcript"), [("text", False), ("audio_transcript", True)])
def test_text(server: Server, kind: str, is_transcript: bool) -> None:
    ids = {"response_id": "resp_1", "item_id": "item_1", "content_index": 2, "output_index": 0}
    told = server.say(f"response.output_{kind}.delta", delta="Hel", **ids)
    assert told == [TextDelta("Hel", "resp_1", "item_1", 2, is_transcript)]


# --- items ---------------------------------------------------------------------------------------


def test_an_item_is_added_in_its_place_and_is_final_once(server: Server) -> None:
    server.response("created")
    item = {**MESSAGE, "object": "realtime.item", "status": "in_progress", "content": []}
    added = {**MESSAGE, "status": "in_progress", "content": []}
    ids = {"response_id": "resp_1", "output_index": 0}
    assert server.say("response.output_item.added", item=item, **ids) == []
    told = server.say("conversation.item.added", item=item, previous_item_id="item_0")
    assert told == [ItemChanged(added, "item_0")]
    part = {"type": "output_audio", "transcript": "Hello"}
    done = {**MESSAGE, "status": "completed", "content": [part]}
    assert server.say("conversation.item.done", item=done, previous_item_id="item_0") == [
        ItemChanged(done, "item_0", is_final=True)
    ]
    assert server.say("response.output_item.done", item=done, **ids) == []


@pytest.mark.parametrize("order", [("item", "output"), ("output", "item")])
def test_a_call_is_told_once_after_its_item(server: Server, order: tuple[str, str]) -> None:
    server.response("created")
    told: list[Any] = []
    for which in order:
        if which == "item":
            told += server.say("conversation.item.done", item=CALL, previous_item_id=None)
        else:
            ids = {"response_id": "resp_1", "output_index": 0}
            told += server.say("response.output_item.done", item=CALL, **ids)
    item = {name: value for name, value in CALL.items() if name != "object"}
    call = ToolCalled("look", "call_1", '{"at":"cats"}', "item_2", "resp_1")
    assert told == [ItemChanged(item, None, is_final=True), call]


def test_a_call_of_an_earlier_conversation_is_not_made_again(server: Server) -> None:
    server.say("conversation.item.added", item={**CALL, "status": "in_progress"})
    [changed] = server.say("conversation.item.done", item=CALL, previous_item_id=None)
    assert changed.is_final


def test_a_call_that_was_cut_short_is_not_made(server: Server) -> None:
    cut = {**CALL, "status": "incomplete", "arguments": '{"at":'}
    ids = {"response_id": "resp_1", "output_index": 0}
    [changed] = server.say("response.output_item.done", item=cut, **ids)
    assert changed.is_final


def test_a_call_without_arguments_has_an_empty_text(server: Server) -> None:
    call = {name: value for name, value in CALL.items() if name != "arguments"}
    ids = {"response_id": "resp_1", "output_index": 0}
    _, called = server.say("response.output_item.done", item=call, **ids, is_typed=False)
    assert called == ToolCalled("look", "call_1", "", "item_2", "resp_1")


def test_data_of_audio_is_left_out_of_items(server: Server) -> None:
    part = {"type": "input_audio", "audio": "AAAA", "transcript": "Hi", "text": None}
    item = {"id": "item_1", "type": "message", "role": "user", "content": [part]}
    [changed] = server.say("conversation.item.retrieved", item={**item, "status": "completed"})
    assert changed.is_final
    assert changed.item["content"] == [{"type": "input_audio", "transcript": "Hi"}]


def test_an_item_that_was_retrieved_while_it_is_made_is_not_final(server: Server) -> None:
    item = {**MESSAGE, "content": [], "status": "in_progress"}
    [changed] = server.say("conversation.item.retrieved", item=item)
    assert not changed.is_final


def test_nulls_and_missing_fields_of_items(server: Server) -> None:
    item = {"id": "item_1", "type": "message", "role": "user", "status": None, "content": None}
    [changed] = server.say("conversation.item.added", item=item, is_typed=False)
    expected = {"id": "item_1", "type": "message", "role": "user", "status": "in_progress"}
    assert changed == ItemChanged({**expected, "content": []})


@pytest.mark.parametrize("item_id", [None, ""])
def test_an_item_without_an_id_is_an_error(server: Server, item_id: str | None) -> None:
    item = {**MESSAGE, "id": item_id, "content": []}
    [erred] = server.say("conversation.item.added", item=item, is_typed=False)
    assert (erred.code, "$.id" in erred.message) == ("invalid_message", True)


@pytest.mark.parametrize(
    ("flaw", "item"),
    [
        ("$.type", {**MESSAGE, "type": None}),
        ("$.type", {**MESSAGE, "type": 5}),
        ("a message has no role", {"id": "item_1", "type": "message", "content": []}),
        ("$.id", {**MESSAGE, "id": 7}),
        ("$.role", {**MESSAGE, "role": {"a": 1}}),
        ("$.call_id", {**CALL, "call_id": 5}),
        ("$.arguments", {**CALL, "arguments": {"at": "cats"}}),
        ("$.content", {**MESSAGE, "content": "Hi"}),
        (
            ".text",
            {**MESSAGE, "content": [{"type": "output_text", "text": 5}]},
        ),
    ],
)
def test_an_item_that_no_history_can_give_back_is_an_error(
    server: Server, flaw: str, item: dict[str, Any]
) -> None:
    [erred] = server.say("conversation.item.done", item=item, is_typed=False)
    assert (erred.code, flaw in erred.message) == ("invalid_message", True)


@pytest.mark.parametrize("index", [-1, 1_000_000_000])
def test_a_part_at_an_impossible_place_is_an_error(server: Server, index: int) -> None:
    told = {"response_id": "resp_1", "item_id": "item_1", "content_index": index}
    [erred] = server.say("response.output_text.delta", delta="Hi", is_typed=False, **told)
    assert erred.code == "invalid_message"


def test_a_response_apart_is_not_part_of_the_conversation(server: Server) -> None:
    assert server.response("created", "resp_9", conversation_id=None) == [ResponseStarted("resp_9")]
    ids = {"response_id": "resp_9", "output_index": 0}
    content = {"item_id": "item_1", "content_index": 0, **ids}
    assert server.say("response.output_text.delta", delta="Hi", **content) == []
    assert server.speaks(bytes(48), "resp_9") == []
    assert server.say("response.output_audio.done", **content) == []
    for item in ({**MESSAGE, "status": "completed", "content": []}, CALL):
        assert server.say("response.output_item.done", item=item, **ids) == []
    assert server.response("done", "resp_9", conversation_id=None) == [ResponseEnded("resp_9")]
    assert len(server.audio) == 0


def test_an_item_is_deleted(server: Server) -> None:
    assert server.say("conversation.item.deleted", item_id="item_1") == [ItemDeleted("item_1")]


# --- the user ------------------------------------------------------------------------------------

TRANSCRIPTION = "conversation.item.input_audio_transcription"


def test_audio_of_the_user_is_transcribed_or_not(server: Server) -> None:
    ids = {"item_id": "item_1", "content_index": 0}
    usage = {"type": "duration", "seconds": 1}
    told = server.say(f"{TRANSCRIPTION}.completed", transcript="Hi", usage=usage, **ids)
    assert told == [InputTranscribed("item_1", 0, "Hi")]
    error = {"code": "audio_unintelligible", "message": "Huh?"}
    told = server.say(f"{TRANSCRIPTION}.failed", error=error, **ids)
    assert told == [InputTranscribed("item_1", 0, None, error)]
    assert server.say(f"{TRANSCRIPTION}.delta", delta="H", **ids) == []


def test_the_user_is_silent(server: Server) -> None:
    times = {"audio_start_ms": 100, "audio_end_ms": 6100}
    told = server.say("input_audio_buffer.timeout_triggered", item_id="item_1", **times)
    assert told == [InputTimedOut("item_1", 100, 6100)]


# --- messages that are not understood ------------------------------------------------------------


def test_every_kind_of_openai_is_known_but_those_of_mcp() -> None:
    union = get_args(get_args(RealtimeServerEvent)[0])
    kinds = {get_args(each.model_fields["type"].annotation)[0] for each in union}
    assert {kind for kind in kinds if "mcp" not in kind} == KINDS


def test_messages_of_which_nothing_follows(server: Server) -> None:
    part = {"type": "text", "text": ""}
    ids = {"item_id": "i", "content_index": 0, "output_index": 0, "response_id": "r"}
    assert server.say("response.content_part.added", part=part, **ids) == []


def test_a_message_of_an_unknown_type_is_told_as_it_is(server: Server) -> None:
    [event] = server.say("response.thought.delta", delta={"deep": True}, is_typed=False)
    assert isinstance(event, ServerEvent)
    assert event.data["delta"] == {"deep": True}


@pytest.mark.parametrize(
    "raw",
    [
        b"not json",
        b"",
        b"[]",
        b"{}",
        b'{"type":1}',
        b'{"type":"response.created","response":7}',
        b'{"type":"response.output_audio.delta","delta":"!","response_id":"r","item_id":"i"}',
        b'{"type":"response.output_text.delta","delta":1,"item_id":"i"}',
        b'{"type":"error","error":[]}',
        b'{"type":"error","error":{"message":"\xff"}}',
    ],
)
def test_invalid_messages_are_errors_and_no_more(server: Server, raw: bytes) -> None:
    assert server.protocol.received(raw) == []
    [erred] = server.events
    assert isinstance(erred, ModelErred)
    assert erred.code == "invalid_message"


def test_no_message_is_too_odd(server: Server) -> None:
    """Fields of any kind, in messages of every kind: an event, an error, or nothing follows."""
    chance = random.Random(18)

    def value(depth: int = 0) -> Any:
        if depth < 3 and chance.random() < 0.6:
            names = ("id", "type", "audio", "input", "output", "format", "content", "error", "code")
            return {name: value(depth + 1) for name in names if chance.random() < 0.5}
        return chance.choice([None, 0, 1.5, True, "", "x", [], [None], ["x", {}], {}])

    names = ("response", "item", "session", "error", "item_id", "delta", "transcript", "event_id")
    for kind in sorted(KINDS) * 30:
        fields = {name: value() for name in names}
        server.events.clear()
        server.protocol.received(msgspec.json.encode({**fields, "type": kind}))
        assert all(isinstance(event, ModelEvent) for event in server.events)


def test_an_error_of_the_server(server: Server) -> None:
    error = {"type": "invalid_request_error", "code": "no", "message": "No.", "event_id": "item_7"}
    [erred] = server.say("error", error=error)
    assert erred == ModelErred("no", "No.", "item_7", error)
