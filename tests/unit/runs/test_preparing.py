"""The first input of a run, and what is stored of it, whatever a callback makes of both."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.runs.items import for_model, normalized
from capsule_tasks.runs.preparing import Prepared, prepare_input_with_session
from capsule_tasks.runs.records import Item


def user(text: str, **fields: Any) -> Item:
    return {"role": "user", "content": text, **fields}


def answer(text: str) -> Item:
    return {"type": "message", "id": f"msg_{text}", "role": "assistant", "content": text}


def call(call_id: str) -> Item:
    return {"type": "function_call", "call_id": call_id, "name": "look", "arguments": "{}"}


def output(call_id: str, text: str = "x") -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


REASONING = {"type": "reasoning", "id": "rs_1", "summary": []}
HISTORY = [user("hi"), answer("hello"), call("c1"), output("c1"), answer("done")]
BYE, HI = user("bye"), user("hi")


async def prepared(
    given_items: Any, history: Any = HISTORY, callback: Any = None, **options: Any
) -> Prepared:
    return await prepare_input_with_session(given_items, history, callback, **options)


async def test_the_model_sees_the_history_and_the_input_and_only_the_input_is_stored() -> None:
    assert await prepared("bye") == ([*HISTORY, BYE], [BYE])
    assert await prepared("bye", None) == ([BYE], [BYE])
    assert await prepared([], HISTORY) == (HISTORY, [])


async def test_orphans_are_left_out_of_the_view_and_new_items_are_not() -> None:
    history = [output("c0"), *HISTORY, REASONING, call("c2")]
    assert await prepared("bye", history) == ([*HISTORY, BYE], [BYE])
    late = output("c2")
    assert await prepared([late], history) == ([*HISTORY, REASONING, call("c2"), late], [late])


async def test_new_items_are_stored_in_their_latest_version_and_without_metadata() -> None:
    new = [call("new"), output("c1", "early"), {**output("c1", "late"), "created_by": "server"}]
    result = await prepared(new)
    assert result.to_store == [call("new"), output("c1", "late")]
    assert result.input == [*HISTORY[:3], HISTORY[4], call("new"), output("c1", "late")]


async def test_a_limit_counts_the_latest_items_and_leaves_no_output_without_its_call() -> None:
    assert (await prepared("bye", limit=2)).input == [answer("done"), BYE]
    assert (await prepared("bye", limit=3)).input == [*HISTORY[-3:], BYE]
    assert (await prepared("bye", limit=9)).input == [*HISTORY, BYE]


async def test_an_item_that_the_history_has_under_its_id_is_stored_only_if_it_changed() -> None:
    new = output("c1", "better")
    assert await prepared([*HISTORY[1:], HI]) == ([user("hi"), *HISTORY[1:], HI], [HI])
    assert await prepared([new]) == ([*HISTORY[:3], HISTORY[4], new], [new])


@pytest.mark.parametrize("wrong", [None, (), "text", {"role": "user"}, iter(())])
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_callback_that_returns_no_list_is_refused(wrong: Any, is_async: bool) -> None:
    async def later(_history: list[Item], _new: list[Item]) -> Any:
        return wrong

    callback = later if is_async else lambda _history, _new: wrong
    with pytest.raises(InvalidSetting, match="session_input_callback") as caught:
        await prepared("bye", callback=callback)
    assert type(wrong).__name__ in str(caught.value)


async def test_a_callback_that_returns_no_items_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"session_input_callback\[1\]"):
        await prepared("bye", callback=lambda history, _: [history[0], "text"])


def as_json(items: list[Item]) -> list[Item]:
    return [json.loads(json.dumps(item)) for item in items]


def rebuilt(items: list[Item]) -> list[Item]:
    """The items as somebody writes them who knows only what they say."""
    return [
        {"role": item["role"], "content": [{"type": "input_text", "text": item["content"]}]}
        if "role" in item
        else {key: value for key, value in item.items() if key != "id"}
        for item in items
    ]


@pytest.mark.parametrize("copied", [list, copy.deepcopy, as_json, rebuilt])
async def test_no_copy_of_the_history_is_stored_again(copied: Any) -> None:
    shapes: list[Callable[[list[Item], list[Item]], list[Item]]] = [
        lambda h, n: h + n,
        lambda h, n: n + h,
        lambda h, n: h[::-1] + n,
        lambda h, n: h[-2:] + n,
        lambda h, n: h + h + n,
        lambda h, n: h[:1] + n + h[1:],
        lambda _, n: n,
    ]
    for shape in shapes:
        for new in (BYE, HI):
            _, stored = await prepared([new], callback=lambda h, n: shape(copied(h), n))  # noqa: B023
            assert stored == [new]
            _, stored = await prepared([new], callback=lambda h, n: shape(copied(h), copied(n)))  # noqa: B023
            assert for_model(normalized(stored)) == copied([new])


async def test_an_input_that_says_what_the_history_says_is_stored() -> None:
    history = [HI, HI, HI]
    for copied in (list, copy.deepcopy):
        result = await prepared([HI, HI], history, lambda h, n: copied(h) + copied(n))  # noqa: B023
        assert result == ([HI] * 5, [HI, HI])


async def test_new_items_are_stored_once_in_the_order_of_the_callback_without_those_it_drops() -> (
    None
):
    one, two, three = user("1"), user("2"), user("3")
    result = await prepared([one, two, three], [HI], lambda h, n: [n[2], n[0], n[2], *h])
    assert result == ([three, one, three, HI], [three, one])
    assert (await prepared("bye", callback=lambda h, _: h)).to_store == []
    repeated = await prepared([one, two], [], lambda _, n: [n[0], copy.deepcopy(n[0])])
    assert repeated == ([one, one], [one]), "a copy was stored in the place of another item"


async def test_a_callback_may_change_what_the_model_sees_of_the_history() -> None:
    history = copy.deepcopy(HISTORY)

    def shorter(items: list[Item], new: list[Item]) -> list[Item]:
        for item in items:
            if "content" in item:
                item["content"] = item["content"][:1]
        note = {"role": "system", "content": "In short:"}
        return [note, {**user("h"), "id": "msg_new"}, *items, *new]

    result = await prepared("bye", history, shorter)
    assert result.to_store == [BYE]
    assert result.input[3]["content"] == "h"
    assert history == HISTORY, "the callback changed the history"


async def test_a_callback_that_changes_a_new_item_stores_it_as_changed() -> None:
    def in_place(history: list[Item], new: list[Item]) -> list[Item]:
        new[0]["content"] += "!"
        return history + new

    for callback in (in_place, lambda h, n: [*h, user(n[0]["content"] + "!")]):
        result = await prepared("bye", callback=callback)
        assert result == ([*HISTORY, user("bye!")], [user("bye!")])


async def test_only_an_item_of_the_same_kind_stands_in_for_a_new_one() -> None:
    note = {"role": "system", "content": "Be brief."}
    assert (await prepared("bye", callback=lambda h, _: [*h, note])).to_store == []
    stored = (await prepared("bye", callback=lambda h, n: [user("More."), *h, *n])).to_store
    assert stored == [BYE], "an item of the callback's own was stored"


async def test_an_async_callback_may_await() -> None:
    async def callback(history: list[Item], new: list[Item]) -> list[Item]:
        return history[-1:] + new

    assert await prepared("bye", callback=callback) == ([HISTORY[-1], BYE], [BYE])


async def test_the_calls_and_outputs_that_a_callback_separates_are_left_out() -> None:
    result = await prepared("bye", callback=lambda h, n: [h[2], h[4], *n])
    assert result.input == [answer("done"), BYE]
    result = await prepared("bye", callback=lambda h, n: [h[3], h[4], *n])
    assert result.input == [answer("done"), BYE]


# --- any history, any callback, beside the rule in its plainest form -----------------------------

texts = st.sampled_from(["a", "b", "c"])
messages = st.builds(user, texts) | st.builds(answer, texts)
histories = st.lists(messages, max_size=6)
new_items = st.lists(st.builds(user, texts), max_size=3)


class Shuffled:
    """A callback that copies, repeats, leaves out and reorders what is in the history."""

    def __init__(self, data: st.DataObject) -> None:
        self._draw = data.draw
        self.kept_new: list[Item] = []

    def __call__(self, history: list[Item], new: list[Item]) -> list[Item]:
        draw = self._draw
        chosen = draw(st.lists(st.sampled_from(history), max_size=8)) if history else []
        copied = draw(st.sampled_from([list, copy.deepcopy, as_json, rebuilt]))
        olds = [(False, item) for item in copied(chosen)]
        self.kept_new = draw(st.permutations(new))
        copied = draw(st.sampled_from([list, copy.deepcopy, as_json]))
        all_items = olds + [(True, item) for item in copied(self.kept_new)]
        return [item for _, item in draw(st.permutations(all_items))]


@settings(max_examples=150)
@given(st.data(), histories, new_items)
async def test_any_callback_stores_the_new_items_and_nothing_else(
    data: st.DataObject, history: list[Item], new: list[Item]
) -> None:
    before = copy.deepcopy(history)
    result = await prepare_input_with_session(new, history, Shuffled(data))
    count = Counter(json.dumps(item, sort_keys=True) for item in result.to_store)
    assert count == Counter(json.dumps(item, sort_keys=True) for item in new)
    assert history == before
