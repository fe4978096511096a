"""`hold`, `held` and `owners`: who has which runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from capsule_tasks.storage.keys import OwnerKeys, run_owners
from capsule_tasks.storage.runs import scripts
from capsule_tasks.storage.scripts import Call, Code
from tests.servers import fresh_prefix

KEEP_MS = 100_000


class Bench:
    """One owner's keys on a server, and the scripts called as they are."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        prefix = fresh_prefix()
        self.keys = OwnerKeys("w", prefix)
        self.owners = run_owners(prefix)

    def call(self, call: Call) -> list[object]:
        reply: list[object] = self.client.eval(
            call.script.source, len(call.keys), *call.keys, *call.args
        )
        return reply

    def hold(self, count: int, *holds: bytes) -> list[object]:
        return self.call(scripts.run_hold.call(self.keys, ttl_ms=KEEP_MS, count=count, holds=holds))

    def held(self, *done: bytes) -> list[object]:
        return self.call(scripts.run_held.call(self.keys, count=9, holds=done))

    def look(self, owner: str, in_ms: int, *forget: str) -> list[object]:
        call = scripts.run_owners.call(
            self.owners, owner=owner, in_ms=in_ms, ttl_ms=KEEP_MS, max_due=2, incarnations=forget
        )
        return self.call(call)


@pytest.fixture(params=["valkey_url", "redis62_url"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with redis.Redis.from_url(request.getfixturevalue(request.param)) as client:
        yield Bench(client)


def test_an_owner_holds_runs_under_its_lease_and_no_longer(bench: Bench) -> None:
    keys, client = bench.keys, bench.client
    assert bench.hold(1, b"a") == [Code.MISSING]
    assert not client.exists(keys.runs)
    client.hset(keys.worker, "until", int(client.time()[0] + 60) * 1_000_000)
    client.expire(keys.worker, 60)
    now_ms = client.time()[0] * 1000
    for count, holds in ((2, (b"a", b"b")), (1, (b"c", b"a"))):
        code, held_ms = bench.hold(count, *holds)
        assert code == Code.DONE
        assert now_ms <= int(held_ms) <= now_ms + 60_000  # type: ignore[call-overload]
    assert client.smembers(keys.runs) == {b"b", b"c"}
    assert 0 < client.pttl(keys.runs) <= KEEP_MS
    assert bench.held(b"b") == [Code.HELD]
    client.hset(keys.worker, "until", 1)
    assert bench.hold(1, b"d", b"b") == [Code.LOST]
    assert set(bench.held()) == {Code.DONE, b"b", b"c"}
    assert bench.held(b"b") == [Code.DONE, b"c"]
    assert bench.held(b"c") == [Code.DONE]
    assert not client.exists(keys.runs)


def test_an_owner_is_due_at_its_time_until_it_is_forgotten(bench: Bench) -> None:
    assert bench.look("", 0) == [Code.DONE, -1]
    assert not bench.client.exists(bench.owners)
    assert bench.look("later", 60_000)[2:] == []
    for owner in ("first", "second", "third"):
        bench.look(owner, -1)
    assert bench.client.pttl(bench.owners) > 0
    code, next_ms, *due = bench.look("", 0)
    assert (code, due) == (Code.DONE, [b"first", b"second"])
    assert isinstance(next_ms, int)
    assert 50_000 < next_ms <= 60_000
    assert bench.look("", 0, "first", "unknown")[2:] == [b"second", b"third"]
    assert bench.look("second", 30_000)[2:] == [b"third"]
