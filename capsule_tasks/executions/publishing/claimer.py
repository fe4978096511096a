"""Claims executions under the worker's lease, and listens to its doorbells."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from capsule_tasks.errors import StorageError, StorageUnavailable
from capsule_tasks.executions.background import Delay
from capsule_tasks.executions.execution import Execution
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.publishing.reaper import Reaper
from capsule_tasks.storage.connections.doorbells import Doorbells

if TYPE_CHECKING:
    from capsule_tasks.executions.publishing.publisher import Publisher
    from capsule_tasks.executions.publishing.stream_writer import StreamWriter

log = logging.getLogger("capsule_tasks.taskpool")

_CLAIM_DUE_S = 0.01
"""How long a new task runs before it is claimed, if it publishes nothing and does not end."""
_BATCH_SIZE = 500
"""Executions that are recorded as held in one call."""
_MAX_RUNG = 10_000
_PREVIOUS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Pauses between reads of the previous attempt's state."""
_MAX_PREVIOUS_S = 5.0
"""How long a claim waits at most until this worker has released the previous attempt."""
_MAX_UNKNOWN_S = 0.05
"""How long the previous attempt may be without its first event."""


class LeaseFollower(Protocol):
    """Owns something else under the lease of the worker."""

    def lease_started(self, incarnation: str) -> None:
        """From now on the worker has this lease."""


