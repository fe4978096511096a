"""`done`: a call leaves the log, and its id stays known for a time."""

from __future__ import annotations

import math

from capsule_tasks.storage.scripts import Code
from tests.lua.sessions.bench import KNOWN_MS, Bench


def test_a_call_that_is_done_leaves_the_log_and_is_counted(bench: Bench) -> None:
    bench.submit("c1")
    bench.submit("c2")
    token = bench.taken()
    bench.begin(token)
    before_ms = bench.now_ms()
    assert bench.done(token, 1, cpu_ms=7) == [Code.DONE, 1]
    assert bench.log() == [(b"2-0", b"c2")]
    record = bench.record()
    assert (record["executions"], record["cpu_ms"]) == ("1", "7")
    assert not {"begun", "begun_call"} & record.keys()
    known = bench.known()
    assert before_ms <= known[b"c1"] <= bench.now_ms()
    assert known[b"c2"] == math.inf
    before = bench.state()
    assert bench.done(token, 1, cpu_ms=7) == [Code.DONE, 1]
    assert bench.done(token, 2) == [Code.DONE, 1]
    assert bench.state() == before


def test_a_call_that_did_not_run_is_no_execution(bench: Bench) -> None:
    bench.submit("c")
    token = bench.taken()
    bench.begin(token)
    assert bench.done(token, 1, has_run=0) == [Code.DONE, 0]
    assert bench.log() == []
    assert bench.record()["executions"] == "0"


def test_ids_are_known_for_a_time_after_the_end_of_their_calls(bench: Bench) -> None:
    bench.submit("c1")
    bench.submit("c2")
    old, young = bench.now_ms() - KNOWN_MS - 1000, bench.now_ms() - KNOWN_MS + 10_000
    bench.client.zadd(bench.keys.known, {"old": old, "young": young})
    token = bench.taken()
    bench.begin(token)
    bench.done(token, 1)
    assert bench.known().keys() == {b"young", b"c1", b"c2"}


def test_old_ids_are_removed_a_hundred_at_a_time(bench: Bench) -> None:
    bench.submit("c1")
    bench.submit("c2")
    old_ms = bench.now_ms() - KNOWN_MS - 1000
    bench.client.zadd(bench.keys.known, {f"old{number}": old_ms for number in range(150)})
    token = bench.taken()
    for seq, left in ((1, 52), (2, 2)):
        bench.begin(token)
        bench.done(token, seq)
        assert len(bench.known()) == left


def test_only_the_owner_ends_a_call(bench: Bench) -> None:
    bench.submit("c")
    first = bench.taken()
    bench.begin(first)
    second = bench.taken("w2", "o2", steal=first)
    before = bench.state()
    assert bench.done(first, 1) == [Code.STALE, b"w2", second.encode()]
    assert bench.state() == before
