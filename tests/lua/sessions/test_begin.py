"""`begin`: the next call of the log."""

from __future__ import annotations

from capsule_tasks.storage.scripts import Code
from tests.lua.sessions.bench import Bench


def test_calls_are_begun_one_after_the_other(bench: Bench) -> None:
    for number in (1, 2):
        bench.submit(f"c{number}")
    token = bench.taken()
    for number in (1, 2):
        before = bench.record()
        before_ms = bench.now_ms()
        reply = bench.begin(token)
        call_id = f"c{number}".encode()
        assert reply == [Code.DONE, number, call_id, b"run " + call_id, b"t"]
        record = bench.record()
        assert before_ms <= int(record.pop("begun_at")) <= bench.now_ms()
        assert record == {**before, "begun": str(number), "begun_call": f"c{number}"}
        state = bench.state()
        assert bench.begin(token) == reply
        assert bench.state() == state
        bench.done(token, number)
    state = bench.state()
    assert bench.begin(token) == [Code.DONE]
    assert bench.state() == state


def test_only_the_owner_begins_a_call(bench: Bench) -> None:
    bench.submit("c")
    before = bench.state()
    assert bench.begin("0") == [Code.STALE, b"", b"0"]
    assert bench.state() == before
    token = bench.taken()
    before = bench.state()
    assert bench.begin("1") == [Code.STALE, b"w", token.encode()]
    assert bench.state() == before
    bench.release(token, even_unfinished=1)
    assert bench.begin(token) == [Code.STALE, b"", token.encode()]
