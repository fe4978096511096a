"""The scripts of the index, and those that only read."""

from __future__ import annotations

from capsule_tasks.storage.keys import SessionIndexKeys
from capsule_tasks.storage.scripts import Code
from tests.lua.sessions.bench import BY_NAME, TTL_MS, Bench

TESTED = {
    *("submit", "take", "begin", "done", "release", "close", "forget", "hold", "held"),
    *("want", "unwant", "take_wanted", "wanted_state"),
    *("request", "requests", "reply", "reply_read", "index_record", "index_list", "info", "known"),
    *("forget_start", "forget_left", "unfinished", "restart", "look"),
    *("tenant_note", "tenant_reserve", "tenant_renew", "tenant_unreserve", "tenant_add_usage"),
    *("tenant_usage", "tenant_sessions", "tenant_forget"),
}


def test_all_scripts_of_the_store_are_tested_here() -> None:
    assert set(BY_NAME) == {f"sessions/{kind}" for kind in TESTED}


def test_entries_are_listed_the_latest_first_and_dropped_without_a_record(bench: Bench) -> None:
    keys = SessionIndexKeys(bench.prefix)
    assert bench.call("index_record", 3, TTL_MS, "a", "A", "b", "B", "c", "C") == [Code.DONE]
    assert bench.call("index_record", 3, TTL_MS, "a", "AA", "d", "D") == [Code.DONE]
    reply = bench.call("index_list", "", 9)
    assert reply[1::3] == [b"d", b"a", b"c"]
    assert reply[3::3] == [b"D", b"AA", b"C"]
    times = [int(value) for value in reply[2::3]]
    assert times == sorted(times, reverse=True)
    assert bench.call("index_list", times[0], 1)[1::3] == [b"a"]
    assert bench.call("index_record", 3, TTL_MS, "a", "") == [Code.DONE]
    assert bench.client.hkeys(keys.entries) == [b"c", b"d"]
    old_us = (bench.now_ms() - TTL_MS - 1000) * 1000
    bench.client.zadd(keys.order, {"c": old_us})
    bench.call("index_record", 3, TTL_MS)
    assert bench.client.hkeys(keys.entries) == [b"d"]


def test_a_session_is_known_from_its_first_call_or_owner_on(bench: Bench) -> None:
    assert bench.call("info") == [Code.MISSING]
    token = bench.taken()
    assert bench.call("info")[:2] == [Code.DONE, 0]
    bench.release(token)
    assert bench.call("info") == [Code.MISSING]
    for number in range(3):
        bench.submit(f"c{number}")
    assert bench.call("info")[:2] == [Code.DONE, 3]
    assert bench.call("known", 0, 2) == [Code.DONE, b"c0", b"c1"]
    assert bench.call("known", 2, 2) == [Code.DONE, b"c2"]


def test_a_look_says_where_a_call_is_and_who_has_its_session(bench: Bench) -> None:
    assert bench.call("look", "c") == [Code.DONE, b"gone", b"", b""]
    bench.submit("c")
    assert bench.call("look", "c") == [Code.DONE, b"unfinished", b"p", b""]
    token = bench.taken()
    bench.begin(token)
    before = bench.state()
    assert bench.call("look", "c") == [Code.DONE, b"unfinished", b"p", b"w"]
    assert bench.state() == before
    bench.done(token, 1)
    assert bench.call("look", "c") == [Code.DONE, b"done", b"p", b"w"]
    bench.client.hset(bench.keys.session, "forgetting", "w")
    assert bench.call("look", "c") == [Code.DONE, b"forgotten", b"p", b"w"]
