"""`pop` and `pop_suffix`, and what they remember of the records that they took."""

from __future__ import annotations

from capsule_tasks.storage.scripts import Code
from tests.lua.history.bench import TTL_MS, Bench


def test_pop_takes_the_tail_once_and_remembers_it(bench: Bench) -> None:
    bench.append("op", b"{}", b'{"a":1}')
    before = bench.history()
    assert bench.call("history/pop", "pop", 0, TTL_MS, "", 5) == [Code.DONE, b'{"a":1}']
    assert bench.call("history/pop", "pop", 9, TTL_MS, "", 5) == [Code.DONE, b'{"a":1}']
    assert bench.items() == [b"{}"]
    assert bench.history()[b"bytes"] == b"2"
    assert int(bench.history()[b"generation"]) > int(before[b"generation"])
    assert bench.call("history/pop", "old", 600_000, TTL_MS, "", 5) == [Code.FORGOTTEN]
    assert bench.items() == [b"{}"]


def test_a_popped_record_has_a_key_and_an_expiry_of_its_own(bench: Bench) -> None:
    """The item was once in the operation log, and every later write extended its life there."""
    bench.append("op", b"{}", b"secret")
    bench.call("history/pop", "pop:1", 0, TTL_MS, "", 5)
    taken = bench.keys.popped_by("pop:1")
    assert bench.client.get(taken) == b"secret"
    for key in (taken, bench.keys.popped):
        bench.client.pexpire(key, 5000)
    for number in range(20):
        bench.append(f"later {number}")
    assert all(0 < bench.client.pttl(key) <= 5000 for key in (taken, bench.keys.popped))
    assert bench.call("history/pop", "pop:1", 9, TTL_MS, "", 5) == [Code.DONE, b"secret"]
    state = bench.everything()
    assert state.pop("popped:pop%3A1") == b"secret"
    assert b"secret" not in repr(state).encode()


def test_a_pop_repeated_after_its_record_expired_takes_nothing_else(bench: Bench) -> None:
    bench.append("op", b"{}", b"gone")
    bench.call("history/pop", "pop", 0, TTL_MS, "", 5)
    bench.client.delete(bench.keys.popped_by("pop"))
    assert bench.call("history/pop", "pop", 9, TTL_MS, "", 5) == [Code.FORGOTTEN]
    assert bench.items() == [b"{}"]


def test_the_keys_of_popped_records_are_known_as_long_as_these_live(bench: Bench) -> None:
    bench.append("op", b"1", b"2")
    old_ms = int(bench.client.time()[0]) * 1000 - 601_000
    bench.client.zadd(bench.keys.popped, {"old": old_ms})
    bench.call("history/pop", "pop", 0, TTL_MS, "", 5)
    taken = bench.keys.popped_by("pop").encode()
    assert bench.client.zrange(bench.keys.popped, 0, -1) == [taken]


def test_pop_of_nothing_writes_nothing(bench: Bench) -> None:
    assert bench.call("history/pop", "pop", 0, TTL_MS, "", 5) == [Code.DONE]
    assert bench.everything() == {}


def test_pop_quarantines_records_its_reader_found_corrupt_once(bench: Bench) -> None:
    bench.append("op", b"{}", b"bad")
    assert bench.call("history/pop", "one", 0, TTL_MS, "", 5) == [Code.DONE, b"bad"]
    assert bench.call("history/pop", "two", 0, TTL_MS, "one", 5) == [Code.DONE, b"{}"]
    assert bench.call("history/pop", "two", 9, TTL_MS, "one", 5) == [Code.DONE, b"{}"]
    assert bench.call("history/pop", "three", 0, TTL_MS, "one", 5) == [Code.DONE]
    assert bench.call("history/pop", "one", 9, TTL_MS, "", 5) == [Code.DONE, b""]
    assert bench.client.lrange(bench.keys.quarantine, 0, -1) == [b"bad"]
    assert bench.client.zrange(bench.keys.popped, 0, -1) == [bench.keys.popped_by("two").encode()]
    assert not bench.client.exists(bench.keys.popped_by("one"))


def test_pop_leaves_a_sealed_record_that_cannot_be_opened(bench: Bench) -> None:
    bench.append("op", b"key:1")
    before = bench.everything()
    assert bench.call("history/pop", "p", 0, TTL_MS, "", 5, "key:", "key:2") == [
        Code.CONFLICT,
        b"key:1",
    ]
    assert bench.everything() == before
    assert bench.call("history/pop", "p", 0, TTL_MS, "", 5, "key:", "key:1") == [
        Code.DONE,
        b"key:1",
    ]


def test_pop_suffix_compares_all_of_it(bench: Bench) -> None:
    bench.append("op", b"1", b"2", b"3")
    before = bench.everything()
    refusals: list[tuple[list[bytes], list[bytes]]] = [
        ([b"2", b"x"], [b"2", b"3"]),
        ([b"x", b"3"], [b"2", b"3"]),
        ([b"0", b"1", b"2", b"3"], [b"1", b"2", b"3"]),
    ]
    for expected, found in refusals:
        reply = bench.call("history/pop_suffix", "ps", 0, TTL_MS, *expected)
        assert reply == [Code.CONFLICT, *found]
    assert bench.call("history/pop_suffix", "ps", 700_000, TTL_MS, b"3") == [Code.FORGOTTEN]
    assert bench.everything() == before
    assert bench.call("history/pop_suffix", "ps", 0, TTL_MS, b"2", b"3") == [Code.DONE]
    assert bench.call("history/pop_suffix", "ps", 5, TTL_MS, b"1") == [Code.DONE]
    assert bench.items() == [b"1"]
    assert bench.history()[b"bytes"] == b"1"
