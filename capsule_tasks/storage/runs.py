"""The faces of the store of runs: for callers that await, and for those that block.

`redis` is a URL, connections to share, or a client of redis-py, as for a `History`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from redis import Redis as SyncRedis
from redis import RedisCluster as SyncRedisCluster
from redis.asyncio import Redis, RedisCluster

from capsule_tasks.settings import LeaseSettings, RunSettings
from capsule_tasks.storage.approval_core import ApprovalCore
from capsule_tasks.storage.drivers import AsyncStore, SyncStore, awaited, blocking
from capsule_tasks.storage.history import _async_store as async_store
from capsule_tasks.storage.history import _sync_store as sync_store
from capsule_tasks.storage.lease_core import LeaseCore
from capsule_tasks.storage.run_core import RunCore


class _AsyncFace:
    """A core and the way to its Redis."""

    store: AsyncStore

    def __init__(self, core: Any, redis: str | AsyncStore | Redis | RedisCluster) -> None:
        self.core = core
        self.store = async_store(redis)
        self._owns_store = isinstance(redis, str)

    async def close(self) -> None:
        """Close the connections that were made here; safe twice. What was given stays open."""
        if self._owns_store:
            await self.store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class _SyncFace:
    """A core and the way to its Redis."""

    store: SyncStore

    def __init__(self, core: Any, redis: str | SyncStore | SyncRedis | SyncRedisCluster) -> None:
        self.core = core
        self.store = sync_store(redis)
        self._owns_store = isinstance(redis, str)

    def close(self) -> None:
        """Close the connections that were made here; safe twice. What was given stays open."""
        if self._owns_store:
            self.store.close_blocking()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class RunStore(_AsyncFace):
    """Runs in Redis: stored, claimed, committed turn by turn."""

    def __init__(
        self,
        redis: str | AsyncStore | Redis | RedisCluster,
        *,
        settings: RunSettings | None = None,
    ) -> None:
        super().__init__(RunCore(settings or RunSettings()), redis)
        self.approvals = Approvals(self.core, self.store)

    create = awaited(RunCore.create)
    claim = awaited(RunCore.claim)
    commit = awaited(RunCore.commit)
    release = awaited(RunCore.release)
    cancel = awaited(RunCore.cancel)
    read = awaited(RunCore.read)
    start_calls = awaited(RunCore.start_calls)
    finish_calls = awaited(RunCore.finish_calls)


class Approvals:
    """What waits for a decision in all runs, and deciding it."""

    def __init__(self, runs: RunCore, store: AsyncStore) -> None:
        self.core = ApprovalCore(runs.settings, runs)
        self.store = store

    approve = awaited(ApprovalCore.approve)
    reject = awaited(ApprovalCore.reject)
    waiting = awaited(ApprovalCore.waiting)
    expire = awaited(ApprovalCore.expire)
    expire_due = awaited(ApprovalCore.expire_due)
    reindex = awaited(ApprovalCore.reindex)


class Lease(_AsyncFace):
    """The one lease of one incarnation of a worker."""

    core: LeaseCore

    def __init__(
        self,
        incarnation: str,
        redis: str | AsyncStore | Redis | RedisCluster,
        *,
        settings: LeaseSettings | None = None,
        prefix: str = "capsule",
    ) -> None:
        super().__init__(LeaseCore(incarnation, settings or LeaseSettings(), prefix), redis)

    acquire = awaited(LeaseCore.acquire)
    renew = awaited(LeaseCore.renew)
    release = awaited(LeaseCore.release)
    remaining_s = awaited(LeaseCore.remaining_s)


class SyncRunStore(_SyncFace):
    """Runs in Redis: stored, claimed, committed turn by turn."""

    def __init__(
        self,
        redis: str | SyncStore | SyncRedis | SyncRedisCluster,
        *,
        settings: RunSettings | None = None,
    ) -> None:
        super().__init__(RunCore(settings or RunSettings()), redis)
        self.approvals = SyncApprovals(self.core, self.store)

    create = blocking(RunCore.create)
    claim = blocking(RunCore.claim)
    commit = blocking(RunCore.commit)
    release = blocking(RunCore.release)
    cancel = blocking(RunCore.cancel)
    read = blocking(RunCore.read)
    start_calls = blocking(RunCore.start_calls)
    finish_calls = blocking(RunCore.finish_calls)


class SyncApprovals:
    """What waits for a decision in all runs, and deciding it."""

    def __init__(self, runs: RunCore, store: SyncStore) -> None:
        self.core = ApprovalCore(runs.settings, runs)
        self.store = store

    approve = blocking(ApprovalCore.approve)
    reject = blocking(ApprovalCore.reject)
    waiting = blocking(ApprovalCore.waiting)
    expire = blocking(ApprovalCore.expire)
    expire_due = blocking(ApprovalCore.expire_due)
    reindex = blocking(ApprovalCore.reindex)


class SyncLease(_SyncFace):
    """The one lease of one incarnation of a worker."""

    core: LeaseCore

    def __init__(
        self,
        incarnation: str,
        redis: str | SyncStore | SyncRedis | SyncRedisCluster,
        *,
        settings: LeaseSettings | None = None,
        prefix: str = "capsule",
    ) -> None:
        super().__init__(LeaseCore(incarnation, settings or LeaseSettings(), prefix), redis)

    acquire = blocking(LeaseCore.acquire)
    renew = blocking(LeaseCore.renew)
    release = blocking(LeaseCore.release)
    remaining_s = blocking(LeaseCore.remaining_s)
