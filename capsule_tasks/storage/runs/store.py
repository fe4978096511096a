"""The faces of the store of runs: for callers that await, and for those that block."""

from __future__ import annotations

from capsule_tasks.settings import LeaseSettings, RunSettings
from capsule_tasks.storage.drivers import AsyncStore, SyncStore, awaited, blocking
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
        """A worker's lease on the Redis of these runs, where a claim looks for it."""
        return Lease(incarnation, self.store, settings=settings, prefix=self.core.settings.prefix)

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

    acquire = awaited(LeaseCore.acquire)
    renew = awaited(LeaseCore.renew)
    release = awaited(LeaseCore.release)
    remaining_s = awaited(LeaseCore.remaining_s)


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
        """A worker's lease on the Redis of these runs, where a claim looks for it."""
        return SyncLease(
            incarnation, self.store, settings=settings, prefix=self.core.settings.prefix
        )

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

    acquire = blocking(LeaseCore.acquire)
    renew = blocking(LeaseCore.renew)
    release = blocking(LeaseCore.release)
    remaining_s = blocking(LeaseCore.remaining_s)
