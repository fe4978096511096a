"""Properties of several scripts of histories."""

from __future__ import annotations

from capsule_tasks.storage.scripts import Code
from tests.lua.history.bench import TTL_MS, Bench, replace


def test_an_abandoned_operation_is_never_done_later(bench: Bench) -> None:
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
