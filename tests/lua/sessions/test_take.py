"""`take`: one owner at a time."""

from __future__ import annotations

from capsule_tasks.storage.scripts import Code
from tests.lua.sessions.bench import TTL_MS, Bench


def test_a_session_without_an_owner_is_taken_with_what_is_known_of_it(bench: Bench) -> None:
    bench.submit("c1")
    bench.submit("c2")
    before = bench.record()
    before_us = bench.now_ms() * 1000
    reply = bench.take()
    token = int(reply[1])
    assert before_us <= token <= (bench.now_ms() + 1) * 1000
    assert reply[:10] == [Code.DONE, str(token).encode(), b"p", b"t", 2, 0, 0, 0, b"", 0]
    assert bench.record() == before | {"owner": "w", "token": str(token)}
    assert len(bench.log()) == 2


def test_the_next_owner_learns_of_the_call_that_was_begun(bench: Bench) -> None:
    bench.submit("c1")
    bench.submit("c2")
    first = bench.taken()
    bench.begin(first)
    bench.client.hset(bench.keys.session, "checkpoint", "manifest")
    assert bench.take("w2", "o2") == [Code.HELD, b"w", first.encode()]
    reply = bench.take("w2", "o2", steal=first)
    assert int(reply[1]) > int(first)
    assert reply[2:12] == [b"p", b"t", 1, 0, 0, 0, b"manifest", 1, b"c1", b"run c1"]
    assert bench.record()["owner"] == "w2"
    assert bench.record()["begun_call"] == "c1"


def test_the_next_owner_learns_how_much_was_done_before_a_restart(bench: Bench) -> None:
    for call in ("c1", "c2"):
        bench.submit(call)
    first = bench.taken()
    assert bench.call("restart", "1") == [Code.STALE, b"w", first.encode()]
    assert bench.call("restart", first) == [Code.DONE, 0]
    bench.begin(first)
    bench.done(first, 1)
    for _ in range(2):
        assert bench.call("restart", first) == [Code.DONE, 1]
    bench.begin(first)
    bench.done(first, 2)
    assert bench.take("w2", "o2", steal=first)[5:7] == [2, 1]
    assert bench.call("restart", first)[0] == Code.STALE


def test_a_take_that_is_repeated_is_the_same_and_takes_nothing_again(bench: Bench) -> None:
    bench.submit("c1")
    first = bench.take()
    before = bench.state()
    assert bench.take() == first
    assert bench.state() == before
    bench.release(first[1].decode(), even_unfinished=1)
    before = bench.state()
    assert bench.take() == [Code.HELD, b"", first[1]]
    assert bench.state() == before


def test_a_session_is_retaken_only_under_the_token_that_is_expected(bench: Bench) -> None:
    first = bench.taken()
    second = bench.taken("w2", "o2", steal=first, expected=first)
    before = bench.state()
    assert bench.take("w", "o3", steal=second, expected=first) == [
        Code.HELD,
        b"w2",
        second.encode(),
    ]
    assert bench.state() == before


def test_a_session_that_does_not_exist_is_made(bench: Bench) -> None:
    token = bench.taken()
    assert bench.record() == {"profile": "p", "owner": "w", "token": token}
    assert TTL_MS - 10_000 < bench.ttl(bench.keys.session) <= TTL_MS
