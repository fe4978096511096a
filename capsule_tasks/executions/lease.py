"""The lease of a worker, and what is noted as held under it.

When the lease is lost (the process was stopped for too long), what was held may be taken by others,
and whatever is still said of that is refused; from then on the worker works under a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Container, Sequence
from typing import Any, Protocol

from capsule_tasks.errors import LeaseLost, StorageError
from capsule_tasks.executions.background import AGAIN_S, Background
from capsule_tasks.settings import LeaseSettings
from capsule_tasks.storage.connections.pipelined import PipelinedConnection
from capsule_tasks.storage.executions import Holdings
from capsule_tasks.storage.held_core import Due
from capsule_tasks.storage.runs import Lease

log = logging.getLogger("capsule_tasks.taskpool")

_LOOK = 2
"""After so many leases without a word others look whether a worker's has lapsed: when Redis was
away for all, each has the time to take anew what it runs."""


class Held(Protocol):
    """What is held under the lease."""

    execution_id: str
    is_held: bool

    def on_held(self, incarnation: str) -> None: ...


class WorkerLease:
    """Keeps one incarnation after another alive; whoever claims is noted before."""

    def __init__(
        self,
        connection: PipelinedConnection,
        holdings: Holdings,
        settings: LeaseSettings,
        background: Background,
        present: Container[str],
        *,
        prefix: str,
    ) -> None:
        """Of what was released, that is kept which is `present` again."""
        self.incarnation = ""
        """Under which what begins now is claimed."""
        self.is_held = asyncio.Event()
        self._connection = connection
        self._holdings = holdings
        self._settings = settings
        self._background = background
        self._present = present
        self._prefix = prefix
        self._lease: Lease | None = None
        self._doubt = asyncio.Event()
        """Something was refused as if the lease were lost: a renewal will tell."""
        self._sure_until = 0.0
        """Its lease lasts until then, at least, by our own clock."""
        self._released: list[str] = []

    async def keep(
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
                await self._go_on(incarnation, on_renewed, on_due)
            except LeaseLost as lost:
                log.warning("%s; what it held may have been taken over", lost)
            except StorageError as error:
                self._background.say_unavailable(error)
                await asyncio.sleep(AGAIN_S)
            self.is_held.clear()

    async def end(self) -> None:
        """Others may see to what is still held."""
        if self._lease is not None:
            await self._lease.release()

    async def _begin(self, on_begin: Callable[[str], Awaitable[object]]) -> str:
        incarnation = os.urandom(8).hex()
        lease = Lease(incarnation, self._connection, settings=self._settings, prefix=self._prefix)
        await self._note_alive(incarnation)
        sent_at = asyncio.get_running_loop().time()
        await lease.acquire()
        await on_begin(incarnation)
        self.incarnation, self._lease = incarnation, lease
        self._sure_until = sent_at + self._settings.lease_s
        self.is_held.set()
        return incarnation

    async def _go_on(
        self,
        incarnation: str,
        on_renewed: Callable[[str], object],
        on_due: Callable[[str], object],
    ) -> None:
        """Renew it, until it is lost."""
        while True:
            wait_s = self._settings.lease_s / 3
            self._doubt.clear()
            if (due := await self._renew(incarnation)) is not None:
                on_renewed(incarnation)
                for worker in due.workers:
                    if worker != incarnation:
                        on_due(worker)
                if due.next_s is not None:
                    wait_s = min(wait_s, due.next_s + 0.01)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(wait_s, 0.02)):
                    await self._doubt.wait()

    async def _renew(self, incarnation: str) -> Due | None:
        sent_at = asyncio.get_running_loop().time()
        try:
            await self._owned().renew()
            self._sure_until = sent_at + self._settings.lease_s
            self.is_held.set()  # what was refused as if it were lost was refused wrongly
            return await self._note_alive(incarnation)
        except StorageError as error:
            self._background.say_unavailable(error)
            return None

    async def _note_alive(self, incarnation: str) -> Due:
        return await self._holdings.note_worker(incarnation, _LOOK * self._settings.lease_s)

    def _owned(self) -> Lease:
        assert self._lease is not None, "nothing is held before the first lease"
        return self._lease

    # --- what is held --------------------------------------------------------------------------

    def hold_soon(self, batch: Sequence[Held]) -> None:
        """Note what is about to be claimed: whoever claims and dies is found by the reaper.

        Where calls keep their order; it is sent before the claims, and so it is there before them.
        """
        core, incarnation = self._holdings.core, self.incarnation
        released, gone = self._take_released()

        def on_reply(reply: list[Any] | StorageError) -> None:
            if isinstance(reply, StorageError) or not core.is_held(reply):
                self._released += released
                if not isinstance(reply, StorageError):
                    self._is_refused(incarnation)
                self._background.spawn(self.hold_for_sure(batch))
            else:
                _confirm(batch, incarnation)

        call = core.hold_call(incarnation, self._owned().core.token, _ids(batch), gone)
        self._connection.cast(call, on_reply, is_patient=True)

    async def hold_for_sure(self, batch: Sequence[Held]) -> bool:
        """Until it is noted; False if the lease is lost: it is noted anew under the next."""
        incarnation = self.incarnation
        while incarnation == self.incarnation:
            if await self.hold(batch):
                return True
            await self.is_held.wait()
        return False

    async def hold(self, batch: Sequence[Held]) -> bool:
        """Note what is about to be claimed; False if it could not be, after a while."""
        incarnation = self.incarnation
        try:
            await self._hold(_ids(batch))
        except LeaseLost:
            self._is_refused(incarnation)
        except StorageError as error:
            self._background.say_unavailable(error)
            await asyncio.sleep(AGAIN_S)
        else:
            _confirm(batch, incarnation)
            return True
        return False

    def is_sure(self, incarnation: str) -> bool:
        """Whether that lease lasts still; in doubt a renewal finds out at once."""
        if incarnation != self.incarnation or not self.is_held.is_set():
            return False
        if asyncio.get_running_loop().time() < self._sure_until:
            return True
        self._doubt.set()
        return False

    def _is_refused(self, incarnation: str) -> None:
        """Nothing is claimed until a renewal has told whether that lease is lost."""
        if incarnation == self.incarnation:  # else it was an older one
            self.is_held.clear()
            self._doubt.set()

    def release(self, execution_id: str) -> None:
        """It is over here: `give_back` says so, or whatever is noted before."""
        self._released.append(execution_id)

    async def give_back(self) -> None:
        """Note what is no longer held; what was under a lease that is lost is the reaper's."""
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
        """What was released, and what of it is still gone."""
        released, self._released = self._released, []
        return released, [one for one in released if one not in self._present]


def _ids(batch: Sequence[Held]) -> list[str]:
    """Of what is held from now on, however long it takes to be noted."""
    for one in batch:
        one.is_held = True
    return [one.execution_id for one in batch]


def _confirm(batch: Sequence[Held], incarnation: str) -> None:
    for one in batch:
        one.on_held(incarnation)
