"""Items of histories as a client may create them, which OpenAI's types and our server take."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.realtime.conversation_item_create_event import ConversationItemCreateEvent

from capsule_tasks.realtime.openai.client_items import client_item
from capsule_tasks.testing.realtime.checks import check_item


def made(item: dict[str, Any]) -> dict[str, Any] | None:
    created = client_item(item)
    if created is not None:
        check_item(created)
        event = {"type": "conversation.item.create", "item": created}
        ConversationItemCreateEvent.model_validate(event)
    return created


def message(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": list(parts)}


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"role": "user", "content": "hi"}, message("user", {"type": "input_text", "text": "hi"})),
        (
            {"role": "assistant", "content": "hi"},
            message("assistant", {"type": "output_text", "text": "hi"}),
        ),
        (
            {"role": "developer", "content": "hi"},
            message("system", {"type": "input_text", "text": "hi"}),
        ),
        (
            message("assistant", {"type": "output_text", "text": "hi", "annotations": []}),
            message("assistant", {"type": "output_text", "text": "hi"}),
        ),
        (
            message("assistant", {"type": "output_audio", "transcript": "hi"}),
            message("assistant", {"type": "output_text", "text": "hi"}),
        ),
        (
            message("assistant", {"type": "refusal", "refusal": "no"}),
            message("assistant", {"type": "output_text", "text": "no"}),
        ),
        (
            message("user", {"type": "input_audio", "transcript": "hi", "audio": "AAAA"}),
            message("user", {"type": "input_text", "text": "hi"}),
        ),
        (
            message(
                "user",
                {"type": "input_image", "image_url": "data:image/png;base64,AA", "file_id": None},
                {"type": "input_file", "file_id": "file_1"},
                {"type": "input_text", "text": "Which cat?"},
            ),
            message(
                "user",
                {"type": "input_image", "image_url": "data:image/png;base64,AA"},
                {"type": "input_text", "text": "Which cat?"},
            ),
        ),
        (message("user", {"type": "input_file", "file_id": "file_1"}), None),
        (message("assistant"), None),
        ({"type": "reasoning", "id": "rs_1", "summary": []}, None),
        ({"type": "web_search_call", "id": "ws_1", "status": "completed"}, None),
    ],
)
def test_messages(item: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert made(item) == expected


def test_calls_and_their_outputs() -> None:
    call = {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_1",
        "name": "look",
        "arguments": "{}",
        "status": "completed",
    }
    names = ("type", "id", "call_id", "name", "arguments")
    assert made(call) == {name: call[name] for name in names}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "a cat"}
    assert made(output) == output


def test_a_call_in_a_namespace_has_it_in_its_name() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "find", "arguments": ""}
    created = made({**call, "namespace": "crm"})
    assert created is not None
    assert (created["name"], created["arguments"]) == ("crm__find", "{}")


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}], "a\nb"),
        ([{"type": "input_image", "image_url": "u"}], '[{"type":"input_image","image_url":"u"}]'),
        (None, "null"),
        ("", ""),
    ],
)
def test_outputs_are_text(output: Any, expected: str) -> None:
    item = {"type": "function_call_output", "call_id": "c", "output": output}
    assert (made(item) or {})["output"] == expected


def test_ids_that_the_server_would_refuse_are_left_out() -> None:
    for item_id, is_taken in (("msg_1", True), ("m" * 32, True), ("m" * 33, False), ("", False)):
        created = made({"role": "user", "content": "hi", "id": item_id})
        assert created is not None
        assert ("id" in created) == is_taken


def test_long_ids_of_calls_are_shortened_alike_for_the_call_and_its_output() -> None:
    call = {"type": "function_call", "call_id": "c" * 64, "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c" * 64, "output": "a cat"}
    created = [made(call) or {}, made(output) or {}]
    assert created[0]["call_id"] == created[1]["call_id"]
    assert len(created[0]["call_id"]) <= 32
