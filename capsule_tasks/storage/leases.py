"""Leases of workers: who holds runs, sessions and executions, and until when."""

from __future__ import annotations

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
    """How long the lease of an incarnation lasts: 0 if it has lapsed, None if it never was."""
    reply = yield from call_script(lease_read.call(WorkerKeys(incarnation, prefix)), retry)
    return int(reply[1]) / 1000 if reply[0] == Code.DONE else None


class LeaseCore:
    """The one lease of one incarnation of a worker on one Redis.

    A worker that guards something on several has one lease on each, under the same incarnation;
    losing one ends what that Redis guards, and nothing else.

    Once it has lapsed it stays lapsed, whoever looks: what it held may be taken, and the worker
    needs a new incarnation. So a thief who saw it lapsed cannot be wrong a moment later.
    """

    def __init__(
        self,
        incarnation: str,
        settings: LeaseSettings,
        prefix: str = "capsule",
        retry: RetrySettings | None = None,
    ) -> None:
        self.incarnation = incarnation
        self.token = ""
        self._settings = settings
        self._retry = retry or RetrySettings()
        self._prefix = prefix
        self._keys = WorkerKeys(incarnation, prefix)
        self._lapsed_ttl_ms = int(settings.lapsed_ttl_s * 1000)

    def acquire(self, *, operation_id: str | None = None) -> Operation[None]:
        """Begin the lease; nothing is done to one that this object has and that has not lapsed.

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
        """Make it last from now on; raises LeaseLost if it has lapsed."""
        if not (yield from self._extend(int(self._settings.lease_s * 1000))):
            raise LeaseLost(self.incarnation)

    def release(self) -> Operation[None]:
        """End it, so that others need not wait; nothing is done to one that has lapsed."""
        yield from self._extend(0)

    def remaining_s(self) -> Operation[float]:
        """How long it lasts; 0 once it has lapsed, and before it begins."""
        left_s = yield from lease_left_s(self.incarnation, self._prefix, self._retry)
        return left_s or 0.0

    def _extend(self, lease_ms: int) -> Operation[bool]:
        call = lease_renew.call(
            self._keys, token=self.token, lease_ms=lease_ms, lapsed_ttl_ms=self._lapsed_ttl_ms
        )
        reply = yield from call_script(call, self._retry)
        return bool(reply[0] == Code.DONE)
