"""Plans of replies."""

from __future__ import annotations

from typing import Any

import pytest

from capsule_tasks.errors import ModelMisbehaved
from capsule_tasks.runs import AgentId, ToolKey
from capsule_tasks.runs.engine.deciding import (
    earlier_results,
    output_item,
    planned,
    without_final_message,
)
from capsule_tasks.testing.models import calls, reasons, refuses, says

AGENT = AgentId("Agent")
TOOLS = [ToolKey("look"), ToolKey.namespaced("crm", "look")]


def plan(*items: Any) -> Any:
    return planned(list(items), AGENT, TOOLS, ["transfer_to_other"])


def test_a_reply_without_calls_is_final() -> None:
    assert plan(says("a"), says("b")).text == "b"
    assert plan(says("a")).is_final
    assert plan({"type": "image_generation_call", "id": "i1"}).text is None
    assert plan(refuses("no")).text == "no"
    assert plan({"role": "assistant", "content": "plain"}).text == "plain"


def test_calls_of_tools_with_and_without_a_namespace() -> None:
    found = plan(calls("look", {}, "c1"), calls("look", {}, "c2", namespace="crm"))
    assert [call.tool for call in found.calls] == TOOLS
    assert not found.is_final


def test_the_same_call_twice_is_one_call() -> None:
    found = plan(calls("look", {}, "c1"), calls("look", {}, "c1"))
    assert (len(found.calls), len(found.items)) == (1, 1)


@pytest.mark.parametrize(
    "items",
    [
        [calls("look", {"a": 1}, "c1"), calls("look", {"a": 2}, "c1")],
        [{"type": "function_call", "name": "look", "arguments": "{}"}],
        [{"type": "function_call", "name": "look", "arguments": "{}", "call_id": ""}],
        [{"type": "function_call", "name": "look", "arguments": "{}", "call_id": 7}],
        [{"type": "function_call", "name": None, "arguments": "{}", "call_id": "c1"}],
        [{"type": "function_call", "name": "look", "arguments": {}, "call_id": "c1"}],
        [{"type": "shell_call", "call_id": "s1"}],
        [{"type": "mcp_approval_request", "id": "m1"}],
    ],
    ids=["two calls", "no id", "empty id", "number", "no name", "no text", "shell", "hosted"],
)
def test_calls_that_cannot_be_answered_are_refused(items: list[Any]) -> None:
    with pytest.raises(ModelMisbehaved):
        plan(*items)


@pytest.mark.parametrize("items", [[], [reasons("hm")]], ids=["nothing", "reasoning"])
def test_an_empty_reply_is_refused(items: list[Any]) -> None:
    with pytest.raises(ModelMisbehaved, match="empty"):
        plan(*items)


def test_calls_that_the_server_has_run_are_done() -> None:
    shell = {"type": "shell_call", "call_id": "s1"}
    assert plan(shell, {"type": "shell_call_output", "call_id": "s1"}, says("a")).is_final


def test_unknown_tools_and_second_handoffs_are_told() -> None:
    found = plan(
        calls("transfer_to_other", {}, "h1"),
        calls("shoot", {}, "c1"),
        calls("transfer_to_other", {}, "h2"),
        calls("look", {}, "c2", namespace="other"),
    )
    assert found.handoff.call_id == "h1"
    assert set(found.told) == {"c1", "h2", "c2"}
    assert [call.call_id for call in found.all_calls] == ["h1"]


def test_a_final_message_goes_with_its_reasoning() -> None:
    search = {"type": "web_search_call", "id": "w1"}
    kept = without_final_message([reasons("a"), search, reasons("b"), says("c")])
    assert kept == [reasons("a"), search]


def test_results_of_a_reply_whose_other_calls_waited() -> None:
    before = [calls("look", {}, "c0"), output_item("c0", "old")]
    reply = [reasons("hm"), calls("look", {}, "c1"), calls("pay", {}, "c2")]
    found = earlier_results([*before, *reply, output_item("c1", "new")])
    assert [(each.tool, each.call_id, each.output) for each in found] == [("look", "c1", "new")]
    assert earlier_results([*before, *reply]) == []
