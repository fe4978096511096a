"""`forget_start`, `forget_left` and `forget`: a session is taken from everybody, and erased."""

from __future__ import annotations

from typing import Any

from capsule_tasks.storage.scripts import Code
from tests.lua.sessions.bench import TOKEN_MS, TTL_MS, Bench


def start(bench: Bench) -> list[Any]:
    return bench.call("forget_start", "s", TTL_MS, bench.doorbell)


def left(bench: Bench, incarnation: str) -> list[Any]:
    return bench.call("forget_left", incarnation, bench.keys.channel)


def test_a_session_that_is_forgotten_is_of_no_use_to_anybody(bench: Bench) -> None:
    for call in ("c1", "c2"):
        bench.submit(call)
    token = bench.taken()
    bench.begin(token)
    assert start(bench) == [Code.DONE, b"w"]
    record = bench.record()
    assert int(record["token"]) > int(token)
    assert "owner" not in record
    before = bench.state()
    stale = [Code.STALE, b"", record["token"].encode()]
    assert bench.begin(token) == bench.done(token, 1) == bench.release(token, 1) == stale
    assert bench.take("w2", "o2") == [Code.HELD, b"", record["token"].encode()]
    assert bench.submit("c3") == [Code.ENDED]
    close = ("close", "s", "0", bench.doorbell, bench.keys.channel)
    assert bench.call(*close) == [Code.DONE, 0, b""]
    assert bench.state() == before
    assert bench.call("unfinished", 0, 9) == [Code.DONE, 1, b"c1", b"run c1", 2, b"c2", b"run c2"]
    assert bench.call("unfinished", 1, 9) == [Code.DONE, 2, b"c2", b"run c2"]
    assert bench.call("unfinished", 0, 1) == [Code.DONE, 1, b"c1", b"run c1"]


def test_the_owner_is_rung_until_it_has_left(bench: Bench) -> None:
    bench.submit("c")
    bench.taken()
    bench.listen(f"{bench.doorbell}w:requests", bench.keys.channel)
    assert start(bench) == [Code.DONE, b"w"]
    assert bench.rings() == []
    token = bench.record()["token"]
    assert start(bench) == [Code.DONE, b"w"]
    assert bench.rings() == [("doorbell:w:requests", "s")]
    assert left(bench, "another") == [Code.DONE]
    assert bench.rings() == []
    assert left(bench, "w") == left(bench, "w") == [Code.DONE]
    assert bench.rings() == [("{S:s}:changed", "")]
    assert start(bench) == [Code.DONE, b""]
    assert bench.rings() == []
    assert bench.record()["token"] == token


def test_a_session_that_nobody_forgets_is_not_left(bench: Bench) -> None:
    assert left(bench, "w") == [Code.DONE]
    assert bench.state() == {}
    bench.submit("c")
    bench.taken()
    before = bench.state()
    assert left(bench, "w") == [Code.DONE]
    assert bench.state() == before


def test_a_session_is_used_again_after_it_was_forgotten(bench: Bench) -> None:
    assert start(bench) == [Code.DONE, b""]
    assert bench.call("forget", "s", TOKEN_MS, bench.doorbell, bench.keys.channel) == [Code.DONE]
    token = bench.record()["token"]
    assert bench.submit("c")[0] == Code.DONE
    assert int(bench.taken()) > int(token)


def test_forgetting_leaves_the_token_and_nothing_else(bench: Bench) -> None:
    args = ("s", TOKEN_MS, bench.doorbell, bench.keys.channel)
    assert bench.call("forget", *args) == [Code.DONE]
    assert bench.state() == {}
    bench.submit("c")
    token = bench.taken()
    for key in (bench.keys.items, bench.keys.quarantine):
        bench.client.rpush(key, "x")
        bench.client.expire(key, 60)
    bench.client.hset(bench.keys.history, "generation", 1)
    bench.client.expire(bench.keys.history, 60)
    bench.client.delete(bench.keys.operations)
    bench.listen(f"{bench.doorbell}w:sessions")
    for _ in range(2):
        assert bench.call("forget", *args) == [Code.DONE]
        assert bench.record() == {"token": token}
        assert len(bench.state()) == 1
    assert 0 < bench.ttl(bench.keys.session) <= TOKEN_MS
    assert bench.rings() == [("doorbell:w:sessions", "s")]
