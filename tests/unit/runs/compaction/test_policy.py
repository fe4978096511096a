"""When a compaction is due."""

from __future__ import annotations

from typing import Any

import pytest

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.runs.compaction import (
    Compaction,
    OldItems,
    ResponsesCompactor,
    SummaryCompactor,
    summary_message,
)
from capsule_tasks.runs.compaction.cutting import size_of
from capsule_tasks.runs.compaction.policy import CompactionWatch
from capsule_tasks.runs.models import ModelReply

Item = dict[str, Any]


class Keeping:
    """A compactor that keeps some items, and is not asked here."""

    def __init__(self, keep_last: int = 0) -> None:
        self.keep_last = keep_last

    async def compacted(self, old: OldItems) -> ModelReply | None:
        raise NotImplementedError


class Seen(list[Item]):
    """A view, as a conversation has it."""

    def since(self, start: int) -> list[Item]:
        return self[start:]


def items(count: int) -> Seen:
    return Seen({"role": "user", "content": str(number)} for number in range(count))


def watch(**rules: Any) -> CompactionWatch:
    found = CompactionWatch(Compaction(Keeping(), **rules))
    found.restart(Seen())
    return found


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"threshold_items": 3, "threshold_bytes": 100},
        {"threshold_items": 3, "should": bool},
        {"threshold_items": -1},
        {"threshold_items": "3"},
        {"threshold_items": 0},
        {"threshold_bytes": -5},
        {"threshold_items": 5, "keep_last": 5},
        {"threshold_items": 5, "keep_last": -1},
    ],
    ids=repr,
)
def test_a_policy_without_one_rule_that_can_be_kept_is_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        Compaction(Keeping(), **rules)


def test_the_items_that_the_compactor_keeps_count_for_the_threshold() -> None:
    with pytest.raises(InvalidSetting, match="more than the 7 items that are kept"):
        Compaction(Keeping(7), threshold_items=7)
    Compaction(Keeping(7), threshold_items=7, keep_last=2)


def test_compactors_refuse_models_that_cannot_do_it() -> None:
    with pytest.raises(InvalidSetting, match="a Model"):
        SummaryCompactor(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="compact"):
        ResponsesCompactor(Keeping())  # type: ignore[arg-type]


def test_so_many_items_are_due() -> None:
    due = watch(threshold_items=3)
    assert [due.is_due(items(count)) for count in range(5)] == [False] * 3 + [True] * 2


def test_so_many_bytes_are_due() -> None:
    view = items(9)
    due = watch(threshold_bytes=size_of(view[:5]))
    assert [due.is_due(Seen(view[:count])) for count in range(7)] == [False] * 5 + [True] * 2


def test_a_function_decides_of_the_items_since_the_last_compaction() -> None:
    asked: list[list[Item]] = []

    def should(since: Any) -> bool:
        asked.append(list(since))
        return len(since) > 1

    due = watch(should=should)
    summary = summary_message("so far")
    due.restart(Seen([summary, *items(1)]))
    assert not due.is_due(Seen([summary, *items(1)]))
    assert due.is_due(Seen([summary, *items(2)]))
    assert asked == [items(1), items(2)]


@pytest.mark.parametrize("rule", ["threshold_items", "threshold_bytes"])
def test_what_was_compacted_does_not_count_again(rule: str) -> None:
    threshold = 3 if rule == "threshold_items" else size_of(items(3))
    due = watch(**{rule: threshold})
    old = Seen([*items(20), summary_message("so far")])
    due.restart(old)
    assert not due.is_due(Seen([*old, *items(2)]))
    assert due.is_due(Seen([*old, *items(3)]))


def test_a_view_that_a_filter_made_shorter_is_counted_anew() -> None:
    due = watch(threshold_bytes=size_of(items(4)))
    assert not due.is_due(items(3))
    assert not due.is_due(items(1))
    assert not due.is_due(items(3))
    assert due.is_due(items(4))


def test_a_compaction_is_not_tried_every_turn() -> None:
    due = watch(threshold_items=4)
    assert due.is_due(items(8))
    due.put_off(items(8))
    assert [count for count in range(8, 13) if due.is_due(items(count))] == [10, 11, 12]
