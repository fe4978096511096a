"""`read`, piece by piece."""

from __future__ import annotations

from capsule_tasks.storage.codec import unpacked
from capsule_tasks.storage.scripts import Code
from tests.lua.history.bench import TTL_MS, Bench


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
