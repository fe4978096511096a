"""The facades of the store of runs: asynchronous and blocking."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import cached_property

from capsule_tasks.settings import ConnectionSettings, LeaseSettings, RunSettings
from capsule_tasks.storage import facades
from capsule_tasks.storage.kept_leases import kept, kept_blocking
from capsule_tasks.storage.leases import LeaseCore
from capsule_tasks.storage.runs.approvals import ApprovalCore
from capsule_tasks.storage.runs.core import RunCore
from capsule_tasks.storage.runs.keeping import KeeperCore
from capsule_tasks.storage.runs.types import RunRecord
from capsule_tasks.storage.runs.waiting import LoopDoorbells, Until, wait, wait_blocking


class _Lease(facades.Facade[facades.Target]):
    def __init__(
        self,
        incarnation: str,
        redis: facades.Target,
        *,
        settings: LeaseSettings | None = None,
        prefix: str = "capsule",
    ) -> None:
        super().__init__(redis)
        self.core = LeaseCore(incarnation, settings or LeaseSettings(), prefix)

    acquire = facades.Method(LeaseCore.acquire)
    renew = facades.Method(LeaseCore.renew)
    release = facades.Method(LeaseCore.release)
    remaining_s = facades.Method(LeaseCore.remaining_s)


class Lease(_Lease[facades.AsyncTarget], facades.AsyncFacade):
    """The one lease of one incarnation of a worker on one Redis: that of what it guards."""

    def keep(self) -> AbstractAsyncContextManager[asyncio.Event]:
        """Hold the lease while a block runs: acquire, renew, and release it in the end.

        The event is set once the lease is lost. The lease outlives pauses of the event loop of up
        to two thirds of its time, and faults of Redis that end before it lapses.
        """
        return kept(self)


class SyncLease(_Lease[facades.SyncTarget], facades.SyncFacade):
    """The one lease of one incarnation of a worker on one Redis: that of what it guards."""

    def keep(self) -> AbstractContextManager[threading.Event]:
        """As `Lease.keep`; a thread renews the lease."""
        return kept_blocking(self)


class _Approvals(facades.Facade[facades.Target]):
    def __init__(self, redis: facades.Target, runs: RunCore) -> None:
        super().__init__(redis)
        self.core = ApprovalCore(runs.settings, runs)

    approve = facades.Method(ApprovalCore.approve)
    reject = facades.Method(ApprovalCore.reject)
    settle = facades.Method(ApprovalCore.settle)
    pending = facades.Method(ApprovalCore.pending)
    expire = facades.Method(ApprovalCore.expire)
    expire_due = facades.Method(ApprovalCore.expire_due)
    reindex = facades.Method(ApprovalCore.reindex)


class Approvals(_Approvals[facades.AsyncTarget], facades.AsyncFacade):
    """Approvals of all runs: read them, decide them."""


class SyncApprovals(_Approvals[facades.SyncTarget], facades.SyncFacade):
    """Approvals of all runs: read them, decide them."""


class _RunStore(facades.Facade[facades.Target]):
    def __init__(
        self,
        redis: facades.Target,
        *,
        settings: RunSettings | None = None,
        connection: ConnectionSettings | None = None,
    ) -> None:
        super().__init__(redis, connection)
        self.core = KeeperCore(settings or RunSettings(), self.store.location)
        self._doorbells = LoopDoorbells()

    create = facades.Method(RunCore.create)
    claim = facades.Method(RunCore.claim)
    commit = facades.Method(RunCore.commit)
    release = facades.Method(RunCore.release)
    cancel = facades.Method(RunCore.cancel)
    read = facades.Method(RunCore.read)
    start_calls = facades.Method(RunCore.start_calls)
    finish_calls = facades.Method(RunCore.finish_calls)
    journal = facades.Method(RunCore.journal)
    list = facades.Method(KeeperCore.list_runs)
    reindex = facades.Method(KeeperCore.reindex)
    drop_expired = facades.Method(KeeperCore.drop_expired)
    delete = facades.Method(KeeperCore.delete)
    delete_all = facades.Method(KeeperCore.delete_all)
    queued_unsent = facades.Method(KeeperCore.queued_unsent)
    note_sent = facades.Method(KeeperCore.note_sent)
    requeue = facades.Method(KeeperCore.requeue)
    requeue_lapsed = facades.Method(KeeperCore.requeue_lapsed)


class RunStore(_RunStore[facades.AsyncTarget], facades.AsyncFacade):
    """Runs in Redis: stored, claimed, committed turn by turn."""

    @cached_property
    def approvals(self) -> Approvals:
        return Approvals(self.store, self.core)

    async def wait(
        self, run_id: str, *, until: Until = "ended", timeout_s: float | None = None
    ) -> RunRecord:
        """The run, without its snapshot, as soon as it has ended; with `parked` also once it parks.

        Raises RunTimeout, RunNotFound, and StorageUnavailable if Redis stays away. Waiters of one
        event loop share one connection besides those of the store, which must be made from a URL.
        """
        return await wait(self.core, self.store, self._doorbells, run_id, until, timeout_s)

    def lease(self, incarnation: str, settings: LeaseSettings | None = None) -> Lease:
        """A worker's lease on the Redis of these runs, which a claim checks."""
        return Lease(incarnation, self.store, settings=settings, prefix=self.core.settings.prefix)


class SyncRunStore(_RunStore[facades.SyncTarget], facades.SyncFacade):
    """Runs in Redis: stored, claimed, committed turn by turn."""

    @cached_property
    def approvals(self) -> SyncApprovals:
        return SyncApprovals(self.store, self.core)

    def wait(
        self, run_id: str, *, until: Until = "ended", timeout_s: float | None = None
    ) -> RunRecord:
        """As `RunStore.wait`; each call has a connection of its own while it lasts."""
        return wait_blocking(self.core, self.store, run_id, until, timeout_s)

    def lease(self, incarnation: str, settings: LeaseSettings | None = None) -> SyncLease:
        """A worker's lease on the Redis of these runs, which a claim checks."""
        prefix = self.core.settings.prefix
        return SyncLease(incarnation, self.store, settings=settings, prefix=prefix)
