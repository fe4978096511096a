"""`want`, `unwant`, `take_wanted` and `wanted_state`: sessions that workers are to take."""

from __future__ import annotations

from capsule_tasks.storage.scripts import Code
from tests.lua.sessions.bench import TTL_MS, Bench


def times(bench: Bench) -> dict[bytes, float]:
    return dict(bench.client.zrange(bench.wanted.wanted, 0, -1, withscores=True))


def marks(bench: Bench) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = bench.client.hgetall(bench.wanted.marks)
    return found


def want(bench: Bench, session_id: str) -> list[object]:
    return bench.call("want", session_id, TTL_MS, bench.wanted.channel)


def test_each_listing_has_a_mark_and_the_first_its_time(bench: Bench) -> None:
    bench.listen(bench.wanted.channel)
    before_ms = bench.now_ms()
    assert want(bench, "s") == [Code.DONE, 1]
    assert before_ms <= times(bench)[b"s"] <= bench.now_ms()
    first = times(bench)
    assert want(bench, "s") == [Code.DONE, 2]
    assert times(bench) == first
    assert marks(bench) == {b"": b"2", b"s": b"2"}
    assert bench.rings() == [("{wanted:p}:changed", "s")] * 2
    assert bench.call("wanted_state", bench.wanted.channel) == [Code.DONE, 1, 1]
    assert bench.call("wanted_state", "other") == [Code.DONE, 1, 0]


def test_a_listing_is_removed_under_its_mark_and_no_other(bench: Bench) -> None:
    want(bench, "s")
    want(bench, "s")
    before = bench.state()
    assert bench.call("unwant", "s", 1) == [Code.DONE, 0]
    assert bench.call("unwant", "other", 2) == [Code.DONE, 0]
    assert bench.state() == before
    assert bench.call("unwant", "s", 2) == [Code.DONE, 1]
    assert (times(bench), marks(bench)) == ({}, {b"": b"2"})
    assert bench.call("unwant", "s", 2) == [Code.DONE, 0]
    assert want(bench, "s") == [Code.DONE, 3]


def test_sessions_are_given_by_their_time_and_are_postponed(bench: Bench) -> None:
    for number in range(3):
        want(bench, f"s{number}")
    bench.client.zadd(bench.wanted.wanted, {"s2": 1})
    before_ms = bench.now_ms()
    reply = bench.call("take_wanted", 2, 60_000, TTL_MS)
    assert reply[2:] == [b"s2", b"3", b"s0", b"1"]
    assert reply[1] == 0
    found = times(bench)
    assert before_ms + 60_000 <= found[b"s2"] == found[b"s0"] <= bench.now_ms() + 60_000
    assert bench.call("take_wanted", 9, 60_000, TTL_MS)[2:] == [b"s1", b"2"]
    code, next_ms = bench.call("take_wanted", 9, 60_000, TTL_MS)
    assert code == Code.DONE
    assert 50_000 < next_ms <= 60_000
    want(bench, "s1")  # due again at once
    assert bench.call("take_wanted", 9, 60_000, TTL_MS)[2:] == [b"s1", b"4"]


def test_a_worker_without_room_is_told_what_is_due_and_given_nothing(bench: Bench) -> None:
    assert bench.call("take_wanted", 0, 60_000, TTL_MS) == [Code.DONE, -1]
    want(bench, "s")
    before = times(bench)
    assert bench.call("take_wanted", 0, 60_000, TTL_MS) == [Code.DONE, 0]
    assert times(bench) == before
