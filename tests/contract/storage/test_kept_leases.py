"""A lease that is kept: renewed while its block runs, its loss told."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import redis
import redis.asyncio

from capsule_tasks.errors import LeaseLost, StorageUnavailable
from capsule_tasks.settings import LeaseSettings
from capsule_tasks.storage.kept_leases import Renewals
from capsule_tasks.storage.keys import WorkerKeys
from capsule_tasks.storage.runs.store import Lease, SyncLease
from tests.servers import fresh_prefix

SETTINGS = LeaseSettings(lease_s=0.3)
LONGER = LeaseSettings(lease_s=3.0)
"""A lease that a busy machine does not let lapse."""
LIMIT_S = 30


@pytest.fixture
def prefix() -> str:
    return fresh_prefix()


async def test_a_lease_is_renewed_until_its_block_ends(valkey_url: str, prefix: str) -> None:
    async with Lease("w1", valkey_url, settings=LONGER, prefix=prefix) as lease:
        renewed, count = asyncio.Event(), list[int]()
        renew = lease.renew

        async def counted() -> None:
            await renew()
            count.append(1)
            if len(count) == 3:
                renewed.set()

        lease.renew = counted  # type: ignore[method-assign]
        async with lease.keep() as lost, asyncio.timeout(LIMIT_S):
            await renewed.wait()
            assert await lease.remaining_s() > 0
            assert not lost.is_set()
        assert await lease.remaining_s() == 0


@pytest.mark.parametrize("face", ["async", "sync"])
async def test_the_loss_of_a_lease_is_told(valkey_url: str, prefix: str, face: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        key = WorkerKeys("w1", prefix).worker
        if face == "async":
            async with Lease("w1", valkey_url, settings=SETTINGS, prefix=prefix) as lease:
                async with lease.keep() as lost, asyncio.timeout(LIMIT_S):
                    client.hset(key, "until", 1)
                    await lost.wait()
                with pytest.raises(LeaseLost):
                    await lease.acquire()
        else:
            with SyncLease("w1", valkey_url, settings=SETTINGS, prefix=prefix) as lease:
                with lease.keep() as gone:
                    client.hset(key, "until", 1)
                    assert await asyncio.to_thread(gone.wait, LIMIT_S)
                with pytest.raises(LeaseLost):
                    lease.acquire()


def test_a_thread_renews_a_lease_until_its_block_ends(valkey_url: str, prefix: str) -> None:
    with SyncLease("w1", valkey_url, settings=LONGER, prefix=prefix) as lease:
        renewed = threading.Event()
        renew, count = lease.renew, list[int]()

        def counted() -> None:
            renew()
            count.append(1)
            if len(count) == 3:
                renewed.set()

        lease.renew = counted  # type: ignore[method-assign]
        with lease.keep() as lost:
            assert renewed.wait(LIMIT_S)
            assert not lost.is_set()
            assert lease.remaining_s() > 0
        assert lease.remaining_s() == 0


async def test_a_lease_that_cannot_be_renewed_counts_as_lost_once_it_may_have_lapsed(
    valkey_url: str, prefix: str
) -> None:
    async with Lease("w1", valkey_url, settings=SETTINGS, prefix=prefix) as lease:

        async def refused() -> None:
            raise StorageUnavailable("no Redis")

        lease.renew = refused  # type: ignore[method-assign]
        began = time.monotonic()
        async with lease.keep() as lost, asyncio.timeout(LIMIT_S):
            await lost.wait()
            assert time.monotonic() - began >= SETTINGS.lease_s


def test_renewals_come_sooner_after_a_fault() -> None:
    renewals = Renewals(15.0, 100.0)
    assert (renewals.wait_s, renewals.until) == (0.0, 115.0)
    renewals.on_renewed(100.0)
    assert (renewals.wait_s, renewals.until) == (5.0, 115.0)
    renewals.on_fault()
    assert (renewals.wait_s, renewals.until) == (1.0, 115.0)
    assert renewals.limit_s(106.0) == 9.0
    assert renewals.limit_s(200.0) == 5.0
