"""Which executions workers hold, and which workers are due for a check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from capsule_tasks.errors import LeaseLost
from capsule_tasks.settings import ExecutionSettings
from capsule_tasks.storage.drivers import drive
from capsule_tasks.storage.facades import AsyncFacade, AsyncTarget
from capsule_tasks.storage.keys import WorkerKeys, worker_index
from capsule_tasks.storage.leases import lease_left_s
from capsule_tasks.storage.operations import Reply, call_script
from capsule_tasks.storage.scripts import Call, Code, script

MAX_DUE = 100


@script("workers/hold")
def worker_hold(
    keys: WorkerKeys,
    *,
    token: str,
    ttl_ms: int,
    count: int,
    ids: Sequence[str],
) -> None: ...


@script("workers/held")
def worker_held(keys: WorkerKeys, *, count: int, ids: Sequence[str]) -> None: ...


@script("workers/register")
def worker_register(
    workers: str,
    *,
    worker: str,
    lease_ms: int,
    ttl_ms: int,
    max_due: int,
    incarnations: Sequence[str],
) -> None: ...


@dataclass(frozen=True, slots=True)
class Due:
    """Workers to check now, and the seconds until the next is due; None if there is none."""

    workers: tuple[str, ...]
    next_s: float | None


class HoldStore(AsyncFacade):
    """The executions that each incarnation of a worker holds."""

    def __init__(self, redis: AsyncTarget, settings: ExecutionSettings) -> None:
        super().__init__(redis)
        self._prefix = settings.prefix
        self._retry = settings.retry
        self.ttl_s = settings.hold_ttl_s
        self._ttl_ms = int(settings.hold_ttl_s * 1000)

    async def hold(
        self, incarnation: str, token: str, held: Sequence[str], released: Sequence[str]
    ) -> None:
        """Record executions before they are claimed, and drop others. Raises LeaseLost."""
        call = self.hold_call(incarnation, token, held, released)
        reply = await drive(call_script(call, self._retry), self.store)
        if not self.is_held(reply):
            raise LeaseLost(incarnation)

    def hold_call(
        self, incarnation: str, token: str, held: Sequence[str], released: Sequence[str]
    ) -> Call:
        return worker_hold.call(
            WorkerKeys(incarnation, self._prefix),
            token=token,
            ttl_ms=self._ttl_ms,
            count=len(held),
            ids=[*held, *released],
        )

    @staticmethod
    def is_held(reply: Reply) -> bool:
        return bool(reply[0] == Code.DONE)

    async def held_by(
        self, incarnation: str, done: Sequence[str] = (), count: int = 500
    ) -> list[str] | None:
        """Executions that it held, without those that are done; None while its lease lasts."""
        call = worker_held.call(WorkerKeys(incarnation, self._prefix), count=count, ids=done)
        reply = await drive(call_script(call, self._retry), self.store)
        if reply[0] != Code.DONE:
            return None
        return [value.decode() for value in reply[1:]]

    async def lease_left_s(self, incarnation: str) -> float | None:
        """How long the lease of an incarnation lasts: 0 if lapsed, None if it never existed."""
        return await drive(lease_left_s(incarnation, self._prefix, self._retry), self.store)

    async def register_worker(
        self, incarnation: str, lease_s: float, forget: Sequence[str] = ()
    ) -> Due:
        """Register a worker, forget workers that hold nothing any more; workers that are due."""
        call = worker_register.call(
            worker_index(self._prefix),
            worker=incarnation,
            lease_ms=int(lease_s * 1000),
            ttl_ms=self._ttl_ms,
            max_due=MAX_DUE,
            incarnations=forget,
        )
        reply = await drive(call_script(call, self._retry), self.store)
        next_ms = int(reply[1])
        due = tuple(value.decode() for value in reply[2:])
        return Due(due, next_ms / 1000 if next_ms >= 0 else None)
