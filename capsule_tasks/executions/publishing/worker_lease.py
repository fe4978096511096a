"""The lease of a worker, and the executions that Redis knows to be held under it.

When the lease is lost (the process was stopped for too long, say), other workers may take over the
executions, and Redis refuses whatever this worker still writes about them. The worker then acquires
a new lease, under a new incarnation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Container, Sequence
from typing import Any, Protocol

from capsule_tasks.errors import LeaseLost, StorageError
from capsule_tasks.executions.background import RETRY_DELAY_S, BackgroundTasks
from capsule_tasks.settings import LeaseSettings
from capsule_tasks.storage.connections.pipelined import PipelinedConnection
from capsule_tasks.storage.executions.holds import Due
from capsule_tasks.storage.executions.store import HoldStore
from capsule_tasks.storage.runs.store import Lease

log = logging.getLogger("capsule_tasks.taskpool")

_LOOK = 2
"""Lease times without a renewal until other workers look at what a worker held. After an outage of
Redis each worker has the time to claim its running executions anew before that."""


class Held(Protocol):
    """An execution that is held under the lease."""

    execution_id: str
    is_held: bool

    def on_held(self, incarnation: str) -> None: ...


class WorkerLease:
    """Renews the lease, and notes executions as held before they are claimed."""

    def __init__(
        self,
        connection: PipelinedConnection,
        holdings: HoldStore,
        settings: LeaseSettings,
        background: BackgroundTasks,
        present: Container[str],
        *,
        prefix: str,
    ) -> None:
        """An execution that was released stays held if it is `present` again."""
        self.incarnation = ""
        """The owner in whose name executions are claimed now."""
        self.is_held = asyncio.Event()
        self._connection = connection
        self._holdings = holdings
        self._settings = settings
        self._background = background
        self._present = present
        self._prefix = prefix
        self._lease: Lease | None = None
        self._renew_now = asyncio.Event()
        """Redis refused something as if the lease were lost: renew at once to find out."""
        self._certain_until = 0.0
        """The lease lasts at least until then, by the clock of this process."""
        self._released: list[str] = []

    async def run(
        self,
        on_begin: Callable[[str], Awaitable[object]],
        on_held: Callable[[str], object],
        on_renewed: Callable[[str], object],
        on_due: Callable[[str], object],
    ) -> None:
        """Hold a lease for ever.

        `on_begin` is awaited before anything is claimed under an incarnation, `on_held` called when
        that may begin, `on_renewed` after each renewal, and `on_due` with each worker that is to be
        looked at.
        """
        while True:
            try:
                incarnation = await self._begin(on_begin)
                on_held(incarnation)
                await self._renew_until_lost(incarnation, on_renewed, on_due)
            except LeaseLost as lost:
                log.warning("%s; what it held may have been taken over", lost)
            except StorageError as error:
                self._background.warn_unavailable(error)
                await asyncio.sleep(RETRY_DELAY_S)
            self.is_held.clear()

    async def end(self) -> None:
        """Release the lease: other workers may take over what is still held."""
        if self._lease is not None:
            await self._lease.release()

    async def _begin(self, on_begin: Callable[[str], Awaitable[object]]) -> str:
        incarnation = os.urandom(8).hex()
        lease = Lease(incarnation, self._connection, settings=self._settings, prefix=self._prefix)
        await self._register(incarnation)
        sent_at = asyncio.get_running_loop().time()
        await lease.acquire()
        await on_begin(incarnation)
        self.incarnation, self._lease = incarnation, lease
        self._certain_until = sent_at + self._settings.lease_s
        self.is_held.set()
        return incarnation

    async def _renew_until_lost(
        self,
        incarnation: str,
        on_renewed: Callable[[str], object],
        on_due: Callable[[str], object],
    ) -> None:
        """Renew the lease until it is lost."""
        while True:
            wait_s = self._settings.lease_s / 3
            self._renew_now.clear()
            if (due := await self._renew(incarnation)) is not None:
                on_renewed(incarnation)
                for worker in due.workers:
                    if worker != incarnation:
                        on_due(worker)
                if due.next_s is not None:
                    wait_s = min(wait_s, due.next_s + 0.01)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(wait_s, 0.02)):
                    await self._renew_now.wait()

    async def _renew(self, incarnation: str) -> Due | None:
        sent_at = asyncio.get_running_loop().time()
        try:
            await self._owned().renew()
            self._certain_until = sent_at + self._settings.lease_s
            self.is_held.set()  # what was refused as if it were lost was refused wrongly
            return await self._register(incarnation)
        except StorageError as error:
            self._background.warn_unavailable(error)
            return None

    async def _register(self, incarnation: str) -> Due:
        return await self._holdings.note_worker(incarnation, _LOOK * self._settings.lease_s)

    def _owned(self) -> Lease:
        assert self._lease is not None, "nothing is held before the first lease"
        return self._lease

    # --- what is held --------------------------------------------------------------------------

    def hold_soon(self, batch: Sequence[Held]) -> None:
        """Note executions that are about to be claimed, so that a reaper finds them.

        Only where calls keep their order: the note is sent before the claims, and done before them.
        """
        core, incarnation = self._holdings.core, self.incarnation
        released, gone = self._take_released()

        def on_reply(reply: list[Any] | StorageError) -> None:
            if isinstance(reply, StorageError) or not core.is_held(reply):
                self._released += released
                if not isinstance(reply, StorageError):
                    self._is_refused(incarnation)
                self._background.spawn(self.hold_until_recorded(batch))
            else:
                _confirm(batch, incarnation)

        call = core.hold_call(incarnation, self._owned().core.token, _ids(batch), gone)
        self._connection.cast(call, on_reply, may_batch=True)

    async def hold_until_recorded(self, batch: Sequence[Held]) -> bool:
        """Note executions, however long it takes; False if the lease is lost meanwhile."""
        incarnation = self.incarnation
        while incarnation == self.incarnation:
            if await self.hold(batch):
                return True
            await self.is_held.wait()
        return False

    async def hold(self, batch: Sequence[Held]) -> bool:
        """Note executions that are about to be claimed; False, after a pause, if that failed."""
        incarnation = self.incarnation
        try:
            await self._hold(_ids(batch))
        except LeaseLost:
            self._is_refused(incarnation)
        except StorageError as error:
            self._background.warn_unavailable(error)
            await asyncio.sleep(RETRY_DELAY_S)
        else:
            _confirm(batch, incarnation)
            return True
        return False

    def is_certain(self, incarnation: str) -> bool:
        """Whether the lease lasts for certain; in doubt it is renewed at once."""
        if incarnation != self.incarnation or not self.is_held.is_set():
            return False
        if asyncio.get_running_loop().time() < self._certain_until:
            return True
        self._renew_now.set()
        return False

    def _is_refused(self, incarnation: str) -> None:
        """Claim nothing more until a renewal has told whether the lease is lost."""
        if incarnation == self.incarnation:  # else it was an older one
            self.is_held.clear()
            self._renew_now.set()

    def release(self, execution_id: str) -> None:
        """The execution is over here; the next note, or `flush_released`, says so."""
        self._released.append(execution_id)

    async def flush_released(self) -> None:
        """Tell Redis what is held no longer."""
        if self._released and self._lease is not None:
            await self._hold(())

    async def _hold(self, ids: Sequence[str]) -> None:
        released, gone = self._take_released()
        try:
            token = self._owned().core.token
            await self._holdings.hold(self.incarnation, token, ids, gone)
        except StorageError:
            self._released += released
            raise

    def _take_released(self) -> tuple[list[str], list[str]]:
        """The executions that were released, and those of them that did not come again."""
        released, self._released = self._released, []
        return released, [one for one in released if one not in self._present]


def _ids(batch: Sequence[Held]) -> list[str]:
    """The ids; the executions count as held from now on, however long the note takes."""
    for one in batch:
        one.is_held = True
    return [one.execution_id for one in batch]


def _confirm(batch: Sequence[Held], incarnation: str) -> None:
    for one in batch:
        one.on_held(incarnation)
