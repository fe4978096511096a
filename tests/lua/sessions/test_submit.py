"""`submit`: a call in the log of its session, once."""

from __future__ import annotations

import math

from capsule_tasks.storage.scripts import Code
from tests.lua.sessions.bench import TTL_MS, Bench


def test_a_call_to_a_session_that_is_not_listed_is_not_appended(bench: Bench) -> None:
    assert bench.submit("c", listed_under="") == [Code.UNLISTED, b"0"]
    assert bench.state() == {}
    token = bench.taken()
    bench.release(token)
    before = bench.state()
    assert bench.submit("c", listed_under="0") == [Code.UNLISTED, token.encode()]
    assert bench.state() == before


def test_the_first_call_makes_the_session(bench: Bench) -> None:
    before_ms = bench.now_ms()
    assert bench.submit("c") == [Code.DONE, 1, b"", 1]
    record = bench.record()
    created = record.pop("created")
    assert before_ms <= int(created) <= bench.now_ms()
    assert record == {"profile": "p", "tenant": "t", "seq": "1", "used": created}
    assert bench.log() == [(b"1-0", b"c")]
    assert bench.known() == {b"c": math.inf}
    for key in (bench.keys.session, bench.keys.calls, bench.keys.known):
        assert TTL_MS - 10_000 < bench.ttl(key) <= TTL_MS


def test_where_calls_wait_without_an_owner_the_session_is_listed_already(bench: Bench) -> None:
    bench.submit("c1")
    assert bench.submit("c2", listed_under="") == [Code.DONE, 2, b"", 2]
    assert bench.log() == [(b"1-0", b"c1"), (b"2-0", b"c2")]


def test_an_owner_is_rung_unless_it_is_busy_with_another_call(bench: Bench) -> None:
    token = bench.taken()
    bench.listen(f"{bench.doorbell}w:sessions")
    assert bench.submit("c1", listed_under="") == [Code.DONE, 1, b"w", 1]
    assert bench.rings() == [("doorbell:w:sessions", "s")]
    bench.begin(token)
    assert bench.submit("c2") == [Code.DONE, 2, b"w", 1]
    assert bench.rings() == []
    bench.done(token, 1)
    assert bench.submit("c3") == [Code.DONE, 3, b"w", 2]
    assert bench.rings() == [("doorbell:w:sessions", "s")]


def test_a_call_that_is_known_changes_nothing(bench: Bench) -> None:
    bench.submit("c1")
    before = bench.state()
    assert bench.submit("c1", may_wait=0, max_waiting=1) == [Code.DONE, 0, b"", 1]
    assert bench.state() == before
    token = bench.taken()
    bench.begin(token)
    bench.done(token, 1)
    before = bench.state()
    assert bench.submit("c1") == [Code.DONE, 0, b"w", 0]
    assert bench.state() == before


def test_each_refusal_changes_nothing(bench: Bench) -> None:
    bench.submit("c1")
    before = bench.state()
    assert bench.submit("c2", profile="q") == [Code.CHANGED, b"p", b"t"]
    assert bench.submit("c2", tenant="u") == [Code.CHANGED, b"p", b"t"]
    assert bench.submit("c2", may_wait=0) == [Code.BUSY, 1]
    assert bench.submit("c2", max_waiting=1) == [Code.FULL, 1]
    assert bench.state() == before
    bench.client.hset(bench.keys.session, "closing", 1)
    before = bench.state()
    assert bench.submit("c2") == [Code.ENDED]
    assert bench.state() == before


def test_a_repeated_call_rings_an_owner_that_has_not_begun_it(bench: Bench) -> None:
    bench.submit("c1")
    token = bench.taken()
    bench.listen(f"{bench.doorbell}w:sessions")
    bench.submit("c1")
    assert bench.rings() == [("doorbell:w:sessions", "s")]
    bench.begin(token)
    bench.submit("c1")
    bench.done(token, 1)
    bench.submit("c1")
    assert bench.rings() == []
