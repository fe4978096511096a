"""`append`, and the memory of operations that keeps a repeat from being done twice."""

from __future__ import annotations

import pytest

from capsule_tasks.storage.scripts import Code
from tests.lua.history.bench import Bench


def test_append_writes_items_record_and_memory_each_with_a_time_to_live(bench: Bench) -> None:
    assert bench.append("op", b"{}", b'{"a":1}') == [Code.DONE]
    state = bench.everything()
    assert sorted(state) == ["history", "items", "operations"]
    assert state["items"] == [b"{}", b'{"a":1}']
    assert state["history"][b"bytes"] == b"9"
    assert state["history"][b"created"] == state["history"][b"updated"]
    assert state["history"][b"generation"].isdigit()
    assert state["operations"][b"op"] == b""
    assert state["operations"][b"#last"] == b"1"


def test_append_again_with_its_operation_changes_nothing(bench: Bench) -> None:
    bench.append("op", b"{}")
    before = bench.everything()
    assert bench.append("op", b"{}", age_ms=5) == [Code.DONE]
    assert bench.everything() == before


@pytest.mark.parametrize("records", [[b"{}"] * 11, [b"x" * 101]])
def test_append_refuses_items_that_do_not_fit(bench: Bench, records: list[bytes]) -> None:
    assert bench.append("op", *records) == [Code.FULL, 0, 0]
    assert bench.everything() == {}


def test_a_repeat_beyond_the_memory_is_refused(bench: Bench) -> None:
    assert bench.append("op", b"{}", age_ms=600_000) == [Code.FORGOTTEN]
    assert bench.everything() == {}


def test_a_repeat_as_old_as_something_forgotten_is_refused(bench: Bench) -> None:
    now_ms = int(bench.client.time()[0]) * 1000
    bench.client.hset(bench.keys.operations, mapping={"#last": 5, "#first": 3, "#trimmed": now_ms})
    assert bench.append("op", b"{}", age_ms=60_000) == [Code.FORGOTTEN]
    assert bench.append("op", b"{}", age_ms=0) == [Code.DONE]


def test_the_memory_forgets_the_old_and_keeps_the_young(bench: Bench) -> None:
    old_ms = int(bench.client.time()[0]) * 1000 - 700_000
    fields = {f"#{number}": f"{old_ms}:old{number}" for number in range(1, 101)}
    fields |= {f"old{number}": "0" for number in range(1, 101)}
    bench.client.hset(bench.keys.operations, mapping=fields | {"#last": 100})
    for number in range(20):
        bench.append(f"new{number}", b"{}", age_ms=0)
        bench.client.delete(bench.keys.items)
    memory = bench.client.hgetall(bench.keys.operations)
    assert memory[b"#trimmed"] == str(old_ms).encode()
    first, last = int(memory[b"#first"]), int(memory[b"#last"])
    assert (first, last) == (49, 120)
    assert {key for key in memory if key.startswith(b"old")} == {
        f"old{number}".encode() for number in range(first, 101)
    }
    assert all(f"new{number}".encode() in memory for number in range(20))


def test_the_memory_is_bounded_though_all_of_it_is_young(bench: Bench) -> None:
    young_ms = int(bench.client.time()[0]) * 1000
    fields = {f"#{number}": f"{young_ms}:old{number}" for number in range(1, 10_016)}
    fields |= {f"old{number}": "" for number in range(1, 10_016)}
    bench.client.hset(bench.keys.operations, mapping=fields | {"#last": 10_015})
    bench.append("new", b"{}")
    first, last = map(int, bench.client.hmget(bench.keys.operations, "#first", "#last"))
    assert (first, last) == (17, 10_016)
    assert bench.client.hlen(bench.keys.operations) == 2 * 10_000 + 3
    assert bench.append("old1", b"{}", age_ms=10_000) == [Code.FORGOTTEN]
    assert bench.append("old17", b"{}", age_ms=10_000) == [Code.DONE]
    assert bench.items() == [b"{}"]
