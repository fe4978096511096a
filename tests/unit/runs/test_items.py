"""Items: one shape, one version of each, calls with their outputs, and what crosses a boundary."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.runs.items import (
    OUTPUT_OF,
    RunningDigest,
    call_id_of,
    deduplicated,
    digest,
    for_history,
    for_model,
    identity,
    normalized,
    without_orphans,
)
from capsule_tasks.runs.records import Item
from capsule_tasks.storage.codec import decoded, encoded

ORDER = {"role": "user", "content": "Where is order 42?"}
ANSWER = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "It left today.", "annotations": []}],
}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": []}


def call(call_id: str = "call_1", kind: str = "function_call", **fields: Any) -> Item:
    if kind == "mcp_approval_request":
        return {"type": kind, "id": call_id, "name": "look", "arguments": "{}", **fields}
    return {"type": kind, "call_id": call_id, "name": "look", "arguments": "{}", **fields}


def output(call_id: str = "call_1", kind: str = "function_call", **fields: Any) -> Item:
    named = {"mcp_approval_request": "approval_request_id", "local_shell_call": "id"}
    return {"type": OUTPUT_OF[kind], named.get(kind, "call_id"): call_id, "output": "x", **fields}


class Pydantic(pydantic.BaseModel):
    type: str
    call_id: str
    status: str | None = None
    arguments: dict[str, int] = {}


# --- normalized ----------------------------------------------------------------------------------


def test_a_text_is_a_message_of_the_user() -> None:
    assert normalized("Hello") == [{"role": "user", "content": "Hello"}]


def test_objects_and_mappings_become_dicts() -> None:
    model = Pydantic(type="function_call", call_id="c", arguments={"a": 1})
    items: list[Any] = [model, OrderedDict(ORDER), {"role": "user", "content": (model,)}]
    plain = {"type": "function_call", "call_id": "c", "arguments": {"a": 1}}
    assert normalized(items) == [plain, ORDER, {"role": "user", "content": [plain]}]
    assert all(type(item) is dict for item in normalized(items))


@pytest.mark.parametrize(
    ("given_items", "named"),
    [
        (7, "input"),
        (None, "input"),
        ({"role": "user"}, "input"),
        ([ORDER, "text"], r"input\[1\]"),
        ([{"content": "no role"}], r"input\[0\]"),
        ([{"role": ""}], r"input\[0\]"),
        ([{"role": "user", "content": float("nan")}], r"input\[0\].*finite"),
        ([{"role": "user", "content": {1: 2}}], r"input\[0\].*key of type int"),
        ([{"role": "user", "content": object()}], r"input\[0\].*content is of type object"),
    ],
)
def test_what_is_no_item_is_refused_by_name(given_items: Any, named: str) -> None:
    with pytest.raises(InvalidSetting, match=named):
        normalized(given_items)


def test_an_item_of_half_a_surrogate_pair_and_a_huge_number_is_an_item() -> None:
    item = {"role": "user", "content": "\ud800", "number": 2**80}
    assert normalized([item]) == [item]
    assert digest(item) == digest(decoded(encoded(item)))


# --- digests -------------------------------------------------------------------------------------


def test_the_order_of_fields_does_not_change_a_digest() -> None:
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1})
    assert digest({"a": 1}) != digest({"a": "1"})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@settings(max_examples=40)
@given(st.dictionaries(st.text(max_size=3), st.one_of(st.booleans(), st.text(), st.integers())))
def test_a_digest_is_that_of_the_item_read_back_from_a_history(item: Item) -> None:
    assert digest(item) == digest(decoded(encoded(item)))


@settings(max_examples=40)
@given(st.lists(st.sampled_from([ORDER, ANSWER, call(), output()])), st.integers(0, 5))
def test_a_running_digest_is_that_of_the_whole_list(items: list[Item], first: int) -> None:
    running = RunningDigest(items[:first])
    running.update(items[first:])
    assert running.hexdigest() == RunningDigest(items).hexdigest()
    assert running.count == len(items)
    assert RunningDigest([*items, ORDER]).hexdigest() != running.hexdigest()


# --- duplicates ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OUTPUT_OF)
def test_a_call_and_its_output_share_an_id_and_are_different_items(kind: str) -> None:
    one, other = call("c", kind), output("c", kind)
    assert call_id_of(one) == call_id_of(other) == "c"
    assert identity(one) != identity(other)
    assert identity(one) != identity(call("d", kind))


@pytest.mark.parametrize(
    "item",
    [ORDER, {**ANSWER, "id": "__fake_id__"}, {**REASONING, "id": "__fake_id__"}, {"type": "x"}],
)
def test_an_item_without_an_id_is_no_duplicate_of_another(item: Item) -> None:
    assert identity(item) is None
    assert deduplicated([item, item]) == [item, item]


def test_messages_with_one_id_are_one_only_if_they_say_the_same() -> None:
    other = {**ANSWER, "content": "Something else."}
    assert deduplicated([ANSWER, other, ANSWER]) == [other, ANSWER]


@pytest.mark.parametrize("kind", OUTPUT_OF)
def test_the_latest_version_counts_calls_first_and_outputs_last(kind: str) -> None:
    old, new = call("c", kind, arguments="old"), call("c", kind, arguments="new")
    early, late = output("c", kind, output="early"), output("c", kind, output="late")
    items = [old, early, ORDER, new, ORDER, late]
    assert deduplicated(items) == [new, ORDER, ORDER, late]


def plain_deduplicated(items: list[Item]) -> list[Item]:
    """The same rule, read from the page: one step for each item, and no index."""
    result: list[Item] = []
    for index, item in enumerate(items):
        key = identity(item)
        earlier = [other for other in items[:index] if key and identity(other) == key]
        later = [other for other in items[index + 1 :] if key and identity(other) == key]
        stays_first = item["type"] in OUTPUT_OF or item["type"] == "reasoning"
        if key is None or not (earlier if stays_first else later):
            result.append(later[-1] if key and later else item)
    return result


versions = st.sampled_from(["1", "2", "3"])
ids = st.sampled_from(["a", "b"])
kinds = st.sampled_from(["function_call", "custom_tool_call", "mcp_approval_request"])
some_items = st.one_of(
    st.builds(lambda i, k, v: call(i, k, version=v), ids, kinds, versions),
    st.builds(lambda i, k, v: output(i, k, version=v), ids, kinds, versions),
    st.builds(lambda i, v: {**REASONING, "id": i, "version": v}, ids, versions),
    st.builds(lambda i, v: {**ANSWER, "id": i, "content": v}, ids, versions),
    st.builds(lambda v: {**ORDER, "type": "message", "content": v}, versions),
    st.builds(lambda i: {"type": "web_search_call", "id": i, "status": "completed"}, ids),
)
item_lists = st.lists(some_items, max_size=8)


@settings(max_examples=100)
@given(item_lists, st.integers(0, 8))
def test_any_items_are_deduplicated_as_the_rule_says(items: list[Item], middle: int) -> None:
    assert deduplicated(items) == plain_deduplicated(items)
    by_turns = deduplicated([*deduplicated(items[:middle]), *items[middle:]])
    assert by_turns == deduplicated(items), "it matters when items are deduplicated"


# --- orphans -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OUTPUT_OF)
def test_a_call_without_output_goes_with_its_reasoning(kind: str) -> None:
    orphan, pair = [REASONING, call("x", kind)], [REASONING, call("c", kind), output("c", kind)]
    assert without_orphans([ORDER, *orphan, ORDER, *pair]) == [ORDER, ORDER, *pair]
    assert without_orphans([ORDER, *orphan], pending={"x"}) == [ORDER, *orphan]
    assert without_orphans([ORDER, *orphan], keep={1, 2}) == [ORDER, *orphan]


@pytest.mark.parametrize("kind", OUTPUT_OF)
def test_an_output_goes_whose_call_a_limit_has_cut_off(kind: str) -> None:
    assert without_orphans([output("c", kind), ORDER]) == [ORDER]
    assert without_orphans([output("c", kind), ORDER], keep={0}) == [output("c", kind), ORDER]


def test_an_output_of_another_kind_of_call_does_not_count() -> None:
    items = [call("c"), output("c", "shell_call")]
    assert without_orphans(items) == []


def test_reasoning_that_led_to_nothing_goes() -> None:
    pair = [call("c"), output("c")]
    assert without_orphans([REASONING, ORDER, *pair, REASONING]) == [ORDER, *pair]
    assert without_orphans([call("c"), REASONING, output("c")]) == pair
    assert without_orphans([REASONING, REASONING, ANSWER]) == [REASONING, REASONING, ANSWER]


def test_a_tool_search_without_an_id_stays_with_its_output() -> None:
    search, found = {"type": "tool_search_call"}, {"type": "tool_search_output", "tools": []}
    assert without_orphans([search, found]) == [search, found]
    assert without_orphans([search]) == []
    first = {"type": "tool_search_call", "arguments": {"query": "lost"}}
    assert without_orphans([first, search, found]) == [search, found]
    assert without_orphans([call("ts", "tool_search_call"), found]) == []


def test_a_program_stays_while_its_own_calls_have_outputs_and_goes_with_them_otherwise() -> None:
    caller = {"caller": {"type": "program", "caller_id": "p"}}
    program = {"type": "program", "call_id": "p", "code": "…"}
    working = [program, call("c", **caller), output("c", **caller)]
    assert without_orphans(working) == working
    assert without_orphans([program, call("c", **caller), ORDER]) == [ORDER]
    search = {"type": "web_search_call", "id": "ws", **caller}
    assert without_orphans([program, search, ORDER]) == [ORDER]
    assert without_orphans([program, search, ORDER], keep={1}) == [search, ORDER]


@settings(max_examples=100)
@given(item_lists)
def test_of_any_items_only_pairs_and_what_led_to_them_stay(items: list[Item]) -> None:
    kept = without_orphans(items)
    for item in kept:
        kind, call_id = item["type"], call_id_of(item)
        if kind in OUTPUT_OF:
            assert any(
                each["type"] == OUTPUT_OF[kind] and call_id_of(each) == call_id for each in kept
            )
        elif kind in OUTPUT_OF.values():
            assert any(
                OUTPUT_OF.get(each["type"]) == kind and call_id_of(each) == call_id for each in kept
            )
    unpaired = ("reasoning", *OUTPUT_OF, *OUTPUT_OF.values())
    others = [item for item in items if item["type"] not in unpaired]
    assert [item for item in kept if item["type"] not in unpaired] == others
    assert without_orphans(kept) == kept


# --- boundaries ----------------------------------------------------------------------------------

METADATA = {
    "created_by": "agent",
    "provider_data": {"a": 1},
    "_agents_tool_title": "T",
    "_agents_tool_description": "D",
}


def test_metadata_is_neither_sent_nor_stored() -> None:
    item = {**call(), **METADATA, "status": None}
    before = dict(item)
    assert for_model([item]) == for_history([item]) == [call()]
    assert item == before, "the given item was changed"


def test_the_status_of_complete_items_is_stored_and_not_sent() -> None:
    item = {**call(), "status": "completed"}
    assert for_history([item]) == [item]
    assert for_model([item]) == [call()]
    assert "status" not in for_model([ANSWER])[0]
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    assert for_model([search]) == [search]


def test_a_placeholder_is_no_id() -> None:
    assert "id" not in for_model([{**ANSWER, "id": "__fake_id__"}])[0]
    assert "id" not in for_history([{**ANSWER, "id": "__fake_id__"}])[0]
    assert for_model([ANSWER])[0]["id"] == "msg_1"


def test_another_provider_is_sent_no_ids_and_no_reasoning_that_it_cannot_read() -> None:
    request = call("mcpr_1", "mcp_approval_request")
    sealed = {**REASONING, "encrypted_content": "…"}
    sent = for_model([REASONING, sealed, {**call(), "id": "fc_1"}, request], keep_ids=False)
    assert sent == [{k: v for k, v in sealed.items() if k != "id"}, call(), request]


@settings(max_examples=60)
@given(
    st.lists(
        st.builds(
            lambda item, more: {**item, **more},
            some_items,
            st.dictionaries(
                st.sampled_from([*METADATA, "status", "id"]),
                st.sampled_from([None, "completed", "__fake_id__", "x"]),
            ),
        )
    )
)
def test_the_model_is_sent_the_same_before_and_after_storing(items: list[Item]) -> None:
    sent, stored = for_model(items), for_history(items)
    assert for_model(stored) == sent
    assert for_model(sent) == sent
    assert for_history(stored) == stored
