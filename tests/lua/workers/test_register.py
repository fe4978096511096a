"""`register`: the index of workers by when they are due."""

from __future__ import annotations

from typing import Any

from capsule_tasks.storage.scripts import Code
from tests.lua.workers.bench import KEEP_MS, LEASE_MS, Bench


def note(bench: Bench, worker: str, lease_ms: int = LEASE_MS, *forget: str) -> list[Any]:
    return bench.call("workers/register", worker, lease_ms, KEEP_MS, 2, *forget)


def test_a_worker_that_is_noted_is_due_when_its_time_has_passed(bench: Bench) -> None:
    before_ms = bench.now_us() // 1000
    code, next_ms = note(bench, "w1")
    assert code == Code.DONE
    assert LEASE_MS - 1000 < next_ms <= LEASE_MS
    assert bench.ttl(bench.workers) <= KEEP_MS
    [(name, score)] = bench.client.zrange(bench.workers, 0, -1, withscores=True)
    assert name == b"w1"
    assert before_ms <= score - LEASE_MS <= bench.now_us() // 1000
    assert note(bench, "w2", -1)[2:] == [b"w2"]
    assert note(bench, "w2")[2:] == []


def test_a_caller_without_a_name_changes_nothing(bench: Bench) -> None:
    assert note(bench, "") == [Code.DONE, -1]
    assert bench.is_empty()
    note(bench, "w1", -2)
    before = bench.client.zrange(bench.workers, 0, -1, withscores=True)
    assert note(bench, "") == [Code.DONE, -1, b"w1"]
    assert bench.client.zrange(bench.workers, 0, -1, withscores=True) == before


def test_those_that_are_due_longest_are_listed_first_and_others_are_forgotten(
    bench: Bench,
) -> None:
    for number in range(4):
        note(bench, f"w{number}", -1000 * (number + 1))
    assert note(bench, "")[2:] == [b"w3", b"w2"]
    assert note(bench, "", 0, "w3", "unknown")[2:] == [b"w2", b"w1"]
    assert bench.client.zrange(bench.workers, 0, -1) == [b"w2", b"w1", b"w0"]
    assert note(bench, "w4", LEASE_MS, "w0", "w1", "w2")[2:] == []
    assert bench.client.zrange(bench.workers, 0, -1) == [b"w4"]
