"""The index of recent executions."""

from __future__ import annotations

from capsule_tasks.storage.keys import RecentKeys
from capsule_tasks.storage.scripts import Code
from tests.lua.executions.bench import AGE_MS, Bench


def test_recent_keeps_the_newest_and_lists_them_first(bench: Bench) -> None:
    keys = RecentKeys(bench.prefix)
    for number in range(8):
        note = (f"id{number}", 1, f"r{number}")
        bench.call("executions/recent_record", 5, AGE_MS, "c", *note, keys=keys)
    listed = bench.call("executions/recent_list", "", 3, keys=keys)
    assert listed[1::3] == [b"id7", b"id6", b"id5"]
    assert listed[3::3] == [b"r7", b"r6", b"r5"]
    rest = bench.call("executions/recent_list", listed[-2], 3, keys=keys)
    assert rest[1::3] == [b"id4", b"id3"]
    assert bench.client.hlen(keys.entries) == bench.client.zcard(keys.order) == 5
    assert_expires(bench, keys.entries, keys.order)


def test_recent_finds_those_that_are_known(bench: Bench) -> None:
    keys = RecentKeys(bench.prefix)
    assert bench.call("executions/recent_find", keys=keys) == [Code.DONE]
    assert bench.call("executions/recent_find", "id", keys=keys) == [Code.DONE]
    bench.call(
        "executions/recent_record", 5, AGE_MS, "c", "id", 7, "a:b", "other", 7, "c", keys=keys
    )
    noted = {one: at for _, one, at, _ in [bench.call("executions/recent_list", "", 1, keys=keys)]}
    found = bench.call("executions/recent_find", "other", "unknown", "id", keys=keys)
    assert found[1::3] == [b"other", b"id"]
    assert found[3::3] == [b"c", b"a:b"]
    assert found[2] == noted[b"other"]


def test_recent_ignores_an_older_attempt(bench: Bench) -> None:
    keys = RecentKeys(bench.prefix)
    bench.call("executions/recent_record", 5, AGE_MS, "c", "id", 7, "new", keys=keys)
    bench.call("executions/recent_record", 5, AGE_MS, "c", "id", 6, "old", keys=keys)
    assert bench.call("executions/recent_list", "", 3, keys=keys)[3] == b"new"


def assert_expires(bench: Bench, *keys: str) -> None:
    for key in keys:
        assert AGE_MS / 2 < bench.client.pttl(key) <= AGE_MS, key
