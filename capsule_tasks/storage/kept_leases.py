"""A lease that is renewed as long as a block of code runs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from capsule_tasks.errors import LeaseLost, StorageError

if TYPE_CHECKING:
    from capsule_tasks.storage.runs.store import Lease, SyncLease


class Renewals:
    """When to renew a lease, and whether it may have lapsed while Redis was away."""

    def __init__(self, lease_s: float, sent_at: float) -> None:
        self._lease_s = lease_s
        self.wait_s = 0.0
        self.until = sent_at + lease_s
        """The lease lasts at least until then, by the clock of this process."""

    def on_renewed(self, sent_at: float) -> None:
        self.until = sent_at + self._lease_s
        self.wait_s = self._lease_s / 3

    def on_fault(self) -> None:
        self.wait_s = min(1.0, self._lease_s / 10)

    def limit_s(self, now: float) -> float:
        """How long a renewal may take. After a pause it is tried even so: Redis knows best."""
        return max(self.until - now, self._lease_s / 3)


@asynccontextmanager
async def kept(lease: Lease) -> AsyncIterator[asyncio.Event]:
    loop = asyncio.get_running_loop()
    renewals = Renewals(lease.core.lease_s, loop.time())
    await lease.acquire()
    lost = asyncio.Event()

    async def renew() -> None:
        while True:
            await asyncio.sleep(renewals.wait_s)
            sent_at = loop.time()
            try:
                async with asyncio.timeout(renewals.limit_s(sent_at)):
                    await lease.renew()
            except LeaseLost:
                break
            except (StorageError, TimeoutError):
                renewals.on_fault()
                if loop.time() >= renewals.until:
                    break
            else:
                renewals.on_renewed(sent_at)
        lost.set()

    renewing = asyncio.create_task(renew())
    try:
        yield lost
    finally:
        renewing.cancel()
        await asyncio.wait({renewing})
        with contextlib.suppress(StorageError):
            await lease.release()


@contextmanager
def kept_blocking(lease: SyncLease) -> Iterator[threading.Event]:
    renewals = Renewals(lease.core.lease_s, time.monotonic())
    lease.acquire()
    lost, stop = threading.Event(), threading.Event()

    def renew() -> None:
        while not stop.wait(renewals.wait_s):
            sent_at = time.monotonic()
            try:
                lease.renew()
            except LeaseLost:
                lost.set()
                return
            except StorageError:
                renewals.on_fault()
                if time.monotonic() >= renewals.until:
                    lost.set()
                    return
            else:
                renewals.on_renewed(sent_at)

    renewing = threading.Thread(target=renew, name=f"lease {lease.core.incarnation}", daemon=True)
    renewing.start()
    try:
        yield lost
    finally:
        stop.set()
        renewing.join()
        with contextlib.suppress(StorageError):
            lease.release()
