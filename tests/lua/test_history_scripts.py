"""Each history script directly: seed, call, and look at everything that is there afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from capsule_tasks.storage import operations
from capsule_tasks.storage.codec import unpacked
from capsule_tasks.storage.history import core
from capsule_tasks.storage.keys import SessionKeys
from capsule_tasks.storage.scripts import Call, Code, Script
from tests.servers import fresh_prefix

TTL_MS = 60_000
BY_NAME = {
    value.name: value
    for module in (core, operations)
    for value in vars(module).values()
    if isinstance(value, Script)
}


class Bench:
    """One session's keys on a server, and scripts called as they are."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.keys = SessionKeys("s", fresh_prefix())

    def call(self, name: str, *args: Any, staging: str = "staging") -> list[Any]:
        script = BY_NAME[name]
        named = {"staging": self.keys.staging(staging)}
        if name == "history/pop":
            named["taken"] = self.keys.popped_by(args[0])
            named["corrupt"] = self.keys.popped_by(args[3])
        if name == "history/forget":
            named["taken..."] = args[0]
            args = ()
        keys = [named.get(key) or getattr(self.keys, key) for key in script.keys]
        call = Call(script, keys, list(args))
        reply: list[Any] = self.client.eval(script.source, len(call.keys), *call.keys, *call.args)
        return reply

    def append(self, operation_id: str, *records: bytes, age_ms: int = 0) -> list[Any]:
        return self.call("history/append", operation_id, age_ms, TTL_MS, 10, 100, *records)

    def items(self) -> list[bytes]:
        found: list[bytes] = self.client.lrange(self.keys.items, 0, -1)
        return found

    def history(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = self.client.hgetall(self.keys.history)
        return found

    def everything(self) -> dict[str, Any]:
        """All keys of the session with their values, times to live aside."""
        found: dict[str, Any] = {}
        for key in self.client.scan_iter(match=f"{self.keys.items.partition('{')[0]}*"):
            name = key.decode().rpartition("}:")[2]
            match self.client.type(key):
                case b"hash":
                    found[name] = self.client.hgetall(key)
                case b"list":
                    found[name] = self.client.lrange(key, 0, -1)
                case b"zset":
                    found[name] = self.client.zrange(key, 0, -1)
                case b"string":
                    found[name] = self.client.get(key)
            assert 0 < self.client.pttl(key) <= 600_000, name
        return found


@pytest.fixture(params=["valkey_url", "redis62_url"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with redis.Redis.from_url(request.getfixturevalue(request.param)) as client:
        yield Bench(client)


def test_append_writes_items_record_and_memory_each_with_a_time_to_live(bench: Bench) -> None:
    assert bench.append("op", b"{}", b'{"a":1}') == [Code.DONE]
    state = bench.everything()
    assert sorted(state) == ["history", "items", "operations"]
    assert state["items"] == [b"{}", b'{"a":1}']
    assert state["history"][b"bytes"] == b"9"
    assert state["history"][b"created"] == state["history"][b"updated"]
    assert state["history"][b"generation"].isdigit()
    assert state["operations"][b"op"] == b""
    assert state["operations"][b"#last"] == b"1"


def test_append_again_with_its_operation_changes_nothing(bench: Bench) -> None:
    bench.append("op", b"{}")
    before = bench.everything()
    assert bench.append("op", b"{}", age_ms=5) == [Code.DONE]
    assert bench.everything() == before


@pytest.mark.parametrize("records", [[b"{}"] * 11, [b"x" * 101]])
def test_append_refuses_what_does_not_fit(bench: Bench, records: list[bytes]) -> None:
    assert bench.append("op", *records) == [Code.FULL, 0, 0]
    assert bench.everything() == {}


def test_a_repeat_beyond_the_memory_is_refused(bench: Bench) -> None:
    assert bench.append("op", b"{}", age_ms=600_000) == [Code.FORGOTTEN]
    assert bench.everything() == {}


def test_a_repeat_as_old_as_something_forgotten_is_refused(bench: Bench) -> None:
    now_ms = int(bench.client.time()[0]) * 1000
    bench.client.hset(bench.keys.operations, mapping={"#last": 5, "#first": 3, "#trimmed": now_ms})
    assert bench.append("op", b"{}", age_ms=60_000) == [Code.FORGOTTEN]
    assert bench.append("op", b"{}", age_ms=0) == [Code.DONE]


def test_the_memory_forgets_the_old_and_keeps_the_young(bench: Bench) -> None:
    old_ms = int(bench.client.time()[0]) * 1000 - 700_000
    fields = {f"#{number}": f"{old_ms}:old{number}" for number in range(1, 101)}
    fields |= {f"old{number}": "0" for number in range(1, 101)}
    bench.client.hset(bench.keys.operations, mapping=fields | {"#last": 100})
    for number in range(20):
        bench.append(f"new{number}", b"{}", age_ms=0)
        bench.client.delete(bench.keys.items)
    memory = bench.client.hgetall(bench.keys.operations)
    assert memory[b"#trimmed"] == str(old_ms).encode()
    first, last = int(memory[b"#first"]), int(memory[b"#last"])
    assert (first, last) == (49, 120)
    assert {key for key in memory if key.startswith(b"old")} == {
        f"old{number}".encode() for number in range(first, 101)
    }
    assert all(f"new{number}".encode() in memory for number in range(20))


def test_the_memory_is_bounded_though_all_of_it_is_young(bench: Bench) -> None:
    young_ms = int(bench.client.time()[0]) * 1000
    fields = {f"#{number}": f"{young_ms}:old{number}" for number in range(1, 10_016)}
    fields |= {f"old{number}": "" for number in range(1, 10_016)}
    bench.client.hset(bench.keys.operations, mapping=fields | {"#last": 10_015})
    bench.append("new", b"{}")
    first, last = map(int, bench.client.hmget(bench.keys.operations, "#first", "#last"))
    assert (first, last) == (17, 10_016)
    assert bench.client.hlen(bench.keys.operations) == 2 * 10_000 + 3
    assert bench.append("old1", b"{}", age_ms=10_000) == [Code.FORGOTTEN]
    assert bench.append("old17", b"{}", age_ms=10_000) == [Code.DONE]
    assert bench.items() == [b"{}"]


def test_read_gives_a_piece_and_refuses_another_generation(bench: Bench) -> None:
    bench.append("op", b"{}", b'{"a":1}', b"\xff")
    generation = bench.history()[b"generation"]
    reply = bench.call("history/read", "", -1, 2, 1000, 0)
    assert reply[:4] == [Code.DONE, generation, 3, 1]
    assert len(reply) == 5
    assert unpacked(reply[4:]) == [b'{"a":1}', b"\xff"]
    assert bench.call("history/read", generation, 1, 9, 1000, 0)[2:4] == [1, 0]
    assert bench.call("history/read", "1", 1, 9, 1000, 0) == [Code.CONFLICT, generation]
    assert bench.call("history/read", generation, 4, 9, 1000, 0) == [Code.CONFLICT, generation]
    assert bench.call("history/read", "", -1, 9, 4, 0)[3] == 2  # about one item of four bytes


def test_read_packs_records_of_any_size_and_bytes(bench: Bench) -> None:
    records = [bytes([size % 256]) * size for size in (0, 31, 32, 255, 256, 65_535, 65_536)] * 40
    bench.call("history/append", "op", 0, TTL_MS, 1000, 10**8, *records)
    reply = bench.call("history/read", "", -1, 1000, 10**8, 0)
    assert len(reply) == 4 + 3
    assert unpacked(reply[4:]) == records


def test_read_renews_only_when_asked(bench: Bench) -> None:
    bench.append("op", b"{}", b"bad")
    bench.call("history/pop", "one", 0, TTL_MS, "", 5)
    bench.call("history/pop", "two", 0, TTL_MS, "one", 5)
    bench.append("again", b"{}")
    keys = (bench.keys.items, bench.keys.history, bench.keys.quarantine)
    for key in keys:
        assert bench.client.pexpire(key, 5000)
    bench.call("history/read", "", -1, 2, 1000, 0)
    assert all(0 < bench.client.pttl(key) <= 5000 for key in keys)
    bench.call("history/read", "", -1, 2, 1000, TTL_MS)
    assert all(5000 < bench.client.pttl(key) <= TTL_MS for key in keys)


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
    """It was in the memory of operations, which every later write made live longer."""
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


def test_pop_quarantines_what_its_reader_found_corrupt_once(bench: Bench) -> None:
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


def test_stage_takes_pieces_in_order_and_each_once(bench: Bench) -> None:
    assert bench.call("history/stage", 0, TTL_MS, b"1", b"2") == [Code.DONE]
    assert bench.call("history/stage", 0, TTL_MS, b"1", b"2") == [Code.DONE]
    assert bench.call("history/stage", 2, TTL_MS, b"3") == [Code.DONE]
    assert bench.call("history/stage", 2, TTL_MS, b"3") == [Code.DONE]
    assert bench.call("history/stage", 7, TTL_MS, b"8") == [Code.CONFLICT, 3]
    assert bench.everything() == {"staging:staging": [b"1", b"2", b"3"]}


def replace(bench: Bench, *records: bytes, **changes: Any) -> list[Any]:
    values = {
        "operation_id": "r", "age_ms": 0, "ttl_ms": TTL_MS,
        "generation": bench.history().get(b"generation", b"0"), "start": 0, "stop": 3,
        "pruned": 0, "staged": 0, "staged_bytes": 0, "max_items": 10, "max_bytes": 100,
        "max_quarantined": 5, "corrupt": "",
    } | changes  # fmt: skip
    return bench.call("history/replace", *values.values(), *records)


def test_replace_keeps_what_is_before_and_behind(bench: Bench) -> None:
    bench.append("op", b"1", b"2", b"3", b"4", b"5")
    bench.call("history/stage", 0, TTL_MS, b"a", b"b")
    before = bench.history()
    reply = replace(bench, b"c", start=1, stop=4, staged=2, staged_bytes=2, corrupt="1,2")
    assert reply == [Code.DONE, bench.history()[b"generation"]]
    assert bench.items() == [b"1", b"a", b"b", b"c", b"5"]
    state = bench.everything()
    assert sorted(state) == ["history", "items", "operations", "quarantine"]
    assert state["quarantine"] == [b"2", b"3"]
    assert state["history"][b"bytes"] == b"5"
    assert state["history"][b"created"] == before[b"created"]
    assert int(state["history"][b"updated"]) > int(before[b"updated"])
    assert replace(bench, b"x", age_ms=3) == reply
    assert bench.everything() == state


def test_replace_of_all_renames_the_stage(bench: Bench) -> None:
    bench.append("op", b"1", b"22", b"333", b"4444")
    bench.call("history/stage", 0, TTL_MS, b"a", b"bb")
    assert replace(bench, b"ccc", stop=3, staged=2, staged_bytes=3)[0] == Code.DONE
    state = bench.everything()
    assert sorted(state) == ["history", "items", "operations"]
    assert state["items"] == [b"a", b"bb", b"ccc", b"4444"]
    assert state["history"][b"bytes"] == b"10"


@pytest.mark.parametrize(
    ("pruned", "left"), [(2, [b"3", b"a", b"b", b"6"]), (3, [b"a", b"b", b"6"])]
)
def test_replace_prunes_the_front_in_the_same_step(
    bench: Bench, pruned: int, left: list[bytes]
) -> None:
    bench.append("op", b"111", b"22", b"3", b"4", b"5", b"6")
    assert replace(bench, b"a", b"b", start=3, stop=5, pruned=pruned)[0] == Code.DONE
    assert bench.items() == left
    assert bench.history()[b"bytes"] == str(len(left)).encode()
    assert sorted(bench.everything()) == ["history", "items", "operations"]


@pytest.mark.parametrize("changes", [{"generation": "5"}, {"max_items": 1}, {"age_ms": 600_000}])
def test_a_refused_replacement_takes_its_stage_with_it(
    bench: Bench, changes: dict[str, Any]
) -> None:
    bench.append("op", b"1", b"2", b"3")
    before = bench.everything()
    bench.call("history/stage", 0, TTL_MS, b"a", b"b")
    assert replace(bench, staged=2, staged_bytes=2, **changes)[0] != Code.DONE
    assert bench.everything() == before


def test_replace_refuses_without_a_change(bench: Bench) -> None:
    bench.append("op", b"1", b"2", b"3")
    before = bench.everything()
    generation = bench.history()[b"generation"]
    assert replace(bench, b"x", generation="5") == [Code.CONFLICT, generation]
    assert replace(bench, b"x", stop=4) == [Code.CONFLICT, generation]
    assert replace(bench, b"x", staged=1) == [Code.LOST, 0]
    assert replace(bench, *[b"x"] * 11) == [Code.FULL, 3, 3]
    assert replace(bench, b"x" * 101) == [Code.FULL, 3, 3]
    assert replace(bench, b"x", age_ms=600_000) == [Code.FORGOTTEN]
    assert bench.everything() == before


def test_clear_leaves_only_the_memory(bench: Bench) -> None:
    bench.append("op", b"1")
    assert bench.call("history/clear", "c", 600_000) == [Code.FORGOTTEN]
    assert bench.items() == [b"1"]
    bench.append("more", b"2")
    bench.call("history/pop", "pop", 0, TTL_MS, "", 5)
    taken = bench.keys.popped_by("pop")
    for _ in range(2):  # once more where its reply was lost
        assert bench.call("history/clear", "c", 0) == [Code.DONE, taken.encode()]
    assert bench.call("history/forget", taken) == [Code.DONE]
    assert sorted(bench.everything()) == ["operations"]
    assert bench.call("history/pop", "pop", 5, TTL_MS, "", 5) == [Code.DONE]
    bench.append("later", b"2")
    assert bench.call("history/clear", "c", 9) == [Code.DONE]
    assert bench.items() == [b"2"]


def test_info_tells_without_a_change(bench: Bench) -> None:
    assert bench.call("history/info") == [Code.DONE, 0, b"0", b"0", b"0", -2, 0]
    bench.append("op", b"{}")
    record = bench.history()
    reply = bench.call("history/info")
    assert reply[:5] == [Code.DONE, 1, b"2", record[b"created"], record[b"updated"]]
    assert 0 < reply[5] <= TTL_MS


def test_a_settled_operation_is_never_done_later(bench: Bench) -> None:
    assert bench.call("operation_abandon", "gone", 5) == [Code.DONE, 0]
    before = bench.everything()
    assert bench.append("gone", b"{}") == [Code.ABANDONED]
    assert bench.call("history/pop", "gone", 0, TTL_MS, "", 5) == [Code.ABANDONED]
    assert bench.call("history/pop_suffix", "gone", 0, TTL_MS, b"{}") == [Code.ABANDONED]
    assert bench.call("history/clear", "gone", 0) == [Code.ABANDONED]
    assert bench.call("operation_abandon", "gone", 9) == [Code.DONE, 0]
    bench.call("history/stage", 0, TTL_MS, b"staged")
    assert replace(bench, b"{}", operation_id="gone", staged=1) == [Code.ABANDONED]
    assert bench.everything() == before
    bench.append("done", b"{}")
    assert bench.call("operation_abandon", "done", 5) == [Code.DONE, 1]
    assert bench.call("operation_abandon", "old", 600_000) == [Code.FORGOTTEN]


def test_updates_grow_though_the_clock_goes_back(bench: Bench) -> None:
    bench.append("op", b"{}")
    ahead = int(bench.history()[b"updated"]) + 10**9
    bench.client.hset(bench.keys.history, mapping={"updated": ahead, "generation": ahead})
    bench.append("later", b"{}")
    assert int(bench.history()[b"updated"]) == ahead + 1
    bench.call("history/pop", "pop", 0, TTL_MS, "", 5)
    assert int(bench.history()[b"generation"]) == ahead + 1
