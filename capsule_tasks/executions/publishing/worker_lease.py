"""The lease of a worker, and what Redis knows to be held under it: executions, named sessions.

When the lease is lost (the process was stopped for too long, say), other workers may take over the
executions, and Redis refuses whatever this worker still writes about them. The worker then acquires
a new lease, under a new incarnation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from capsule_tasks.errors import LeaseLost, StorageError
from capsule_tasks.executions.background import RETRY_DELAY_S, BackgroundTasks
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.settings import LeaseSettings
from capsule_tasks.storage.connections.pipelined import PipelinedConnection
from capsule_tasks.storage.executions.holds import Due, HoldStore
from capsule_tasks.storage.runs.store import Lease
from capsule_tasks.storage.sessions.store import NamedSessionStore

if TYPE_CHECKING:
    from capsule_tasks.executions.publishing.claimer import Claimer
    from capsule_tasks.executions.publishing.stream_writer import StreamWriter

log = logging.getLogger("capsule_tasks.taskpool")

_LAPSED_AFTER = 2
"""Lease times without a renewal after which other workers reap what a worker held. After an outage
of Redis each worker has the time to claim its running executions again before that."""


@dataclass(eq=False)
class WorkerLease:
    """Renews the lease, and records executions as held before they are claimed."""

    connection: PipelinedConnection
    hold_store: HoldStore
    sessions: NamedSessionStore
    settings: LeaseSettings
    background: BackgroundTasks
    present: Container[str]
    """The executions in this worker; one that was released and is back stays held."""
    prefix: str
    incarnation: str = ""
    """The owner in whose name executions are claimed now."""
    is_held: asyncio.Event = field(default_factory=asyncio.Event)
    _lease: Lease | None = None
    _renew_now: asyncio.Event = field(default_factory=asyncio.Event)
    """Redis refused something as if the lease were lost: renew now to find out."""
    _renew_holds_at: float = 0.0
    _certain_until: float = 0.0
    """The lease lasts at least until then, by the clock of this process."""
    _released: list[str] = field(default_factory=list)

    async def run(self, claimer: Claimer) -> None:
        """Hold a lease, and acquire another whenever it is lost; until cancelled."""
        while True:
            try:
                incarnation = await self._acquire(claimer)
                claimer.lease_started(incarnation)
                await self._renew_until_lost(incarnation, claimer)
            except LeaseLost as lost:
                log.warning(
                    "the worker's lease was lost; other workers may have taken its executions: %s",
                    lost,
                )
            except StorageError as error:
                self.background.warn_unavailable(error)
                await asyncio.sleep(RETRY_DELAY_S)
            self.is_held.clear()

    async def end(self) -> None:
        """Release the lease: other workers may take over what is still held."""
        if self._lease is not None:
            await self._lease.release()

    async def _acquire(self, claimer: Claimer) -> str:
        incarnation = os.urandom(8).hex()
        lease = Lease(incarnation, self.connection, settings=self.settings, prefix=self.prefix)
        await self._register(incarnation)
        sent_at = asyncio.get_running_loop().time()
        await lease.acquire()
        await claimer.prepare(incarnation)
        self.incarnation, self._lease = incarnation, lease
        self._certain_until = sent_at + self.settings.lease_s
        self._renew_holds_at = sent_at + self._holds_last_s / 2
        self.is_held.set()
        return incarnation

    async def _renew_until_lost(self, incarnation: str, claimer: Claimer) -> None:
        while True:
            wait_s = self.settings.lease_s / 3
            self._renew_now.clear()
            if (due := await self._renew(incarnation)) is not None:
                claimer.lease_renewed(incarnation)
                for worker in due.workers:
                    if worker != incarnation:
                        claimer.worker_lapsed(worker)
                if due.next_s is not None:
                    wait_s = min(wait_s, due.next_s + 0.01)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(wait_s, 0.02)):
                    await self._renew_now.wait()

    async def _renew(self, incarnation: str) -> Due | None:
        sent_at = asyncio.get_running_loop().time()
        try:
            await self._owned().renew()
            self._certain_until = sent_at + self.settings.lease_s
            self.is_held.set()  # what was refused as if the lease were lost was refused wrongly
            if sent_at >= self._renew_holds_at:
                await self._renew_holds(incarnation)
                self._renew_holds_at = sent_at + self._holds_last_s / 2
            return await self._register(incarnation)
        except StorageError as error:
            self.background.warn_unavailable(error)
            return None

    @property
    def _holds_last_s(self) -> float:
        """How long Redis keeps the records of what is held, from their last change or renewal."""
        return min(self.hold_store.ttl_s, self.sessions.settings.hold_ttl_s)

    async def _renew_holds(self, incarnation: str) -> None:
        """Have Redis keep what this worker has held for long and changes nothing of."""
        await self.hold_store.hold(incarnation, self._owned().core.token, (), ())
        await self.sessions.hold(incarnation, self._owned().core.token, ())

    async def _register(self, incarnation: str) -> Due:
        return await self.hold_store.register_worker(
            incarnation, _LAPSED_AFTER * self.settings.lease_s
        )

    def _owned(self) -> Lease:
        assert self._lease is not None, "nothing is held before the first lease"
        return self._lease

    @property
    def token(self) -> str:
        """The proof of the present lease; empty before the first."""
        return self._lease.core.token if self._lease is not None else ""

    def is_certain(self, incarnation: str) -> bool:
        """Whether the lease lasts for certain; in doubt it is renewed now."""
        if incarnation != self.incarnation or not self.is_held.is_set():
            return False
        if asyncio.get_running_loop().time() < self._certain_until:
            return True
        self._renew_now.set()
        return False

    # --- holds ---------------------------------------------------------------------------------

    def hold_soon(self, batch: Sequence[StreamWriter]) -> None:
        """Record executions that are about to be claimed, so that a reaper finds them.

        Only where calls keep their order: the record is sent, and so written, before the claims.
        """
        store, incarnation = self.hold_store, self.incarnation
        released, gone = self._take_released()

        def on_reply(reply: list[Any] | StorageError) -> None:
            if isinstance(reply, StorageError) or not store.is_held(reply):
                self._released += released
                if not isinstance(reply, StorageError):
                    self._on_refused(incarnation)
                self.background.spawn(self.hold_until_recorded(batch))
            else:
                _confirm(batch, incarnation)

        call = store.hold_call(incarnation, self._owned().core.token, _ids(batch), gone)
        self.connection.send_nowait(call, on_reply, may_batch=True)

    async def hold_until_recorded(self, batch: Sequence[StreamWriter]) -> bool:
        """Record executions, however long it takes; False if the lease is lost meanwhile."""
        incarnation = self.incarnation
        while incarnation == self.incarnation:
            if await self.hold(batch):
                return True
            await self.is_held.wait()
        return False

    async def hold(self, batch: Sequence[StreamWriter]) -> bool:
        """Record executions that are about to be claimed; False, after a pause, if that failed."""
        incarnation = self.incarnation
        try:
            await self._hold(_ids(batch))
        except LeaseLost:
            self._on_refused(incarnation)
        except StorageError as error:
            self.background.warn_unavailable(error)
            await asyncio.sleep(RETRY_DELAY_S)
        else:
            _confirm(batch, incarnation)
            return True
        return False

    def _on_refused(self, incarnation: str) -> None:
        """Claim nothing more until a renewal has shown whether the lease is lost."""
        if incarnation == self.incarnation:  # else the refusal concerns an older lease
            self.is_held.clear()
            self._renew_now.set()

    def release(self, execution_id: str) -> None:
        """The execution is over here; the next record, or `flush_released`, tells Redis."""
        self._released.append(execution_id)

    async def flush_released(self) -> None:
        if self._released and self._lease is not None:
            await self._hold(())

    async def _hold(self, ids: Sequence[str]) -> None:
        released, gone = self._take_released()
        try:
            await self.hold_store.hold(self.incarnation, self._owned().core.token, ids, gone)
        except StorageError:
            self._released += released
            raise

    def _take_released(self) -> tuple[list[str], list[str]]:
        """The executions that were released, and those of them that are not back."""
        released, self._released = self._released, []
        return released, [name for name in released if name not in self.present]


def _ids(batch: Sequence[StreamWriter]) -> list[str]:
    """The ids; the executions count as held from now on, however long the record takes."""
    for held in batch:
        held.is_held = True
    return [held.execution_id for held in batch]


def _confirm(batch: Sequence[StreamWriter], incarnation: str) -> None:
    for held in batch:
        held.feed(Lifecycle.on_hold_recorded, incarnation)
