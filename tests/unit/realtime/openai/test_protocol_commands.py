"""Commands as messages to the server, and interruptions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from capsule_tasks.realtime.model import (
    AgentSettings,
    AudioInterrupted,
    Command,
    Interrupt,
    ItemTruncated,
    ResponseEnded,
    SendAudio,
    SendItems,
    SendMessage,
    SendRaw,
    SendToolOutput,
)
from capsule_tasks.realtime.settings import RealtimeSettings
from tests.unit.realtime.openai.servers import Server


@pytest.fixture
def server() -> Server:
    return Server()


CALL = {
    "id": "item_2",
    "object": "realtime.item",
    "type": "function_call",
    "status": "completed",
    "name": "look",
    "call_id": "call_1",
    "arguments": '{"at":"cats"}',
}


# --- interruptions -------------------------------------------------------------------------------

STOPPED = {"item_id": "item_1", "content_index": 0}
TRUNCATE = {"type": "conversation.item.truncate", "event_id": "truncate_1", **STOPPED}
CANCEL = {"type": "response.cancel", "event_id": "cancel_1", "response_id": "resp_1"}


def test_an_interruption_cancels_and_truncates_to_what_was_played(server: Server) -> None:
    server.response("created")
    server.speaks(bytes(48_000))
    server.now_s += 0.4
    assert server.do(Interrupt()) == [
        AudioInterrupted("item_1", 0, 400, 1000),
        CANCEL,
        {**TRUNCATE, "audio_end_ms": 400},
    ]
    assert server.speaks(bytes(480)) == [], "late audio is not played"
    ids = {"response_id": "resp_1", "output_index": 0, **STOPPED}
    assert server.say("response.output_audio.done", **ids) == []
    told = server.say("conversation.item.truncated", audio_end_ms=400, **STOPPED)
    assert told == [ItemTruncated("item_1", 0, 400)]
    assert server.response("done", status="cancelled") == [ResponseEnded("resp_1", "cancelled")]
    assert len(server.audio) == 0
    assert server.do(Interrupt()) == []


def test_an_interruption_of_a_response_leaves_another_one_alone(server: Server) -> None:
    server.response("created")
    server.speaks(bytes(48_000))
    server.response("done")
    server.response("created", "resp_2")
    server.speaks(bytes(48_000), "resp_2", "item_2")
    told = server.do(Interrupt("resp_1"))
    assert told == [AudioInterrupted("item_1", 0, 0, 1000), {**TRUNCATE, "audio_end_ms": 0}]
    assert server.speaks(bytes(48), "resp_2", "item_2") != []
    assert server.do(Interrupt("resp_0")) == []


def test_an_answer_that_was_interrupted_before_it_began_is_not_heard(server: Server) -> None:
    server.do(SendMessage(()))
    assert server.do(Interrupt()) == []
    assert server.response("created")[1:] == [{**CANCEL, "event_id": "cancel_2"}]
    assert server.speaks(bytes(480)) == []
    server.response("done", status="cancelled")
    assert len(server.audio) == 0


def test_an_answer_that_was_played_is_not_truncated(server: Server) -> None:
    server.response("created")
    server.speaks(bytes(4800))
    server.response("done")
    server.now_s += 1
    assert server.do(Interrupt()) == []


def test_an_answer_that_is_still_made_is_truncated_to_what_has_come(server: Server) -> None:
    server.response("created")
    server.speaks(bytes(4800))
    server.now_s += 1
    assert server.do(Interrupt())[-1] == {**TRUNCATE, "audio_end_ms": 100}


def test_a_truncation_that_was_not_asked_for_here(server: Server) -> None:
    told = server.say("conversation.item.truncated", audio_end_ms=400, **STOPPED)
    assert told == [ItemTruncated("item_1", 0, 400)]


def speech_started(server: Server) -> list[Any]:
    return server.say("input_audio_buffer.speech_started", item_id="item_9", audio_start_ms=100)


def test_a_barge_in_that_the_server_sees_to(server: Server) -> None:
    server.session(type="server_vad", interrupt_response=True)
    server.response("created")
    server.speaks(bytes(48_000))
    server.now_s += 0.25
    assert speech_started(server) == [
        AudioInterrupted("item_1", 0, 250, 1000),
        {**TRUNCATE, "audio_end_ms": 250},
    ]
    assert server.speaks(bytes(480)) == []


@pytest.mark.parametrize("detection", [{"type": "server_vad", "interrupt_response": False}, {}])
def test_a_barge_in_that_the_server_does_not_see_to(
    server: Server, detection: dict[str, Any]
) -> None:
    server.session(**detection)
    server.response("created")
    server.speaks(bytes(48_000))
    assert speech_started(server) == [
        AudioInterrupted("item_1", 0, 0, 1000),
        CANCEL,
        {**TRUNCATE, "audio_end_ms": 0},
    ]


def test_speech_without_audio_that_is_played(server: Server) -> None:
    assert speech_started(server) == []
    server.session(type="server_vad", interrupt_response=False)
    server.response("created")
    assert speech_started(server) == []
    assert server.speaks(bytes(48)) != []


# --- commands ------------------------------------------------------------------------------------


def test_a_message_is_sent_and_answered_when_no_response_is_in_the_way(server: Server) -> None:
    content = ({"type": "input_text", "text": "Hi"},)
    item = {"type": "message", "role": "user", "content": list(content)}
    create = {"type": "conversation.item.create", "event_id": "item_1", "item": item}
    ask = {"type": "response.create", "event_id": "create_1"}
    assert server.do(SendMessage(content)) == [create, ask]
    [again] = server.do(SendMessage(content))
    assert "id" not in again["item"]
    server.response("created")
    ended, asked = server.response("done")
    assert (ended.type, asked["event_id"]) == ("response_ended", "create_2")


def test_an_output_of_a_tool(server: Server) -> None:
    created, asked = server.do(SendToolOutput("call_1", "a cat"))
    item = {"type": "function_call_output", "call_id": "call_1", "output": "a cat"}
    assert (created["item"], asked["type"]) == (item, "response.create")


def test_an_output_of_a_call_whose_id_the_server_refuses_comes_back_under_its_own(
    server: Server,
) -> None:
    long_id = "call_of_another_provider_" * 3
    created, *_ = server.do(SendToolOutput(long_id, "a cat"))
    assert len(created["item"]["call_id"]) <= 32
    item = {"id": "item_1", "object": "realtime.item", "status": "completed", **created["item"]}
    [added] = server.say("conversation.item.added", item=item, previous_item_id=None)
    assert added.item["call_id"] == long_id


def test_audio_of_the_user(server: Server) -> None:
    append = {"type": "input_audio_buffer.append", "audio": "AAE="}
    assert server.do(SendAudio(b"\x00\x01")) == [append]
    commit = {"type": "input_audio_buffer.commit"}
    assert server.do(SendAudio(b"\x00\x01", commit=True)) == [append, commit]
    assert server.do(SendAudio(b"", commit=True)) == [commit]
    assert server.do(SendAudio(b"")) == []


def test_a_turn_whose_end_nobody_else_finds_is_answered(server: Server) -> None:
    server.session()
    commit, asked = server.do(SendAudio(b"", commit=True))
    assert (commit["type"], asked["type"]) == ("input_audio_buffer.commit", "response.create")
    server.session(type="server_vad")
    assert len(server.do(SendAudio(b"", commit=True))) == 1


def test_items_are_told_without_asking_for_an_answer(server: Server) -> None:
    items = ({"role": "user", "content": "Hi"}, {"type": "reasoning"}, {**CALL, "id": "x" * 40})
    sent = server.do(SendItems(items))
    assert [message["type"] for message in sent] == ["conversation.item.create"] * 2
    assert "id" not in sent[1]["item"]


def test_a_message_in_the_words_of_the_server(server: Server) -> None:
    clear = {"type": "input_audio_buffer.clear"}
    assert server.do(SendRaw(clear)) == [clear]


def test_a_response_in_the_words_of_the_server_waits_its_turn(server: Server) -> None:
    server.response("created")
    own = {"type": "response.create", "response": {"instructions": "Hum."}}
    assert server.do(SendRaw(own)) == []
    _, asked = server.response("done")
    assert asked == {**own, "event_id": "create_1"}


def test_what_is_no_json_is_refused_before_anything_happens(server: Server) -> None:
    for command in (
        SendMessage(({"type": "input_text", "text": object()},)),
        SendRaw({"type": "response.create", "response": object()}),
    ):
        with pytest.raises(TypeError):
            server.do(command)
    assert len(server.do(SendMessage(()))) == 2, "no wish of theirs is left"


def test_an_unknown_command_is_refused(server: Server) -> None:
    with pytest.raises(TypeError, match="Command is no command"):
        server.do(Command())


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def test_an_update_of_the_users_own_does_not_answer_one_of_ours(
    server: Server, loop: asyncio.AbstractEventLoop
) -> None:
    server.do(SendRaw({"type": "session.update", "session": {"type": "realtime"}}))
    answer: asyncio.Future[None] = loop.create_future()
    settings = AgentSettings("Be kind.", (), RealtimeSettings())
    server.protocol.update(settings, answer)
    server.session()
    assert not answer.done()
    server.session()
    assert answer.done()
