"""Handoffs as tools of a model, and the ready-made filters of its view."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule_tasks.errors import InvalidSetting, WrongArguments
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.handoffs import Handoff, HandoffInput, only_last, without_tools
from capsule_tasks.runs.records import Item

Refunds = Agent(name="RefundDesk 2", handoff_description="Pays back.")


class Reason(msgspec.Struct):
    why: str
    urgency: int = 1


def test_a_handoff_is_a_tool_named_after_its_agent() -> None:
    spec = Handoff(Refunds).as_spec()
    assert spec.name == "transfer_to_refund_desk_2"
    assert spec.description == "Hand the conversation over to RefundDesk 2. Pays back."
    assert (spec.parameters["properties"], spec.strict) == ({}, True)
    assert Handoff(Refunds).decode("nonsense") is None
    named = Handoff(Refunds, name="refunds", description="").as_spec()
    assert (named.name, named.description) == ("refunds", "")


def test_arguments_of_a_handoff_are_of_its_type() -> None:
    handoff = Handoff(Refunds, input_type=Reason, on_handoff=lambda _ctx, _reason: None)
    spec = handoff.as_spec()
    assert (spec.parameters["required"], spec.strict) == (["why", "urgency"], True)
    assert handoff.decode('{"why": "broken", "urgency": null}') == Reason("broken")
    with pytest.raises(WrongArguments, match=r"transfer_to_refund_desk_2 .* field `why`"):
        handoff.decode("{}")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"agent": "Refunds"}, "Handoff.agent = 'Refunds'"),
        ({"agent": Agent(name="客服")}, "name of the handoff to 客服 = ''"),
        ({"name": "a b"}, "name of the handoff"),
        ({"description": 3}, "description = 3"),
        ({"on_handoff": lambda: None}, "on_handoff = .*1 arguments"),
        ({"on_handoff": lambda _ctx: None, "input_type": Reason}, "on_handoff = .*2 arguments"),
        ({"input_filter": 3}, "input_filter = 3"),
        ({"is_enabled": "yes"}, "is_enabled = 'yes'"),
        ({"input_type": int}, "input_type = .*named fields"),
        ({"input_type": object}, "input_type = .*cannot be decoded"),
    ],
)
def test_what_is_no_handoff_is_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidSetting, match=name):
        Handoff(**({"agent": Refunds} | options))


# --- filters -------------------------------------------------------------------------------------

USER = {"role": "user", "content": "Hello"}
ANSWER = {"type": "message", "role": "assistant", "content": "Hi"}
THOUGHT = {"type": "reasoning", "id": "rs"}


def call(call_id: str) -> Item:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def output(call_id: str) -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": "1"}


def view(*items: Item) -> HandoffInput:
    return HandoffInput(list(items[:2]), list(items[2:]), "{}")


def test_calls_go_with_their_outputs_and_their_reasoning() -> None:
    hosted = {"type": "web_search_call", "id": "ws"}
    mcp = {"type": "mcp_list_tools", "id": "m"}
    items = [USER, THOUGHT, call("1"), output("1"), mcp, THOUGHT, THOUGHT, hosted, THOUGHT, ANSWER]
    assert without_tools(view(*items)) == [USER, THOUGHT, ANSWER]


@pytest.mark.parametrize(
    ("count", "kept"),
    [(1, 5), (2, 5), (3, 5), (5, 5), (6, 6), (9, 6)],
    ids=str,
)
def test_the_last_items_are_kept_with_what_belongs_to_them(count: int, kept: int) -> None:
    items = [USER, THOUGHT, call("1"), call("2"), output("1"), output("2")]
    assert only_last(count)(view(*items)) == items[-kept:]


def test_outputs_without_their_calls_are_left_out() -> None:
    items = [call("1"), USER, output("1"), ANSWER]
    assert only_last(3)(view(*items)) == [USER, ANSWER]


@pytest.mark.parametrize("count", [0, -1, True, "3"])
def test_a_count_is_a_positive_number(count: Any) -> None:
    with pytest.raises(InvalidSetting, match="only_last"):
        only_last(count)


KINDS = {"u": USER, "m": ANSWER, "r": THOUGHT, "h": {"type": "web_search_call"}}


@given(st.text("umrhco", max_size=12), st.integers(1, 12))
def test_no_pair_is_split_and_nothing_else_is_left_out(kinds: str, count: int) -> None:
    items: list[Item] = []
    waiting: list[str] = []
    for number, kind in enumerate(kinds):
        if kind == "c":
            waiting.append(str(number))
            items.append({**call(str(number)), "n": number})
        elif kind == "o" and waiting:
            items.append({**output(waiting.pop(0)), "n": number})
        else:
            items.append({**KINDS.get(kind, USER), "n": number})
    kept = only_last(count)(view(*items))
    assert isinstance(kept, list)
    calls = {each["call_id"] for each in kept if each.get("type") == "function_call"}
    first = min((each["n"] for each in kept), default=len(items))
    assert first <= max(0, len(items) - count) or not items
    assert first == 0 or items[first - 1].get("type") != "reasoning"
    assert kept == [
        each
        for each in items[first:]
        if each.get("type") != "function_call_output" or each["call_id"] in calls
    ]
