"""Each script of workers directly: their leases, what they hold, and the index of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from capsule_tasks.storage import leases
from capsule_tasks.storage.executions import holds
from capsule_tasks.storage.keys import WorkerKeys, worker_index
from capsule_tasks.storage.scripts import Code, Script
from tests.servers import fresh_prefix

BY_NAME = {
    value.name: value
    for module in (holds, leases)
    for value in vars(module).values()
    if isinstance(value, Script)
}
LEASE_MS, KEEP_MS = 50_000, 100_000
MEMORY_MS = 600_000


class Bench:
    """One worker's keys on a server, and scripts called as they are."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        prefix = fresh_prefix()
        self.worker = WorkerKeys("w", prefix).worker
        self.operations = WorkerKeys("w", prefix).operations
        self.held = WorkerKeys("w", prefix).held
        self.workers = worker_index(prefix)

    def call(self, name: str, *args: Any) -> list[Any]:
        """What it replies; whatever it has left expires."""
        script = BY_NAME[name]
        keys = [getattr(self, key) for key in script.keys]
        reply: list[Any] = self.client.eval(script.source, len(keys), *keys, *args)
        for key in keys:
            assert self.client.pttl(key) != -1, key
        return reply

    def acquire(self, operation_id: str = "o", age_ms: int = 0) -> list[Any]:
        return self.call("workers/lease_acquire", operation_id, age_ms, LEASE_MS, KEEP_MS)

    def leased(self) -> str:
        token: bytes = self.acquire()[1]
        return token.decode()

    def lapse(self) -> None:
        self.client.hset(self.worker, "until", self.now_us() - 1)

    def lease(self) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in self.client.hgetall(self.worker).items()}

    def members(self) -> set[str]:
        return {member.decode() for member in self.client.smembers(self.held)}

    def now_us(self) -> int:
        seconds, micros = self.client.time()
        return int(seconds) * 1_000_000 + int(micros)

    def ttl(self, key: str) -> int:
        return int(self.client.pttl(key))

    def is_empty(self) -> bool:
        keys = (self.worker, self.operations, self.held, self.workers)
        return not self.client.exists(*keys)