class Claimer:
    """Listens to the lease of a publisher: everything runs on the loop."""

    def __init__(self, publisher: Publisher, doorbells: Doorbells, reaper: Reaper) -> None:
        self.due = Delay[Execution](_CLAIM_DUE_S, self._on_due)
        """New executions that run and are not claimed."""
        self._publisher = publisher
        self._doorbells = doorbells
        self._reaper = reaper
        self._keeps_order = publisher.connection.preserves_order
        self._to_claim: asyncio.Queue[StreamWriter] = asyncio.Queue()
        self.awaiting_renewal: dict[Execution, str] = {}
        """Executions whose owner's lease is in doubt, with that owner."""
        self.rung: dict[str, None] = {}
        """Executions that were sent a command, and have not come yet."""
        self.followers: list[LeaseFollower] = []
        self._subscribed: set[str] = set()
        """Owners whose doorbells are subscribed to."""

    def _on_due(self, due: list[Execution]) -> None:
        """Record in one call that all of them are held, before they are claimed."""
        writers = [
            execution.stream
            for execution in due
            if execution.stream is not None and not execution.life.is_over
        ]
        if unheld := [writer for writer in writers if writer.is_unclaimed and not writer.is_held]:
            self._publisher.lease.hold_soon(unheld)
        for writer in writers:
            writer.feed(Lifecycle.on_claim_due)

    def call_once_held(self, writer: StreamWriter, claim: Callable[[], object]) -> None:
        """Make a claim as soon as there is a lease, and the execution is recorded as held."""
        if self._keeps_order and self._publisher.lease.is_held.is_set():
            claim()  # which records it
        else:
            self._publisher.background.spawn(self._call_once_held(writer, claim))

    async def _call_once_held(self, writer: StreamWriter, claim: Callable[[], object]) -> None:
        lease = self._publisher.lease
        await lease.is_held.wait()
        while not await lease.hold([writer]):
            await lease.is_held.wait()
        if writer.execution.stream is writer:
            claim()

    # --- claims before the start ---------------------------------------------------------------

    def claim_first(self, writer: StreamWriter) -> None:
        """Claim the execution together with others, once all are recorded as held."""
        if writer.previous_released is not None:
            self.call_after_previous(writer, partial(self.claim_first, writer))
            return
        self._to_claim.put_nowait(writer)

    async def run(self) -> None:
        """Claim what has to be claimed before it starts; until cancelled."""
        lease, spawn = self._publisher.lease, self._publisher.background.spawn
        while True:
            writers = [await self._to_claim.get()]
            await lease.is_held.wait()
            while len(writers) < _BATCH_SIZE and not self._to_claim.empty():
                writers.append(self._to_claim.get_nowait())
            if self._keeps_order:  # the record is sent before the claims
                spawn(lease.hold_until_recorded(writers))
            else:
                while not await lease.hold(writers):
                    await lease.is_held.wait()
            for writer in writers:
                spawn(writer.claim_first())

    def call_after_previous(self, writer: StreamWriter, claim: Callable[[], object]) -> None:
        """Make a claim once this worker has released the previous attempt of the execution.

        A task that retries or replaces itself sends the next message before its own end. So the
        next attempt can be here, and even be over, while the previous one still has events to
        store. A claim that came first would end the previous attempt as lost.
        """
        self._publisher.background.spawn(self._call_after_previous(writer, claim))

    async def _call_after_previous(self, writer: StreamWriter, claim: Callable[[], object]) -> None:
        assert writer.previous_released is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MAX_PREVIOUS_S):
                await writer.previous_released.wait()
        writer.previous_released = None
        if writer.execution.stream is writer:
            claim()

    def await_previous_end(self, writer: StreamWriter) -> None:
        """Feed `on_previous_ended` once the previous attempt has ended, or after a while."""
        if writer.previous_released is not None:
            self.call_after_previous(writer, partial(self.await_previous_end, writer))
        else:
            self._publisher.background.spawn(self._await_previous_end(writer.execution))

    async def _await_previous_end(self, execution: Execution) -> None:
        """The previous attempt is another worker's, whose first event may not be stored yet."""
        waited_s = 0.0
        for pause_s in _PREVIOUS_S:
            try:
                record = await self._publisher.store.read_record(execution.life.origin.execution_id)
            except StorageError:
                break
            is_young = record.state == "unknown" and waited_s < _MAX_UNKNOWN_S
            if record.state != "running" and not is_young:
                break
            await asyncio.sleep(pause_s)
            waited_s += pause_s
        self._publisher.supervisor.feed(execution, Lifecycle.on_previous_ended)

    # --- the lease -----------------------------------------------------------------------------

    def confirm_lease(self, execution: Execution, owner: str) -> None:
        """Feed `on_lease_confirmed` now if the lease is known to last, else after a renewal."""
        if self._publisher.lease.is_certain(owner):
            self._publisher.supervisor.feed(execution, Lifecycle.on_lease_confirmed, owner)
        else:
            self.awaiting_renewal[execution] = owner

    def lease_renewed(self, owner: str) -> None:
        """The owner's lease lasts: what waited for that goes on."""
        waiting, self.awaiting_renewal = self.awaiting_renewal, {}
        for execution, owner_before in waiting.items():
            if owner_before == owner:
                self._publisher.supervisor.feed(execution, Lifecycle.on_lease_confirmed, owner)

    def lease_started(self, incarnation: str) -> None:
        """Executions may be claimed under this incarnation."""
        self._publisher.background.spawn(self._reclaim_all(incarnation))
        for follower in self.followers:
            follower.lease_started(incarnation)

    async def _reclaim_all(self, incarnation: str) -> None:
        """Reclaim what was claimed under a lost lease, before a reaper ends it."""
        writers = self._publisher.writers.values()
        stale = [writer for writer in writers if writer.execution.life.owner != incarnation]
        for first in range(0, len(stale), _BATCH_SIZE):
            batch = stale[first : first + _BATCH_SIZE]
            if not await self._publisher.lease.hold_until_recorded(batch):
                return  # that lease is lost too: the one that follows it reclaims them
            for writer in batch:
                writer.feed(Lifecycle.on_lease_begun, incarnation)

    def worker_lapsed(self, worker: str) -> None:
        """Another worker has not renewed its lease for so long that it may have died."""
        self._publisher.background.spawn(self._reap(worker))

    async def _reap(self, worker: str) -> None:
        try:
            await self._reaper.reap(worker)
        except StorageError as error:
            log.info("reaping of worker %s failed; another worker will try: %s", worker, error)

    # --- doorbells -----------------------------------------------------------------------------

    async def prepare(self, incarnation: str) -> None:
        """Subscribe to the doorbells of the new owner, and leave those of a lost lease.

        Nothing is claimed under the new lease before this returns.
        """
        new = {incarnation, ""} - self._subscribed
        self._subscribed |= new
        channel_of, listen = self._publisher.store.doorbell_of, self._doorbells.listen
        try:
            await asyncio.gather(*(listen(channel_of(owner), self._on_doorbell) for owner in new))
        except StorageUnavailable as error:
            # Doorbells are hints: a claim brings the commands that were sent before, and all
            # executions are rung once the doorbells are subscribed to.
            self._publisher.background.warn_seldom(
                "doorbells are not subscribed yet: running tasks cannot be cancelled: %s", error
            )
        for owner in self._subscribed - {incarnation, ""}:
            self._subscribed.discard(owner)
            self._doorbells.leave(channel_of(owner), self._on_doorbell)

    def _on_doorbell(self, message: bytes | None) -> None:
        """`message` is an execution id; None after messages may have been missed."""
        if message is None:
            for writer in list(self._publisher.writers.values()):
                writer.feed(Lifecycle.on_doorbell_rang)
            return
        execution_id = message.decode(errors="replace")
        if (rung := self._publisher.writers.get(execution_id)) is not None:
            rung.feed(Lifecycle.on_doorbell_rang)
            return
        self.rung[execution_id] = None
        if len(self.rung) > _MAX_RUNG:
            del self.rung[next(iter(self.rung))]
