"""Leases of workers: how long an incarnation may own runs and executions."""

from __future__ import annotations

import math

from capsule_tasks.errors import LeaseLost, LeaseTaken
from capsule_tasks.settings import LeaseSettings, RetrySettings
from capsule_tasks.storage.keys import WorkerKeys
from capsule_tasks.storage.operations import Operation, call_script, named
from capsule_tasks.storage.scripts import Code, script


@script("workers/lease_acquire")
def lease_acquire(
    keys: WorkerKeys, *, operation_id: str, lease_ms: int, lapsed_ttl_ms: int
) -> None: ...


@script("workers/lease_renew")
def lease_renew(keys: WorkerKeys, *, token: str, lease_ms: int, lapsed_ttl_ms: int) -> None: ...


@script("workers/lease_read")
def lease_read(keys: WorkerKeys) -> None: ...


def lease_left_s(incarnation: str, prefix: str, retry: RetrySettings) -> Operation[float | None]:
    """How long the lease of an incarnation lasts: 0 if lapsed, None if it never existed."""
    reply = yield from call_script(lease_read.call(WorkerKeys(incarnation, prefix)), retry)
    return int(reply[1]) / 1000 if reply[0] == Code.DONE else None


def lapsed_for_s(incarnation: str, prefix: str, retry: RetrySettings) -> Operation[float]:
    """How long ago the lease of an incarnation has lapsed; infinite if it never existed."""
    reply = yield from call_script(lease_read.call(WorkerKeys(incarnation, prefix)), retry)
    return int(reply[2]) / 1000 if reply[0] == Code.DONE else math.inf


class LeaseCore:
    """The one lease of one incarnation of a worker on one Redis.

    A worker that uses several Redis servers has one lease on each, under the same incarnation.
    Losing one ends what is owned on that server, and nothing else.

    A lapsed lease stays lapsed: other workers may take over what the incarnation owned, and the
    worker needs a new incarnation. A worker that saw the lease lapsed can rely on it.
    """

    def __init__(
        self,
        incarnation: str,
        settings: LeaseSettings,
        prefix: str = "capsule",
    ) -> None:
        self.incarnation = incarnation
        self.token = ""
        self.lease_s = settings.lease_s
        self._settings = settings
        self._retry = RetrySettings()
        self._prefix = prefix
        self._keys = WorkerKeys(incarnation, prefix)
        self._lapsed_ttl_ms = int(settings.lapsed_ttl_s * 1000)

    def acquire(self, *, operation_id: str | None = None) -> Operation[None]:
        """Start the lease; does nothing if this object has it and it has not lapsed.

        Raises LeaseTaken if another worker has the lease of this incarnation, and LeaseLost if it
        has lapsed.
        """
        lease_ms = int(self._settings.lease_s * 1000)
        name = named("lease_acquire", operation_id)
        call = lease_acquire.call(
            self._keys, operation_id=name, lease_ms=lease_ms, lapsed_ttl_ms=self._lapsed_ttl_ms
        )
        reply = yield from call_script(call, self._retry)
        if reply[0] == Code.DONE:
            self.token = reply[1].decode()
        elif reply[0] != Code.HELD or not (yield from self.remaining_s()):
            raise LeaseLost(self.incarnation)
        elif self.token != reply[1].decode():
            raise LeaseTaken(self.incarnation)

    def renew(self) -> Operation[None]:
        """Renew the lease for its full time; raises LeaseLost if it has lapsed."""
        if not (yield from self._extend(int(self._settings.lease_s * 1000))):
            raise LeaseLost(self.incarnation)

    def release(self) -> Operation[None]:
        """End the lease, so that others need not wait; does nothing if it has lapsed."""
        yield from self._extend(0)

    def remaining_s(self) -> Operation[float]:
        """How long the lease lasts; 0 once it has lapsed, and before it starts."""
        left_s = yield from lease_left_s(self.incarnation, self._prefix, self._retry)
        return left_s or 0.0

    def _extend(self, lease_ms: int) -> Operation[bool]:
        call = lease_renew.call(
            self._keys, token=self.token, lease_ms=lease_ms, lapsed_ttl_ms=self._lapsed_ttl_ms
        )
        reply = yield from call_script(call, self._retry)
        return bool(reply[0] == Code.DONE)
