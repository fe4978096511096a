"""`clear`."""

from __future__ import annotations

from capsule_tasks.storage.scripts import Code
from tests.lua.history.bench import TTL_MS, Bench


def test_clear_leaves_only_the_operation_log(bench: Bench) -> None:
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
