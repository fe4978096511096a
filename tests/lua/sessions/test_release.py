"""`release`: the end of an ownership."""

from __future__ import annotations

from capsule_tasks.storage.scripts import Code
from tests.lua.sessions.bench import TOKEN_MS, Bench


def test_a_session_is_released_once_its_calls_are_done(bench: Bench) -> None:
    bench.submit("c")
    token = bench.taken()
    before = bench.state()
    assert bench.release(token) == [Code.UNFINISHED, 1]
    assert bench.release("1") == [Code.STALE, b"w", token.encode()]
    assert bench.state() == before
    bench.begin(token)
    bench.done(token, 1)
    record = bench.record()
    assert bench.release(token) == [Code.DONE, 0]
    assert bench.record() == {name: record[name] for name in record if name != "owner"}
    before = bench.state()
    assert bench.release(token) == [Code.DONE, 0]
    assert bench.state() == before


def test_a_session_is_released_with_the_call_that_was_begun(bench: Bench) -> None:
    bench.submit("c")
    token = bench.taken()
    bench.begin(token)
    assert bench.release(token, even_unfinished=1) == [Code.DONE, 1]
    record = bench.record()
    assert "owner" not in record
    assert record["begun_call"] == "c"


def test_of_a_session_that_was_never_used_the_token_is_left(bench: Bench) -> None:
    token = bench.taken()
    assert bench.release(token) == [Code.DONE, 0]
    assert bench.record() == {"token": token}
    assert 0 < bench.ttl(bench.keys.session) <= TOKEN_MS


def test_a_session_that_was_never_used_is_not_closing_after_its_release(bench: Bench) -> None:
    token = bench.taken()
    assert bench.call("close", "s", "0", bench.doorbell, bench.keys.channel)[1] == 0
    bench.release(token)
    assert bench.record() == {"token": token}
    assert bench.submit("c", listed_under=token) == [Code.DONE, 1, b"", 1]


def test_a_session_that_was_closed_is_used_again_after_an_owner_found_no_call(bench: Bench) -> None:
    """Its log may outlive the time for which a token is left; numbers of calls only grow."""
    bench.submit("c1")
    token = bench.taken()
    bench.begin(token)
    bench.done(token, 1)
    assert bench.call("close", "s", token, bench.doorbell, bench.keys.channel) == [Code.DONE, 1]
    token = bench.taken(operation="o2")
    assert bench.release(token) == [Code.DONE, 0]
    assert bench.record() == {"token": token, "seq": "1"}
    for key in (bench.keys.session, bench.keys.calls):
        if bench.ttl(key) <= TOKEN_MS:  # as if the time had passed
            bench.client.delete(key)
    assert bench.submit("c2") == [Code.DONE, 2, b"", 1]
