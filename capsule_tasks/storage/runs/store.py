"""The facades of the store of runs: asynchronous and blocking."""

from __future__ import annotations

from capsule_tasks.settings import LeaseSettings, RunSettings
from capsule_tasks.storage.drivers import AsyncStore, SyncStore, async_method, sync_method
from capsule_tasks.storage.facades import AsyncFacade, AsyncTarget, SyncFacade, SyncTarget
from capsule_tasks.storage.leases import LeaseCore
from capsule_tasks.storage.runs.approvals import ApprovalCore
from capsule_tasks.storage.runs.core import RunCore


class RunStore(AsyncFacade):
    """Runs in Redis: stored, claimed, committed turn by turn."""

    def __init__(
        self,
        redis: AsyncTarget,
        *,
        settings: RunSettings | None = None,
    ) -> None:
        super().__init__(redis)
        self.core = RunCore(settings or RunSettings(), self.store.location)
        self.approvals = Approvals(self.core, self.store)

    def lease(self, incarnation: str, settings: LeaseSettings | None = None) -> Lease:
        """A worker's lease on the Redis of these runs, which a claim checks."""
        return Lease(incarnation, self.store, settings=settings, prefix=self.core.settings.prefix)

    create = async_method(RunCore.create)
    claim = async_method(RunCore.claim)
    commit = async_method(RunCore.commit)
    release = async_method(RunCore.release)
    cancel = async_method(RunCore.cancel)
    read = async_method(RunCore.read)
    start_calls = async_method(RunCore.start_calls)
    finish_calls = async_method(RunCore.finish_calls)


class Approvals:
    """Approvals of all runs: read them, decide them."""

    def __init__(self, runs: RunCore, store: AsyncStore) -> None:
        self.core = ApprovalCore(runs.settings, runs)
        self.store = store

    approve = async_method(ApprovalCore.approve)
    reject = async_method(ApprovalCore.reject)
    pending = async_method(ApprovalCore.pending)
    expire = async_method(ApprovalCore.expire)
    expire_due = async_method(ApprovalCore.expire_due)
    reindex = async_method(ApprovalCore.reindex)


class Lease(AsyncFacade):
    """The one lease of one incarnation of a worker on one Redis: that of what it guards."""

    def __init__(
        self,
        incarnation: str,
        redis: AsyncTarget,
        *,
        settings: LeaseSettings | None = None,
        prefix: str = "capsule",
    ) -> None:
        super().__init__(redis)
        self.core = LeaseCore(incarnation, settings or LeaseSettings(), prefix)

    acquire = async_method(LeaseCore.acquire)
    renew = async_method(LeaseCore.renew)
    release = async_method(LeaseCore.release)
    remaining_s = async_method(LeaseCore.remaining_s)


class SyncRunStore(SyncFacade):
    """Runs in Redis: stored, claimed, committed turn by turn."""

    def __init__(
        self,
        redis: SyncTarget,
        *,
        settings: RunSettings | None = None,
    ) -> None:
        super().__init__(redis)
        self.core = RunCore(settings or RunSettings(), self.store.location)
        self.approvals = SyncApprovals(self.core, self.store)

    def lease(self, incarnation: str, settings: LeaseSettings | None = None) -> SyncLease:
        """A worker's lease on the Redis of these runs, which a claim checks."""
        return SyncLease(
            incarnation, self.store, settings=settings, prefix=self.core.settings.prefix
        )

    create = sync_method(RunCore.create)
    claim = sync_method(RunCore.claim)
    commit = sync_method(RunCore.commit)
    release = sync_method(RunCore.release)
    cancel = sync_method(RunCore.cancel)
    read = sync_method(RunCore.read)
    start_calls = sync_method(RunCore.start_calls)
    finish_calls = sync_method(RunCore.finish_calls)


class SyncApprovals:
    """Approvals of all runs: read them, decide them."""

    def __init__(self, runs: RunCore, store: SyncStore) -> None:
        self.core = ApprovalCore(runs.settings, runs)
        self.store = store

    approve = sync_method(ApprovalCore.approve)
    reject = sync_method(ApprovalCore.reject)
    pending = sync_method(ApprovalCore.pending)
    expire = sync_method(ApprovalCore.expire)
    expire_due = sync_method(ApprovalCore.expire_due)
    reindex = sync_method(ApprovalCore.reindex)


class SyncLease(SyncFacade):
    """The one lease of one incarnation of a worker on one Redis: that of what it guards."""

    def __init__(
        self,
        incarnation: str,
        redis: SyncTarget,
        *,
        settings: LeaseSettings | None = None,
        prefix: str = "capsule",
    ) -> None:
        super().__init__(redis)
        self.core = LeaseCore(incarnation, settings or LeaseSettings(), prefix)

    acquire = sync_method(LeaseCore.acquire)
    renew = sync_method(LeaseCore.renew)
    release = sync_method(LeaseCore.release)
    remaining_s = sync_method(LeaseCore.remaining_s)
