"""What any worker does for runs that it does not own, as generators without I/O."""

from __future__ import annotations

import contextlib

from capsule_tasks.errors import RunClaimed, RunClaimLost, RunNotFound
from capsule_tasks.settings import check_value
from capsule_tasks.storage.keys import escaped
from capsule_tasks.storage.leases import lease_left_s
from capsule_tasks.storage.operations import Operation, named
from capsule_tasks.storage.runs.core import RunCore
from capsule_tasks.storage.runs.owners import run_of
from capsule_tasks.storage.runs.types import PageSize, Requeued, RequeueSweep

PAGE = 100


class KeeperCore(RunCore):
    """Runs in one Redis, with what keeps them going; the docstrings hold for both facades."""

    def requeue(self, run_id: str, owner: str) -> Operation[Requeued | None]:
        """Queue a run whose owner's lease has lapsed, as it was last committed.

        None if the run has another owner by now, or none. Raises RunClaimed while the lease lasts.
        """
        escaped("owner", owner)
        if (yield from lease_left_s(owner, self.settings.prefix, self.settings.retry)):
            raise RunClaimed(run_id, owner)
        record = yield from self.read(run_id, with_snapshot=False)
        if record.owner != owner:
            return None
        try:
            name = named("run_requeue", None)
            released = yield from self._released(run_id, record.session_id, record.token, name)
        except RunClaimLost:
            return None
        return Requeued(run_id, *released)

    def requeue_lapsed(self, *, limit: int = PAGE) -> Operation[RequeueSweep]:
        """Queue runs of owners whose leases have lapsed; the result says when to call this again.

        Any number of processes may call it at the same time: one of them is told of each run, and
        sends its message.
        """
        check_value("limit", limit, PageSize)
        owners, next_in_s = yield from self.owners.due(limit)
        requeued: list[Requeued] = []
        for owner in owners:
            left_s = yield from lease_left_s(owner, self.settings.prefix, self.settings.retry)
            if left_s:
                _, next_in_s = yield from self.owners.due(0, owner, in_s=left_s)
                continue
            requeued += yield from self._requeue_all(owner, limit - len(requeued))
            if len(requeued) >= limit:
                return RequeueSweep(requeued, 0.0)
            _, next_in_s = yield from self.owners.due(0, forget=[owner])
        return RequeueSweep(requeued, 0.0 if len(owners) == limit else next_in_s)

    def _requeue_all(self, owner: str, limit: int) -> Operation[list[Requeued]]:
        """Queue runs of an owner whose lease has lapsed; fewer than `limit` are all of them."""
        requeued: list[Requeued] = []
        done: list[bytes] = []
        while holds := (yield from self.owners.held_by(owner, done, PAGE)):
            done = []
            for hold in holds:
                with contextlib.suppress(RunNotFound):
                    one = yield from self.requeue(run_of(hold), owner)
                    if one is not None:
                        requeued.append(one)
                done.append(hold)
                if len(requeued) >= limit:
                    return requeued
        return requeued
