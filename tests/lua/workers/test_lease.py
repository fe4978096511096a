"""The lease of a worker."""

from __future__ import annotations

from capsule_tasks.storage.scripts import Code
from tests.lua.workers.bench import KEEP_MS, LEASE_MS, MEMORY_MS, Bench


def test_a_lease_begins_with_a_token_and_lasts_as_configured(bench: Bench) -> None:
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
    [code, left_ms, lapsed_ms] = bench.call("workers/lease_read")
    assert (code, lapsed_ms) == (Code.DONE, 0)
    assert LEASE_MS < left_ms <= 2 * LEASE_MS


def test_a_release_ends_the_lease_and_can_be_repeated(bench: Bench) -> None:
    token = bench.leased()
    assert bench.call("workers/lease_renew", token, 0, KEEP_MS) == [Code.DONE]
    [code, left_ms, lapsed_ms] = bench.call("workers/lease_read")
    assert (code, left_ms) == (Code.DONE, 0)
    assert lapsed_ms >= 0
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
