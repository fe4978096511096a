"""`held`: the executions of a worker whose lease has ended."""

from __future__ import annotations

from capsule_tasks.storage.scripts import Code
from tests.lua.workers.bench import KEEP_MS, Bench


def test_holds_are_not_listed_before_the_lease_has_lapsed(bench: Bench) -> None:
    token = bench.leased()
    bench.call("workers/hold", token, KEEP_MS, 2, "a", "b")
    assert bench.call("workers/held", 10, "a") == [Code.HELD]
    assert bench.members() == {"a", "b"}
    bench.lapse()
    lease = bench.lease()
    code, *held = bench.call("workers/held", 10)
    assert (code, set(held)) == (Code.DONE, {b"a", b"b"})
    assert bench.call("workers/held", 10, "a") == [Code.DONE, b"b"]
    assert len(bench.call("workers/held", 1)) == 2
    assert bench.call("workers/held", 10, "b", "unknown") == [Code.DONE]
    assert bench.members() == set()
    assert bench.lease() == lease


def test_a_worker_whose_lease_is_forgotten_has_lapsed(bench: Bench) -> None:
    token = bench.leased()
    bench.call("workers/hold", token, KEEP_MS, 1, "a")
    bench.client.delete(bench.worker)
    assert bench.call("workers/held", 10) == [Code.DONE, b"a"]
    assert bench.call("workers/held", 10, *(f"e{n}" for n in range(2500)), "a") == [Code.DONE]
    assert not bench.client.exists(bench.held)
