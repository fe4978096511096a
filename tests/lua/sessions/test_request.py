"""`request`, `requests`, `reply` and `reply_read`: a word with the owner."""

from __future__ import annotations

from typing import Any

from capsule_tasks.storage.scripts import Code
from tests.lua.sessions.bench import REQUEST_MS, Bench


def request(bench: Bench, request_id: str = "r") -> list[Any]:
    return bench.call("request", "s", request_id, f"do {request_id}", REQUEST_MS, bench.doorbell)


def test_a_request_waits_for_the_owner_and_rings_it(bench: Bench) -> None:
    assert request(bench) == [Code.MISSING]
    bench.submit("c")
    before = bench.state()
    assert request(bench) == [Code.LOST]
    assert bench.state() == before
    token = bench.taken()
    bench.listen(f"{bench.doorbell}w:requests")
    assert request(bench) == [Code.DONE, b"w"]
    before = bench.state()
    assert request(bench) == [Code.DONE, b"w"]
    assert bench.state() == before
    assert bench.rings() == [("doorbell:w:requests", "s")] * 2
    assert 0 < bench.ttl(bench.keys.requests) <= REQUEST_MS
    code, is_closing, entry, request_id, payload = bench.call("requests", token, "", 9)
    assert (code, is_closing, request_id, payload) == (Code.DONE, 0, b"r", b"do r")
    assert bench.call("requests", token, entry, 9) == [Code.DONE, 0]
    assert bench.call("requests", "1", "", 9) == [Code.STALE, b"w", token.encode()]


def test_a_reply_takes_the_place_of_its_request(bench: Bench) -> None:
    token = bench.taken()
    request(bench)
    entry = bench.call("requests", token, "", 9)[2]
    assert bench.call("reply_read") == [Code.WAITING]
    before = bench.state()
    stale = bench.call("reply", "1", entry, "late", REQUEST_MS, bench.keys.channel)
    assert stale == [Code.STALE, b"w", token.encode()]
    assert bench.state() == before
    bench.listen(bench.keys.channel)
    for _ in range(2):
        done = bench.call("reply", token, entry, "answer", REQUEST_MS, bench.keys.channel)
        assert done == [Code.DONE]
    assert bench.rings() == [("{S:s}:changed", "")] * 2
    assert bench.call("reply_read") == [Code.DONE, b"answer"]
    assert 0 < bench.ttl(bench.keys.reply("r")) <= REQUEST_MS
    assert bench.client.xlen(bench.keys.requests) == 0
