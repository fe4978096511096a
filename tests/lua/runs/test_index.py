"""The index of runs: entries are dropped only if they were not added again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from capsule_tasks.storage.keys import RunEntryKeys
from capsule_tasks.storage.runs import scripts
from capsule_tasks.storage.scripts import Call, Code
from tests.servers import fresh_prefix

TTL_MS = 100_000


class Bench:
    """The index of one prefix, and its scripts called as they are."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.keys = RunEntryKeys("a", "queued", "s", fresh_prefix())

    def call(self, call: Call) -> list[Any]:
        reply: list[Any] = self.client.eval(
            call.script.source, len(call.keys), *call.keys, *call.args
        )
        return reply

    def add(self, *members: bytes, due_in_ms: int = 0) -> int:
        parts = [part for each in members for part in (each, b"of " + each, due_in_ms)]
        code, added_ms = self.call(scripts.index_add.call(self.keys, ttl_ms=TTL_MS, parts=parts))
        assert code == Code.DONE
        return int(added_ms)

    def drop(self, member: bytes, idle_ms: int = 0, before_ms: int = 0) -> int:
        call = scripts.index_drop.call(
            self.keys, member=member, idle_ms=idle_ms, before_ms=before_ms
        )
        return int(self.call(call)[1])

    def list(self, after: str = "0", newest_first: int = 0) -> list[bytes]:
        call = scripts.index_list.call(
            self.keys, self.keys.both, after=after, count=2, newest_first=newest_first
        )
        return self.call(call)[1:]

    def orders(self) -> list[list[bytes]]:
        names = ("all", "agent", "status", "both", "session")
        keys = [getattr(self.keys, name) for name in names]
        return [self.client.zrange(key, 0, -1) for key in keys]


@pytest.fixture(params=["valkey_url", "redis62_url"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with redis.Redis.from_url(request.getfixturevalue(request.param)) as client:
        yield Bench(client)


def test_an_entry_is_in_its_orders_until_it_is_dropped(bench: Bench) -> None:
    bench.add(b"x", b"y")
    bench.add(b"x", due_in_ms=60_000)
    assert bench.orders() == [[b"x", b"y"]] * 5
    for key in ("all", "unsent", "entries", "agent", "status", "both", "session"):
        assert 0 < bench.client.pttl(getattr(bench.keys, key)) <= TTL_MS
    assert bench.drop(b"x") == 1
    assert bench.orders() == [[b"y"]] * 5
    assert not bench.client.exists(bench.keys.unsent)
    assert bench.client.hkeys(bench.keys.entries) == [b"dy", b"ty"]


def test_an_entry_that_was_added_again_is_not_dropped(bench: Bench) -> None:
    first_ms = bench.add(b"x")
    assert bench.drop(b"x", idle_ms=60_000) == 0
    assert bench.drop(b"x", before_ms=first_ms) == 0
    assert bench.drop(b"x", before_ms=first_ms + 1) == 1
    assert bench.drop(b"x", before_ms=first_ms + 1) == 1, "a repeat is no error"


def test_a_page_begins_after_a_score_in_either_direction(bench: Bench) -> None:
    bench.add(b"x", b"y", b"z")
    page = bench.list()
    assert page[::3] == [b"x", b"y"]
    assert page[2::3] == [b"of x", b"of y"]
    assert bench.list(page[-2].decode())[::3] == [b"z"]
    page = bench.list(newest_first=1)
    assert page[::3] == [b"z", b"y"]
    assert bench.list(page[-2].decode(), newest_first=1)[::3] == [b"x"]


def test_the_earlier_time_counts_for_a_message_that_is_due(bench: Bench) -> None:
    scores = list[float]()
    for due_in_ms in (60_000, 90_000, 1):
        bench.add(b"x", due_in_ms=due_in_ms)
        scores.append(bench.client.zscore(bench.keys.unsent, b"x"))
    assert scores[1] == scores[0]
    assert scores[2] < scores[0] - 50_000
    call = scripts.index_postpone.call(bench.keys, member=b"x", at_ms=0, min_ms=-1)
    assert bench.call(call)[0] == Code.DONE
    assert bench.call(scripts.index_unsent.call(bench.keys, count=9)) == [
        Code.DONE,
        -1,
        b"x",
        b"of x",
    ]
