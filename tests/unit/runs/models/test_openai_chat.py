"""Items as messages of Chat Completions, and messages as items."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule_tasks.errors import InvalidSetting, ModelFailed
from capsule_tasks.runs.models.model import ModelDelta, ModelRequest, ModelSettings, ToolSpec
from capsule_tasks.runs.models.openai_chat import (
    StreamedChoice,
    messages_of,
    reply_of,
    request_arguments,
)
from capsule_tasks.runs.records import Item
from capsule_tasks.testing.models import calls, reasons, refuses, says

SCHEMA = {"type": "object"}
LOOK = ToolSpec(name="look", description="Look.", parameters=SCHEMA)
FIND = ToolSpec(name="find", description="Find.", parameters=SCHEMA, namespace="crm")


def output(call_id: str, text: Any = "done") -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def messages(*items: Item) -> list[dict[str, Any]]:
    return messages_of("m", ModelRequest(input=list(items)))


def call(call_id: str, name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# --- items to messages ---------------------------------------------------------------------------


def test_instructions_come_first_and_roles_stay() -> None:
    items: list[Item] = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        says("b"),
    ]
    assert messages_of("m", ModelRequest(input=items, instructions="i")) == [
        {"role": "system", "content": "i"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


def test_a_text_and_the_calls_after_it_are_one_message() -> None:
    assert messages(
        reasons("so"),
        says("look"),
        calls("a", {"n": 1}, "c1"),
        calls("b", "{}", "c2"),
        output("c1"),
    ) == [
        {
            "role": "assistant",
            "content": "look",
            "tool_calls": [call("c1", "a", '{"n": 1}'), call("c2", "b")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]


def test_a_text_between_a_call_and_its_output_joins_the_call() -> None:
    (said, _) = messages(calls("a", "{}", "c1"), says("look"), output("c1"))
    assert said == {"role": "assistant", "content": "look", "tool_calls": [call("c1", "a")]}


def test_calls_after_outputs_are_a_message_of_their_own() -> None:
    sent = messages(
        calls("a", "{}", "c1"),
        output("c1"),
        calls("find", "{}", "c2", namespace="crm"),
        output("c2"),
    )
    assert [message["role"] for message in sent] == ["assistant", "tool"] * 2
    assert sent[2] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [call("c2", "crm__find")],
    }


steps = st.lists(
    st.one_of(
        st.just("text"),
        st.just("user"),
        st.just("reasoning"),
        st.integers(1, 3),  # so many calls at once
        st.just("output"),  # of the oldest call that waits for one
    )
)


@given(steps)
def test_outputs_stand_behind_their_calls_and_nothing_is_lost_or_moved(drawn: list[Any]) -> None:
    items: list[Item] = []
    waiting: list[str] = []
    names = (f"{number}" for number in count())

    def answer_oldest() -> None:
        items.append(output(waiting.pop(0)))

    for step in drawn:
        if isinstance(step, int):
            made = [f"c{next(names)}" for _ in range(step)]
            items += [calls("a", "{}", call_id) for call_id in made]
            waiting += made
        elif step == "output" and waiting:
            answer_oldest()
        elif step in {"text", "user"}:
            text = next(names)
            items.append(says(text) if step == "text" else {"role": "user", "content": text})
        elif step == "reasoning":
            items.append(reasons("so"))
    while waiting:
        answer_oldest()
    sent = messages(*items)
    while sent:
        asked = [each["id"] for each in sent.pop(0).get("tool_calls", [])]
        answers, sent = sent[: len(asked)], sent[len(asked) :]
        assert [each["tool_call_id"] for each in answers] == asked
        assert not sent or sent[0]["role"] != "tool"
    sent = messages(*items)
    texts = [each["content"] for each in sent if each["role"] != "tool" and each["content"]]
    assert texts == [
        item["content"] if item.get("role") == "user" else item["content"][0]["text"]
        for item in items
        if "content" in item
    ]
    called = [each["id"] for message in sent for each in message.get("tool_calls", [])]
    assert called == [item["call_id"] for item in items if item.get("type") == "function_call"]


def test_parts_of_a_message_have_their_counterparts() -> None:
    content = [
        {"type": "input_text", "text": "t"},
        {"type": "input_image", "image_url": "data:image/png;base64,AA"},
        {"type": "input_file", "file_data": "data:,x", "filename": "x.txt"},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "mp3"}},
    ]
    (message,) = messages({"role": "user", "content": content})
    assert message["content"] == [
        {"type": "text", "text": "t"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "auto"}},
        {"type": "file", "file": {"file_data": "data:,x", "filename": "x.txt"}},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "mp3"}},
    ]


def test_an_output_in_parts_and_a_refusal() -> None:
    (_, told) = messages(calls("a", "{}", "c"), output("c", [{"type": "input_text", "text": "t"}]))
    assert told["content"] == [{"type": "text", "text": "t"}]
    (message,) = messages(refuses("no"))
    assert message == {"role": "assistant", "content": None, "refusal": "no"}


@pytest.mark.parametrize(
    ("item", "what"),
    [
        ({"type": "compaction", "id": "c"}, "an item of type 'compaction'"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "'input_image'"),
        ({"role": "user", "content": [{"type": "input_file", "file_url": "u"}]}, "'input_file'"),
        (output("c", [{"type": "input_image", "image_url": "u"}]), "'input_image'"),
    ],
)
def test_what_has_no_counterpart_is_refused(item: Item, what: str) -> None:
    with pytest.raises(ModelFailed, match=f"no place for .*{what}") as raised:
        messages(item)
    assert not raised.value.is_retryable


# --- requests ------------------------------------------------------------------------------------


def arguments(tools: tuple[ToolSpec, ...] = (), **settings: Any) -> dict[str, Any]:
    request = ModelRequest(input=[], tools=tools, settings=ModelSettings(**settings))
    return request_arguments("m", request)


def test_settings_have_the_names_of_this_api() -> None:
    assert arguments(
        (LOOK, FIND),
        temperature=0.0,
        max_output_tokens=10,
        reasoning={"effort": "low"},
        verbosity="low",
        tool_choice="find",
        parallel_tool_calls=True,
        extra={"seed": 1},
    ) == {
        "model": "m",
        "messages": [],
        "temperature": 0.0,
        "max_completion_tokens": 10,
        "reasoning_effort": "low",
        "verbosity": "low",
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": description,
                    "parameters": SCHEMA,
                    "strict": True,
                },
            }
            for name, description in (("look", "Look."), ("crm__find", "Find."))
        ],
        "tool_choice": {"type": "function", "function": {"name": "crm__find"}},
        "parallel_tool_calls": True,
        "seed": 1,
    }
    assert arguments((LOOK,), tool_choice="required")["tool_choice"] == "required"


@pytest.mark.parametrize(
    "request_",
    [
        ModelRequest(input=[], conversation_id="conv_1"),
        ModelRequest(input=[], previous_response_id="resp_1"),
        ModelRequest(input=[], settings=ModelSettings(truncation="auto")),
    ],
)
def test_what_only_the_responses_api_has_is_refused(request_: ModelRequest) -> None:
    with pytest.raises(InvalidSetting, match="Chat Completions have nothing like it"):
        request_arguments("m", request_)


def test_a_hosted_tool_is_refused() -> None:
    search = ToolSpec(name="web", description="", parameters={}, hosted={"type": "web_search"})
    with pytest.raises(ModelFailed, match="no place for the hosted tool 'web'"):
        arguments((search,))


# --- replies -------------------------------------------------------------------------------------


def items_of(message: dict[str, Any], finish_reason: str = "stop") -> list[Item]:
    choice = {"message": message, "finish_reason": finish_reason}
    return reply_of("m", (LOOK, FIND), choice, None, None).items


def test_a_message_becomes_a_message_and_calls() -> None:
    made = items_of(
        {
            "content": "look",
            "refusal": None,
            "tool_calls": [call("c1", "crm__find", '{"a": 1}'), call("c2", "strange__name")],
        },
        "tool_calls",
    )
    assert made == [
        says("look"),
        calls("find", '{"a": 1}', "c1", namespace="crm"),
        calls("strange__name", "{}", "c2"),
    ]


def test_what_servers_leave_out() -> None:
    made = items_of({"tool_calls": [{"function": {"name": "look", "arguments": ""}}] * 2})
    assert [item["arguments"] for item in made] == ["{}", "{}"]
    first, second = (item["call_id"] for item in made)
    assert first != second
    assert items_of({}) == []
    assert items_of({"content": None, "refusal": "no"}) == [refuses("no")]


@pytest.mark.parametrize("reason", ["length", "content_filter"])
def test_a_reply_that_was_cut_short_is_a_failure(reason: str) -> None:
    with pytest.raises(ModelFailed, match=f"its reply is incomplete: {reason}"):
        items_of({"content": "hel"}, reason)


def test_a_streamed_reply_is_put_together_from_its_pieces() -> None:
    whole = StreamedChoice()

    def take(delta: dict[str, Any], **fields: Any) -> list[ModelDelta]:
        return list(whole.deltas_of({"choices": [{"delta": delta, **fields}]}))

    assert take({"role": "assistant", "content": ""}) == []
    assert take({"reasoning_content": "so"}) == [ModelDelta(kind="reasoning", text="so")]
    assert take({"content": "he"}) == [ModelDelta(kind="text", text="he")]
    take({"content": "llo"})
    named = {"index": 0, "id": "c1", "function": {"name": "look", "arguments": ""}}
    assert take({"tool_calls": [named]}) == []
    (delta,) = take({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]})
    assert delta == ModelDelta(kind="arguments", text="{}", call_id="c1")
    at_once = {"id": "c2", "function": {"name": "look", "arguments": "[]"}}
    (delta,) = take({"tool_calls": [{**at_once, "index": 1}]}, finish_reason="tool_calls")
    assert delta.call_id == "c2"
    assert list(whole.deltas_of({"choices": [], "usage": {"prompt_tokens": 3}})) == []
    assert items_of(**whole.choice) == [
        says("hello"),
        calls("look", "{}", "c1"),
        calls("look", "[]", "c2"),
    ]
    assert whole.usage == {"prompt_tokens": 3}