@pytest.fixture(params=["valkey_url", "redis62_url"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with redis.Redis.from_url(request.getfixturevalue(request.param)) as client:
        yield Bench(client)


def test_a_lease_begins_with_a_token_and_lasts_as_was_said(bench: Bench) -> None:
    before_us = bench.now_us()
    code, token = bench.acquire()
    assert code == Code.DONE
    lease = bench.lease()
    assert lease == {"token": token.decode(), "until": lease["until"]}
    assert before_us <= int(lease["token"]) == int(lease["until"]) - LEASE_MS * 1000
    assert int(lease["token"]) <= bench.now_us()
    assert LEASE_MS + KEEP_MS - 10_000 < bench.ttl(bench.worker) <= LEASE_MS + KEEP_MS
    memory = {k.decode(): v for k, v in bench.client.hgetall(bench.operations).items()}
    assert memory.pop("#1").endswith(b":o")
    assert memory == {"o": token, "#last": b"1"}
    assert bench.ttl(bench.operations) <= MEMORY_MS


def test_an_acquire_that_is_repeated_is_the_same_lease(bench: Bench) -> None:
    first = bench.acquire()
    before = bench.lease()
    assert bench.acquire(age_ms=5) == first
    assert bench.lease() == before


def test_an_incarnation_has_one_lease_in_its_life(bench: Bench) -> None:
    token = bench.leased()
    assert bench.acquire("another") == [Code.HELD, token.encode()]
    bench.lapse()
    lapsed = bench.lease()
    assert bench.acquire("a third") == [Code.HELD, token.encode()]
    assert bench.lease() == lapsed


def test_an_acquire_that_was_given_up_or_is_too_old_to_be_known_leases_nothing(
    bench: Bench,
) -> None:
    assert bench.acquire(age_ms=MEMORY_MS) == [Code.FORGOTTEN]
    assert bench.is_empty()
    bench.client.hset(bench.operations, "o", "!")
    bench.client.pexpire(bench.operations, MEMORY_MS)
    assert bench.acquire() == [Code.ABANDONED]
    assert bench.lease() == {}


def test_a_renewal_counts_from_now(bench: Bench) -> None:
    token = bench.leased()
    before_us = bench.now_us()
    assert bench.call("workers/lease_renew", token, 2 * LEASE_MS, KEEP_MS) == [Code.DONE]
    lease = bench.lease()
    assert lease["token"] == token
    assert before_us <= int(lease["until"]) - 2 * LEASE_MS * 1000 <= bench.now_us()
    assert LEASE_MS + KEEP_MS < bench.ttl(bench.worker) <= 2 * LEASE_MS + KEEP_MS
    [code, left_ms] = bench.call("workers/lease_read")
    assert code == Code.DONE
    assert LEASE_MS < left_ms <= 2 * LEASE_MS


def test_a_release_ends_the_lease_and_can_be_repeated(bench: Bench) -> None:
    token = bench.leased()
    assert bench.call("workers/lease_renew", token, 0, KEEP_MS) == [Code.DONE]
    assert bench.call("workers/lease_read") == [Code.DONE, 0]
    assert bench.ttl(bench.worker) <= KEEP_MS
    released = bench.lease()
    assert bench.call("workers/lease_renew", token, 0, KEEP_MS) == [Code.LOST]
    assert bench.call("workers/lease_renew", token, LEASE_MS, KEEP_MS) == [Code.LOST]
    assert bench.lease() == released


def test_no_lease_is_renewed_that_lapsed_is_anothers_or_never_was(bench: Bench) -> None:
    assert bench.call("workers/lease_renew", "1", LEASE_MS, KEEP_MS) == [Code.LOST]
    assert bench.call("workers/lease_read") == [Code.MISSING]
    assert bench.is_empty()
    token = bench.leased()
    before = bench.lease()
    assert bench.call("workers/lease_renew", int(token) + 1, LEASE_MS, KEEP_MS) == [Code.LOST]
    assert bench.lease() == before
    bench.lapse()
    before = bench.lease()
    assert bench.call("workers/lease_renew", token, LEASE_MS, KEEP_MS) == [Code.LOST]
    assert bench.lease() == before


def test_a_note_of_what_is_held_adds_and_takes_off(bench: Bench) -> None:
    token = bench.leased()
    lease = bench.lease()
    assert bench.call("workers/hold", token, KEEP_MS, 2, "a", "b") == [Code.DONE]
    assert bench.members() == {"a", "b"}
    assert bench.call("workers/hold", token, KEEP_MS, 1, "c", "a", "unknown") == [Code.DONE]
    assert bench.members() == {"b", "c"}
    assert 0 < bench.ttl(bench.held) <= KEEP_MS
    assert bench.call("workers/hold", token, KEEP_MS, 0, "b", "c") == [Code.DONE]
    assert bench.members() == set()
    assert bench.lease() == lease


def test_what_is_taken_off_and_held_again_in_one_note_is_held(bench: Bench) -> None:
    token = bench.leased()
    assert bench.call("workers/hold", token, KEEP_MS, 1, "a", "a") == [Code.DONE]
    assert bench.members() == {"a"}


def test_more_is_noted_at_once_than_one_command_takes(bench: Bench) -> None:
    token = bench.leased()
    ids = [f"e{n}" for n in range(2500)]
    assert bench.call("workers/hold", token, KEEP_MS, len(ids), *ids) == [Code.DONE]
    assert bench.members() == set(ids)
    assert bench.call("workers/hold", token, KEEP_MS, 0, *ids[1:]) == [Code.DONE]
    assert bench.members() == {"e0"}


def test_nothing_is_noted_under_a_lease_that_lapsed_is_anothers_or_never_was(
    bench: Bench,
) -> None:
    assert bench.call("workers/hold", "1", KEEP_MS, 1, "a") == [Code.LOST]
    assert bench.is_empty()
    token = bench.leased()
    assert bench.call("workers/hold", token, KEEP_MS, 1, "a") == [Code.DONE]
    assert bench.call("workers/hold", int(token) + 1, KEEP_MS, 1, "b") == [Code.LOST]
    bench.lapse()
    assert bench.call("workers/hold", token, KEEP_MS, 1, "b", "a") == [Code.LOST]
    assert bench.members() == {"a"}


def test_what_is_held_is_told_to_nobody_before_the_lease_has_lapsed(bench: Bench) -> None:
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


def note(bench: Bench, worker: str, lease_ms: int = LEASE_MS, *forget: str) -> list[Any]:
    return bench.call("workers/register", worker, lease_ms, KEEP_MS, 2, *forget)


def test_a_worker_that_is_noted_is_due_when_its_time_has_passed(bench: Bench) -> None:
    before_ms = bench.now_us() // 1000
    code, next_ms = note(bench, "w1")
    assert code == Code.DONE
    assert LEASE_MS - 1000 < next_ms <= LEASE_MS
    assert bench.ttl(bench.workers) <= KEEP_MS
    [(name, score)] = bench.client.zrange(bench.workers, 0, -1, withscores=True)
    assert name == b"w1"
    assert before_ms <= score - LEASE_MS <= bench.now_us() // 1000
    assert note(bench, "w2", -1)[2:] == [b"w2"]
    assert note(bench, "w2")[2:] == []


def test_who_only_looks_changes_nothing(bench: Bench) -> None:
    assert note(bench, "") == [Code.DONE, -1]
    assert bench.is_empty()
    note(bench, "w1", -2)
    before = bench.client.zrange(bench.workers, 0, -1, withscores=True)
    assert note(bench, "") == [Code.DONE, -1, b"w1"]
    assert bench.client.zrange(bench.workers, 0, -1, withscores=True) == before


def test_those_that_are_due_longest_are_listed_first_and_others_are_forgotten(
    bench: Bench,
) -> None:
    for number in range(4):
        note(bench, f"w{number}", -1000 * (number + 1))
    assert note(bench, "")[2:] == [b"w3", b"w2"]
    assert note(bench, "", 0, "w3", "unknown")[2:] == [b"w2", b"w1"]
    assert bench.client.zrange(bench.workers, 0, -1) == [b"w2", b"w1", b"w0"]
    assert note(bench, "w4", LEASE_MS, "w0", "w1", "w2")[2:] == []
    assert bench.client.zrange(bench.workers, 0, -1) == [b"w4"]


def test_all_scripts_of_workers_are_here() -> None:
    assert set(BY_NAME) == {
        *("workers/lease_acquire", "workers/lease_renew", "workers/lease_read"),
        *("workers/hold", "workers/held", "workers/register"),
    }
