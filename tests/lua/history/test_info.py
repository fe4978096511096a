"""`info`."""

from __future__ import annotations

from capsule_tasks.storage.scripts import Code
from tests.lua.history.bench import TTL_MS, Bench


def test_info_tells_without_a_change(bench: Bench) -> None:
    assert bench.call("history/info") == [Code.DONE, 0, b"0", b"0", b"0", -2, 0]
    bench.append("op", b"{}")
    record = bench.history()
    reply = bench.call("history/info")
    assert reply[:5] == [Code.DONE, 1, b"2", record[b"created"], record[b"updated"]]
    assert 0 < reply[5] <= TTL_MS
