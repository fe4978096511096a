"""Cuts of histories: nothing that belongs together is cut, and everything else may go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule_tasks.runs.compaction.compactors import summary_message
from capsule_tasks.runs.compaction.cutting import (
    Cut,
    cut,
    has_halves,
    is_compaction,
    is_waiting,
    since_compaction,
    size_of,
)

Item = dict[str, Any]


def user(text: str = "hi") -> Item:
    return {"role": "user", "content": text}


def says(text: str = "hello") -> Item:
    content = [{"type": "output_text", "text": text}]
    return {"type": "message", "role": "assistant", "content": content}


def reasoning(name: str = "r") -> Item:
    return {"type": "reasoning", "id": name, "summary": []}


def call(call_id: str) -> Item:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def output(call_id: str) -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": "1"}


def call_of(item: Item) -> str | None:
    return item["call_id"] if item.get("type") == "function_call" else None


def output_of(item: Item) -> str | None:
    return item["call_id"] if item.get("type") == "function_call_output" else None


def pieces(items: list[Item], keep_last: int = 0) -> tuple[int, int] | None:
    """How many items a cut replaces, and how many of them it puts back."""
    found = cut(items, keep_last)
    return found and (found.stop, len(found.waiting))


# --- examples ------------------------------------------------------------------------------------


def test_the_last_items_are_kept() -> None:
    assert pieces([user(), says(), user(), says()], 2) == (2, 0)
    assert pieces([user(), says(), user(), says()]) == (4, 0)


def test_a_history_that_is_short_enough_has_nothing_to_compact() -> None:
    assert pieces([], 0) is None
    assert pieces([user(), says()], 2) is None
    assert pieces([user(), says()], 9) is None


def test_a_call_stays_with_its_output() -> None:
    items = [user(), call("1"), output("1"), says()]
    assert pieces(items, 2) == (1, 0)
    assert pieces(items, 1) == (3, 0)


def test_a_search_without_an_id_stays_with_its_output() -> None:
    items = [user(), {"type": "tool_search_call"}, {"type": "tool_search_output"}, says()]
    assert pieces(items, 2) == (1, 0)
    assert is_waiting(items[:2])
    assert has_halves(items[2:])


def test_calls_of_one_reply_stay_together() -> None:
    items = [user(), call("1"), call("2"), output("1"), output("2"), says()]
    for keep_last in (2, 3, 4, 5):
        assert pieces(items, keep_last) == (1, 0)


def test_reasoning_stays_with_its_whole_reply() -> None:
    items = [user(), reasoning(), says(), call("1"), output("1"), says()]
    for keep_last in (2, 3, 4, 5):
        assert pieces(items, keep_last) == (1, 0)
    assert pieces(items, 1) == (5, 0)


def test_messages_without_reasoning_may_be_parted() -> None:
    assert pieces([user(), says(), says(), says()], 1) == (3, 0)


def test_calls_of_other_runs_that_wait_stay_behind_the_replacement() -> None:
    items = [user(), reasoning(), call("parked"), user(), says()]
    found = cut(items, 0)
    assert found == Cut(5, [user(), user(), says()], [reasoning(), call("parked")])


def test_what_was_compacted_already_is_not_compacted_again() -> None:
    items = [summary_message("so far"), user(), says()]
    assert pieces(items, 2) is None
    assert pieces(items, 1) == (2, 0)
    assert pieces([user(), {"type": "compaction", "encrypted_content": "x"}], 0) is None


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([], False),
        ([user(), says()], False),
        ([user(), call("1")], True),
        ([user(), call("1"), call("2"), output("1")], True),
        ([user(), call("1"), call("2"), output("2"), output("1")], False),
        ([user(), call("1"), user()], False),
        ([user(), call("1"), says()], True),
        ([user(), {"type": "mcp_approval_request", "id": "a"}], True),
        ([user(), {"type": "web_search_call", "id": "w"}], False),
        ([output("1"), call("1")], True),
    ],
)
def test_calls_since_the_last_user_message_wait(items: list[Item], expected: bool) -> None:
    assert is_waiting(items) is expected


def test_the_items_since_a_compaction() -> None:
    summary = summary_message("so far")
    assert is_compaction(summary)
    assert not is_compaction(user("Summary of something else"))
    as_parts = {"role": "user", "content": [{"type": "input_text", "text": summary["content"]}]}
    assert is_compaction(as_parts)
    assert since_compaction([user(), says()]) == 0
    assert since_compaction([summary, user(), summary, says()]) == 3


def test_ciphertext_has_no_size() -> None:
    short, long = ({"type": "compaction", "encrypted_content": "x" * n} for n in (1, 1000))
    assert size_of([short]) == size_of([long]) > 0


def test_halves_are_found() -> None:
    assert not has_halves([user(), call("1"), output("1")])
    assert has_halves([call("1")])
    assert has_halves([output("1")])


# --- any history ---------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, Item]]:
    """Items, each with the number of the reply or of the input that it is of.

    Outputs come in any order behind their calls, maybe after other replies, or never.
    """
    items: list[tuple[int, Item]] = []
    owed: list[str] = []
    for number in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(["user", "reply", "reply", "outputs", "summary"]))
        if kind == "user":
            items.append((number, user()))
        elif kind == "summary":
            items.append((number, summary_message("so far")))
        elif kind == "reply":
            if draw(st.booleans()):
                items.append((number, reasoning()))
            if draw(st.booleans()):
                items.append((number, says()))
            for index in range(draw(st.integers(0, 3))):
                # A model may use an id again.
                call_id = draw(st.sampled_from([f"{number}.{index}", "same"]))
                items.append((number, call(call_id)))
                owed.append(call_id)
        else:
            for call_id in draw(st.permutations(owed)):
                if draw(st.integers(0, 3)):
                    items.append((number, output(call_id)))
                    owed.remove(call_id)
    return items


def allowed(items: list[tuple[int, Item]], stop: int) -> bool:
    """Whether a cut is allowed at a place, from the definition."""
    before, behind = items[:stop], items[stop:]
    pairs = [{call_of(i) or output_of(i) for _, i in part} - {None} for part in (before, behind)]
    answered = {output_of(item) for _, item in items}
    if pairs[0] & pairs[1] & answered:
        return False
    segment: list[Item] = []
    for _, item in items[:stop]:
        segment = [*segment, item] if made_by_model(item) else []
    is_reasoned = any(item.get("type") == "reasoning" for item in segment)
    return not (is_reasoned and behind and made_by_model(behind[0][1]))


def made_by_model(item: Item) -> bool:
    return item.get("type") in ("reasoning", "function_call") or item.get("role") == "assistant"


def cuts(items: list[tuple[int, Item]], keep_last: int) -> Iterator[int]:
    return (at for at in range(len(items) - keep_last, 0, -1) if allowed(items, at))


@given(histories(), st.integers(0, 6))
def test_a_cut_is_at_the_last_place_where_it_parts_nothing(
    numbered: list[tuple[int, Item]], keep_last: int
) -> None:
    items = [item for _, item in numbered]
    found = cut(items, keep_last)
    stop = next(cuts(numbered, keep_last), 0)
    if found is None:
        waiting = {call_of(item) for item in items} - {output_of(item) for item in items}
        rest = [item for item in items[:stop] if call_of(item) not in waiting - {None}]
        rest = rest[since_compaction(rest) :]
        assert all(item.get("type") == "reasoning" for item in rest)
    else:
        assert found.stop == stop


@given(histories(), st.integers(0, 6))
def test_a_cut_takes_no_half(numbered: list[tuple[int, Item]], keep_last: int) -> None:
    items = [item for _, item in numbered]
    found = cut(items, keep_last)
    if found is None:
        return
    kept = items[found.stop :]
    assert len(kept) >= keep_last
    # Every item of the old part goes or waits.
    together = sorted(map(repr, [*found.old, *found.waiting]))
    assert together == sorted(map(repr, items[: found.stop]))
    # No pair has a half in each part, and no call that waits for an output is lost.
    answered = {output_of(item) for item in items} - {None}
    old = {call_of(item) or output_of(item) for item in found.old} - {None}
    later = {call_of(item) or output_of(item) for item in kept} - {None}
    assert not old & later & answered
    assert {call_of(item) for item in found.old} - {None} <= answered
    assert not {call_of(item) for item in found.waiting} & answered


@given(histories())
def test_reasoning_is_never_parted_from_its_reply(numbered: list[tuple[int, Item]]) -> None:
    for keep_last in range(len(numbered)):
        found = cut([item for _, item in numbered], keep_last)
        if found is None or found.stop == len(numbered):
            continue
        at = found.stop
        if numbered[at - 1][0] == numbered[at][0]:  # within one reply
            reply = [item for number, item in numbered if number == numbered[at][0]]
            assert all(item.get("type") != "reasoning" for item in reply)
