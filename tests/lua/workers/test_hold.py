"""`hold`: which executions a worker has."""

from __future__ import annotations

from capsule_tasks.storage.scripts import Code
from tests.lua.workers.bench import KEEP_MS, Bench


def test_a_call_of_hold_adds_and_removes(bench: Bench) -> None:
    token = bench.leased()
    lease = bench.lease()
    assert bench.call("workers/hold", token, KEEP_MS, 2, "a", "b") == [Code.DONE]
    assert bench.members() == {"a", "b"}
    assert bench.call("workers/hold", token, KEEP_MS, 1, "c", "a", "unknown") == [Code.DONE]
    assert bench.members() == {"b", "c"}
    assert 0 < bench.ttl(bench.held) <= KEEP_MS
    assert bench.call("workers/hold", token, KEEP_MS, 0, "b", "c") == [Code.DONE]
    assert bench.members() == set()
    assert bench.lease() == lease


def test_an_execution_released_and_held_in_one_call_is_held(bench: Bench) -> None:
    token = bench.leased()
    assert bench.call("workers/hold", token, KEEP_MS, 1, "a", "a") == [Code.DONE]
    assert bench.members() == {"a"}


def test_more_is_noted_at_once_than_one_command_takes(bench: Bench) -> None:
    token = bench.leased()
    ids = [f"e{n}" for n in range(2500)]
    assert bench.call("workers/hold", token, KEEP_MS, len(ids), *ids) == [Code.DONE]
    assert bench.members() == set(ids)
    assert bench.call("workers/hold", token, KEEP_MS, 0, *ids[1:]) == [Code.DONE]
    assert bench.members() == {"e0"}


def test_nothing_is_noted_under_a_lease_that_lapsed_is_anothers_or_never_was(
    bench: Bench,
) -> None:
    assert bench.call("workers/hold", "1", KEEP_MS, 1, "a") == [Code.LOST]
    assert bench.is_empty()
    token = bench.leased()
    assert bench.call("workers/hold", token, KEEP_MS, 1, "a") == [Code.DONE]
    assert bench.call("workers/hold", int(token) + 1, KEEP_MS, 1, "b") == [Code.LOST]
    bench.lapse()
    assert bench.call("workers/hold", token, KEEP_MS, 1, "b", "a") == [Code.LOST]
    assert bench.members() == {"a"}
