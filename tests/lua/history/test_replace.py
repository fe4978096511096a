"""`stage` and `replace`."""

from __future__ import annotations

from typing import Any

import pytest

from capsule_tasks.storage.scripts import Code
from tests.lua.history.bench import TTL_MS, Bench, replace


def test_stage_takes_pieces_in_order_and_each_once(bench: Bench) -> None:
    assert bench.call("history/stage", 0, TTL_MS, b"1", b"2") == [Code.DONE]
    assert bench.call("history/stage", 0, TTL_MS, b"1", b"2") == [Code.DONE]
    assert bench.call("history/stage", 2, TTL_MS, b"3") == [Code.DONE]
    assert bench.call("history/stage", 2, TTL_MS, b"3") == [Code.DONE]
    assert bench.call("history/stage", 7, TTL_MS, b"8") == [Code.CONFLICT, 3]
    assert bench.everything() == {"staging:staging": [b"1", b"2", b"3"]}


def test_replace_keeps_items_before_and_behind(bench: Bench) -> None:
    bench.append("op", b"1", b"2", b"3", b"4", b"5")
    bench.call("history/stage", 0, TTL_MS, b"a", b"b")
    before = bench.history()
    reply = replace(bench, b"c", start=1, stop=4, staged=2, staged_bytes=2, corrupt="1,2")
    assert reply == [Code.DONE, bench.history()[b"generation"]]
    assert bench.items() == [b"1", b"a", b"b", b"c", b"5"]
    state = bench.everything()
    assert sorted(state) == ["history", "items", "operations", "quarantine"]
    assert state["quarantine"] == [b"2", b"3"]
    assert state["history"][b"bytes"] == b"5"
    assert state["history"][b"created"] == before[b"created"]
    assert int(state["history"][b"updated"]) > int(before[b"updated"])
    assert replace(bench, b"x", age_ms=3) == reply
    assert bench.everything() == state


def test_replace_of_all_renames_the_stage(bench: Bench) -> None:
    bench.append("op", b"1", b"22", b"333", b"4444")
    bench.call("history/stage", 0, TTL_MS, b"a", b"bb")
    assert replace(bench, b"ccc", stop=3, staged=2, staged_bytes=3)[0] == Code.DONE
    state = bench.everything()
    assert sorted(state) == ["history", "items", "operations"]
    assert state["items"] == [b"a", b"bb", b"ccc", b"4444"]
    assert state["history"][b"bytes"] == b"10"


@pytest.mark.parametrize(
    ("pruned", "left"), [(2, [b"3", b"a", b"b", b"6"]), (3, [b"a", b"b", b"6"])]
)
def test_replace_prunes_the_front_in_the_same_step(
    bench: Bench, pruned: int, left: list[bytes]
) -> None:
    bench.append("op", b"111", b"22", b"3", b"4", b"5", b"6")
    assert replace(bench, b"a", b"b", start=3, stop=5, pruned=pruned)[0] == Code.DONE
    assert bench.items() == left
    assert bench.history()[b"bytes"] == str(len(left)).encode()
    assert sorted(bench.everything()) == ["history", "items", "operations"]


@pytest.mark.parametrize("changes", [{"generation": "5"}, {"max_items": 1}, {"age_ms": 600_000}])
def test_a_refused_replacement_takes_its_stage_with_it(
    bench: Bench, changes: dict[str, Any]
) -> None:
    bench.append("op", b"1", b"2", b"3")
    before = bench.everything()
    bench.call("history/stage", 0, TTL_MS, b"a", b"b")
    assert replace(bench, staged=2, staged_bytes=2, **changes)[0] != Code.DONE
    assert bench.everything() == before


def test_replace_refuses_without_a_change(bench: Bench) -> None:
    bench.append("op", b"1", b"2", b"3")
    before = bench.everything()
    generation = bench.history()[b"generation"]
    assert replace(bench, b"x", generation="5") == [Code.CONFLICT, generation]
    assert replace(bench, b"x", stop=4) == [Code.CONFLICT, generation]
    assert replace(bench, b"x", staged=1) == [Code.LOST, 0]
    assert replace(bench, *[b"x"] * 11) == [Code.FULL, 3, 3]
    assert replace(bench, b"x" * 101) == [Code.FULL, 3, 3]
    assert replace(bench, b"x", age_ms=600_000) == [Code.FORGOTTEN]
    assert bench.everything() == before
