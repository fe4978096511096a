"""The scripts of tenants."""

from __future__ import annotations

from typing import Any

from capsule_tasks.storage.keys import TenantKeys
from capsule_tasks.storage.scripts import Code
from tests.lua.sessions.bench import TTL_MS, Bench

LEASE_MS = 10_000
WINDOW_MS = 86_400_000


def keys_of(bench: Bench) -> TenantKeys:
    return TenantKeys("t", bench.prefix)


def times(bench: Bench, key: str) -> dict[bytes, float]:
    return dict(bench.client.zrange(key, 0, -1, withscores=True))


def reserve(bench: Bench, session: str, most: int = 2, lease_ms: int = LEASE_MS) -> list[Any]:
    return bench.call("tenant_reserve", session, most, lease_ms, TTL_MS)


def test_places_are_given_up_to_the_maximum_and_lapse(bench: Bench) -> None:
    keys = keys_of(bench)
    before_ms = bench.now_ms()
    assert reserve(bench, "a") == [Code.DONE, 1]
    assert before_ms + LEASE_MS <= times(bench, keys.live)[b"a"] <= bench.now_ms() + LEASE_MS
    assert reserve(bench, "b") == [Code.DONE, 2]
    assert reserve(bench, "b") == [Code.DONE, 2]
    before = bench.state()
    assert reserve(bench, "c") == [Code.FULL, 2]
    assert bench.state() == before
    assert reserve(bench, "c", 0) == [Code.DONE, 3]
    bench.client.zadd(keys.live, {"a": 1, "b": 1})
    assert reserve(bench, "d") == [Code.DONE, 2]
    assert times(bench, keys.live).keys() == {b"c", b"d"}
    assert times(bench, keys.sessions).keys() == {b"a", b"b", b"c", b"d"}
    assert bench.call("tenant_unreserve", "c", "never") == [Code.DONE]
    assert times(bench, keys.live).keys() == {b"d"}


def test_places_that_have_lapsed_do_not_count_and_go_a_hundred_at_a_time(bench: Bench) -> None:
    live = keys_of(bench).live
    bench.client.zadd(live, {f"lapsed{number}": number for number in range(250)})
    for session, left in (("a", 151), ("b", 52)):
        assert reserve(bench, session) == [Code.DONE, 1 + (session == "b")]
        assert len(times(bench, live)) == left
    assert reserve(bench, "c") == [Code.FULL, 2]
    assert times(bench, live).keys() == {b"a", b"b"}


def test_a_place_of_a_session_that_has_lapsed_is_given_anew(bench: Bench) -> None:
    live = keys_of(bench).live
    bench.client.zadd(live, {f"lapsed{number}": number for number in range(100)})
    bench.client.zadd(live, {"a": 1000})  # behind those that are removed at a time
    assert reserve(bench, "b", 1) == [Code.DONE, 1]
    assert reserve(bench, "a", 1) == [Code.FULL, 1]
    assert reserve(bench, "a", 2) == [Code.DONE, 2]


def test_a_renewal_brings_a_place_back_that_had_lapsed(bench: Bench) -> None:
    keys = keys_of(bench)
    reserve(bench, "a")
    bench.call("tenant_unreserve", "a")
    assert bench.call("tenant_renew", LEASE_MS, TTL_MS, "a", "b") == [Code.DONE]
    assert times(bench, keys.live).keys() == {b"a", b"b"}


def test_old_sessions_are_dropped_a_hundred_at_a_time(bench: Bench) -> None:
    bench.call("tenant_note", "a", TTL_MS)
    old_ms = bench.now_ms() - TTL_MS - 1000
    sessions = {f"old{number}": old_ms for number in range(150)}
    bench.client.zadd(keys_of(bench).sessions, sessions)
    for left in (51, 1):
        bench.call("tenant_note", "a", TTL_MS)
        assert len(times(bench, keys_of(bench).sessions)) == left


def test_sessions_that_were_noted_long_ago_are_dropped(bench: Bench) -> None:
    assert bench.call("tenant_note", "a", TTL_MS) == [Code.DONE]
    bench.client.zadd(keys_of(bench).sessions, {"old": bench.now_ms() - TTL_MS - 1000})
    bench.call("tenant_note", "b", TTL_MS)
    assert bench.call("tenant_sessions", 0, 9) == [Code.DONE, b"a", b"b"]
    assert bench.call("tenant_sessions", 1, 9) == [Code.DONE, b"b"]


def add(bench: Bench, operation: str, cpu_ms: int, age_ms: int = 0) -> list[Any]:
    return bench.call("tenant_add_usage", operation, age_ms, cpu_ms, 1, WINDOW_MS, TTL_MS)


def test_usage_is_counted_in_its_window_and_in_all(bench: Bench) -> None:
    window = str(bench.now_ms() // WINDOW_MS * WINDOW_MS).encode()
    assert bench.call("tenant_usage", WINDOW_MS) == [Code.DONE, 0, window, *[b"0"] * 4]
    assert add(bench, "o1", 5) == [Code.DONE, 5]
    before = bench.state()
    assert add(bench, "o1", 5, age_ms=3) == [Code.DONE, 5]
    assert bench.state() == before
    assert add(bench, "o2", 7) == [Code.DONE, 12]
    reserve(bench, "a")
    usage = [Code.DONE, 1, window, b"12", b"2", b"12", b"2"]
    assert bench.call("tenant_usage", WINDOW_MS) == usage
    bench.client.hset(keys_of(bench).usage, "window", 0)
    assert bench.call("tenant_usage", WINDOW_MS)[3:] == [b"0", b"0", b"12", b"2"]
    assert add(bench, "o3", 1) == [Code.DONE, 1]
    assert bench.call("tenant_usage", WINDOW_MS)[3:] == [b"1", b"1", b"13", b"3"]
    assert add(bench, "o4", 1, age_ms=600_000) == [Code.FORGOTTEN]
    for _ in range(2):
        assert bench.call("tenant_forget") == [Code.DONE]
    assert set(bench.state()) == {keys_of(bench).operations.encode()}
