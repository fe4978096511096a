"""Requests to the Responses API, and what its replies and events are made into."""

from __future__ import annotations

from typing import Any

import pytest

from capsule_tasks.errors import InvalidSetting, ModelFailed
from capsule_tasks.runs.models.model import (
    ModelDelta,
    ModelRequest,
    ModelSettings,
    OutputSchema,
    ToolSpec,
)
from capsule_tasks.runs.models.openai_responses import part_of, reply_of, request_arguments
from capsule_tasks.runs.records import Spent

SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}
LOOK = ToolSpec(name="look", description="Look.", parameters=SCHEMA)
FIND = ToolSpec(name="find", description="Find.", parameters=SCHEMA, strict=False, namespace="crm")
OPEN = ToolSpec(name="open", description="Open.", parameters=SCHEMA, namespace="crm")
MCP = ToolSpec(
    name="mcp",
    description="",
    parameters={},
    hosted={"type": "mcp", "server_label": "docs", "server_url": "https://docs.example"},
)
SEARCH = ToolSpec(name="web", description="", parameters={}, hosted={"type": "web_search"})


def arguments(tools: tuple[ToolSpec, ...] = (), **settings: Any) -> dict[str, Any]:
    request = ModelRequest(input=[], tools=tools, settings=ModelSettings(**settings))
    return request_arguments("m", request)


# --- requests ------------------------------------------------------------------------------------


def test_what_is_left_open_is_not_sent() -> None:
    assert arguments() == {"model": "m", "input": []}


def test_every_setting_has_its_argument() -> None:
    request = ModelRequest(
        input=[{"role": "user", "content": "hi"}],
        instructions="Be kind.",
        output_schema=OutputSchema(name="answer", parameters=SCHEMA),
        conversation_id="conv_1",
        settings=ModelSettings(
            temperature=0.0,
            top_p=0.9,
            max_output_tokens=100,
            reasoning={"effort": "low"},
            verbosity="low",
            truncation="auto",
            store=False,
            metadata={"a": "b"},
            extra={"include": ["reasoning.encrypted_content"]},
        ),
    )
    answer = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
    assert request_arguments("m", request) == {
        "model": "m",
        "input": [{"role": "user", "content": "hi"}],
        "instructions": "Be kind.",
        "conversation": "conv_1",
        "temperature": 0.0,
        "top_p": 0.9,
        "max_output_tokens": 100,
        "reasoning": {"effort": "low"},
        "text": {"format": answer, "verbosity": "low"},
        "truncation": "auto",
        "store": False,
        "metadata": {"a": "b"},
        "include": ["reasoning.encrypted_content"],
    }


def test_tools_are_functions_namespaces_and_what_the_server_runs_itself() -> None:
    tools = arguments((LOOK, FIND, MCP, OPEN))["tools"]
    assert [tool["type"] for tool in tools] == ["function", "namespace", "mcp"]
    look, crm, mcp = tools
    assert look == {
        "type": "function",
        "name": "look",
        "description": "Look.",
        "parameters": SCHEMA,
        "strict": True,
    }
    assert (crm["name"], [tool["name"] for tool in crm["tools"]]) == ("crm", ["find", "open"])
    assert [tool["strict"] for tool in crm["tools"]] == [False, True]
    assert mcp == MCP.hosted


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("auto", "auto"),
        ("required", "required"),
        ("none", "none"),
        ("look", {"type": "function", "name": "look"}),
        ("find", {"type": "function", "name": "find"}),
        ("crm.find", {"type": "function", "name": "find"}),
        ("mcp", {"type": "mcp", "server_label": "docs"}),
        ("web", {"type": "web_search"}),
    ],
)
def test_a_tool_is_chosen_by_its_name(choice: str, sent: Any) -> None:
    tools = (LOOK, FIND, MCP, SEARCH)
    assert arguments(tools, tool_choice=choice, parallel_tool_calls=False) == {
        **arguments(tools),
        "tool_choice": sent,
        "parallel_tool_calls": False,
    }


def test_settings_of_tools_are_not_sent_without_tools() -> None:
    assert arguments((), tool_choice="required", parallel_tool_calls=True) == arguments()


def test_a_choice_that_is_no_tool_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"tool_choice = 'pay': .* told of: 'look', 'mcp'"):
        arguments((LOOK, MCP), tool_choice="pay")


@pytest.mark.parametrize("name", ["input", "stream", "temperature"])
def test_extra_arguments_may_not_repeat_those_of_the_run(name: str) -> None:
    with pytest.raises(InvalidSetting, match=f"without '{name}'"):
        arguments(temperature=1.0, extra={name: 1})


def test_the_input_is_not_shared_with_the_client() -> None:
    items: list[Any] = [{"role": "user", "content": "hi"}]
    sent = request_arguments("m", ModelRequest(input=items))["input"]
    assert sent == items
    assert sent is not items


# --- replies -------------------------------------------------------------------------------------


def test_a_reply_without_usage_is_one_request() -> None:
    reply = reply_of("m", {"id": "r", "output": [{"type": "x"}]}, "q")
    assert (reply.items, reply.spent) == ([{"type": "x"}], Spent(requests=1))
    assert (reply.response_id, reply.request_id) == ("r", "q")


@pytest.mark.parametrize(
    ("response", "why", "is_retryable"),
    [
        ({"status": "failed"}, "its server gave no reason", False),
        ({"status": "failed", "error": {"code": "server_error", "message": "m"}}, "m", True),
        ({"status": "incomplete", "incomplete_details": {"reason": "x"}}, "incomplete: x", False),
        ({"status": "cancelled"}, "its reply is cancelled", False),
        ({"status": "completed"}, "its reply has no output", False),
    ],
)
def test_a_response_that_is_no_reply(
    response: dict[str, Any], why: str, is_retryable: bool
) -> None:
    with pytest.raises(ModelFailed, match=why) as raised:
        reply_of("m", response, None)
    assert raised.value.is_retryable is is_retryable


# --- streams -------------------------------------------------------------------------------------


def parts(*events: dict[str, Any]) -> list[Any]:
    call_ids: dict[Any, str] = {}
    return [part_of("m", event, None, call_ids) for event in events]


def test_deltas_of_arguments_name_the_call_of_their_place() -> None:
    def added(place: int, **item: Any) -> dict[str, Any]:
        return {"type": "response.output_item.added", "output_index": place, "item": item}

    def delta(place: int, text: str) -> dict[str, Any]:
        kind = "response.function_call_arguments.delta"
        return {"type": kind, "output_index": place, "delta": text}

    assert parts(
        added(0, type="function_call", call_id="a"),
        added(1, type="message"),
        added(2, type="function_call", call_id="b"),
        delta(2, "{"),
        delta(0, "}"),
        delta(1, "?"),
    ) == [
        None,
        None,
        None,
        ModelDelta(kind="arguments", text="{", call_id="b"),
        ModelDelta(kind="arguments", text="}", call_id="a"),
        ModelDelta(kind="arguments", text="?"),
    ]


@pytest.mark.parametrize("name", ["reasoning_summary_text", "reasoning_text"])
def test_both_kinds_of_reasoning_are_shown(name: str) -> None:
    (part,) = parts({"type": f"response.{name}.delta", "delta": "so"})
    assert part == ModelDelta(kind="reasoning", text="so")


def test_events_of_tomorrow_are_passed_over() -> None:
    assert parts({"type": "response.thing.delta", "delta": 1}, {}) == [None, None]
