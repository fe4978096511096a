"""`hold` and `held`: the sessions of a worker."""

from __future__ import annotations

from capsule_tasks.storage.keys import HostKeys
from capsule_tasks.storage.scripts import Code
from tests.lua.sessions.bench import TTL_MS, Bench


def test_a_worker_holds_sessions_under_its_lease_and_no_longer(bench: Bench) -> None:
    keys = HostKeys("w", bench.prefix)
    assert bench.call("hold", "1", TTL_MS, 1, "a") == [Code.LOST]
    assert bench.state() == {}
    until = (bench.now_ms() + 60_000) * 1000
    bench.client.hset(keys.worker, mapping={"token": 1, "until": until})
    bench.client.expire(keys.worker, 60)
    assert bench.call("hold", "1", TTL_MS, 2, "a", "b") == [Code.DONE]
    assert bench.call("hold", "1", TTL_MS, 1, "c", "a") == [Code.DONE]
    assert bench.call("hold", "2", TTL_MS, 1, "d") == [Code.LOST]
    assert bench.client.smembers(keys.sessions) == {b"b", b"c"}
    assert bench.call("held", 9, "b") == [Code.HELD]
    bench.client.hset(keys.worker, "until", 1)
    assert bench.call("hold", "1", TTL_MS, 1, "d") == [Code.LOST]
    assert set(bench.call("held", 9)) == {Code.DONE, b"b", b"c"}
    assert bench.call("held", 9, "b") == [Code.DONE, b"c"]
    assert bench.call("held", 9, "c") == [Code.DONE]
