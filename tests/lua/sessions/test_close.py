"""`close`: the end of a session."""

from __future__ import annotations

from typing import Any

from capsule_tasks.storage.scripts import Code
from tests.lua.sessions.bench import TOKEN_MS, Bench


def close(bench: Bench, token: str = "0") -> list[Any]:
    return bench.call("close", "s", token, bench.doorbell, bench.keys.channel)


def test_an_idle_session_is_closed_at_once(bench: Bench) -> None:
    assert close(bench) == [Code.MISSING]
    bench.submit("c")
    token = bench.taken()
    bench.begin(token)
    bench.done(token, 1)
    bench.client.hset(bench.keys.session, "checkpoint", "manifest")
    bench.release(token)
    known = bench.known()
    bench.listen(bench.keys.channel)
    assert close(bench) == [Code.DONE, 1]
    assert bench.record() == {"token": token, "seq": "1"}
    assert bench.known() == known
    assert bench.rings() == [("{S:s}:changed", "")]
    before = bench.state()
    assert close(bench) == [Code.MISSING]
    assert bench.state() == before


def test_a_session_with_an_owner_is_closed_by_it_when_its_calls_are_done(bench: Bench) -> None:
    bench.submit("c")
    assert close(bench) == [Code.DONE, 0, b""]
    token = bench.taken()
    bench.listen(f"{bench.doorbell}w:requests")
    assert close(bench) == [Code.DONE, 0, b"w"]
    assert bench.rings() == [("doorbell:w:requests", "s")]
    assert bench.record()["closing"] == "1"
    before = bench.state()
    assert close(bench, token) == [Code.UNFINISHED, 1]
    assert close(bench, "1") == [Code.STALE, b"w", token.encode()]
    assert bench.state() == before
    bench.begin(token)
    bench.done(token, 1)
    assert close(bench, token) == [Code.DONE, 1]
    assert bench.record() == {"token": token, "seq": "1"}
    assert close(bench, token) == [Code.MISSING]


def test_a_session_that_its_owner_left_is_closed_under_its_token(bench: Bench) -> None:
    bench.submit("c1")
    token = bench.taken()
    bench.begin(token)
    bench.done(token, 1)
    bench.submit("c2")
    bench.call("release", token, 1, TOKEN_MS)
    before = bench.state()
    assert close(bench, token) == [Code.UNFINISHED, 1]
    assert bench.state() == before
    later = bench.taken("w2", "o2")
    bench.begin(later)
    bench.done(later, 2)
    bench.release(later)
    before = bench.state()
    assert close(bench, token) == [Code.STALE, b"", later.encode()]
    assert bench.state() == before
    assert close(bench, later) == [Code.DONE, 1]
    assert bench.record() == {"token": later, "seq": "2"}
