"""All streams of a worker, as its pool starts, feeds and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

from capsule_tasks.errors import CapsuleError, StorageError, StorageUnavailable, reason_of
from capsule_tasks.executions.delay import Delay
from capsule_tasks.protocol.events import Begun, Ended, Outcome, encode_event
from capsule_tasks.settings import ExecutionSettings, LeaseSettings, PublishSettings
from capsule_tasks.storage.doorbells import Doorbells, Ring
from capsule_tasks.storage.executions import ExecutionStore, Holdings
from capsule_tasks.storage.pipeline import PipelinedConnection
from capsule_tasks.taskpool.endings import Ending
from capsule_tasks.taskpool.jobs import Job, Stage
from capsule_tasks.taskpool.streams.admission import MOST_CLAIMS, Admission
from capsule_tasks.taskpool.streams.attempt import Attempt
from capsule_tasks.taskpool.streams.background import AGAIN_S, Background
from capsule_tasks.taskpool.streams.notes import Notes
from capsule_tasks.taskpool.streams.orders import Crew, Orders
from capsule_tasks.taskpool.streams.publication import Phase, Publication
from capsule_tasks.taskpool.streams.reaper import Reaper
from capsule_tasks.taskpool.streams.room import Room
from capsule_tasks.taskpool.streams.tenure import Tenure

log = logging.getLogger("capsule_tasks.taskpool")

_SOON_S = 0.01
"""How long a task that is new runs before it is claimed, if it says nothing and does not end."""
_STOP_S = 5.0
_BELLS_S = 5.0
"""How long nothing is claimed under a new lease because its bells are not heard yet, at most."""
_MOST_UNSTORED = 5000
"""Ends that wait for Redis, each with its job; what comes then has no stream."""


class Streams:
    """Starts and stops with the pool. `admit` is the way of a job to the crew."""

    def __init__(
        self,
        url: str,
        crew: Crew,
        *,
        worker: str,
        settings: PublishSettings,
        kept: ExecutionSettings,
        lease: LeaseSettings,
        drops: bool,
        ended_elsewhere: Callable[[str], Ending | None],
        fail_result: Callable[[str, str], object],
        own_kept: Callable[[str], Any],
    ) -> None:
        """`own_kept` says what the task of a name has settings of its own for."""
        self.settings = settings
        self.crew = crew
        self.connection = connection = PipelinedConnection(
            url, replicas=settings.replicas, replica_wait_s=settings.replica_wait_s
        )
        self.store = ExecutionStore(connection, settings=kept)
        self.background = Background()
        self.orders = Orders(crew, self.background, grace_s=settings.cancel_grace_s)
        self.room = Room(settings, drops=drops, read_on=self._read_on)
        self.soon = Delay[Publication](_SOON_S, self._on_soon)
        """These send also what nobody is in a hurry to hear."""
        self.ends = Delay[Publication](settings.end_wait_s, self._on_late_ends)
        """Of these the last event is on its way: Celery hears of the end, stored or not."""
        self._worker = worker
        self._kept = kept
        self._own_kept = own_kept
        self._bells = Doorbells(url, patience_s=min(_BELLS_S, lease.lease_s / 3))
        self._publications: dict[str, Publication] = {}
        self._late: set[Publication | Job] = set()
        """Over for Celery, and not in Redis."""
        self._unstreamed = 0
        holdings = Holdings(connection, kept)
        self.tenure = Tenure(
            connection,
            holdings,
            lease,
            self.background,
            self._publications,
            prefix=kept.prefix,
        )
        self.notes = Notes(self.store, self.tenure, self.background, worker=worker)
        self._admission = Admission(
            connection, self.tenure, self.background, wait_s=settings.claim_wait_s
        )
        self._reaper = Reaper(self.store, holdings, ended_elsewhere, fail_result, self._kept_of)
        self._heard: set[str] = set()
        """Whose bells."""
        self._begun: dict[str, bytes] = {}
        self._claims_of, self._claims = os.urandom(6).hex(), 0

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; a Redis that is not there yet is waited for in the background."""
        spawn = self.background.spawn
        spawn(
            self.tenure.keep(
                self._listen,
                lambda incarnation: spawn(self._retake_all(incarnation)),
                lambda worker: spawn(self._reap(worker)),
            )
        )
        spawn(self._admission.claim_all())
        spawn(self.notes.keep())

    async def stop(self) -> None:
        """Give back what is still held, and see everything stored that can be, for some seconds."""
        publications = list(self._publications.values())
        for publication in publications:
            publication.leave()
        with contextlib.suppress(TimeoutError, CapsuleError):
            async with asyncio.timeout(_STOP_S):
                for publication in publications:
                    await publication.drained()
                await self.notes.write()
                await self.tenure.end()
        await self.background.stop()
        await self._bells.close()
        await self.connection.close()

    def listen(self, channel: str, ring: Ring) -> None:
        """Have `ring` called, on the loop, for each announcement there, and once it is heard.

        With None it is called whenever announcements may have been missed, the first time too.
        """
        self.background.spawn(self._begin_listening(channel, ring))

    async def _begin_listening(self, channel: str, ring: Ring) -> None:
        with contextlib.suppress(StorageUnavailable):  # then the bell rings once it is heard
            await self._bells.listen(channel, ring)
            ring(None)

    # --- jobs ----------------------------------------------------------------------------------

    def admit(self, job: Job) -> None:
        """Have a job run: at once if it is new, else when its next attempt is claimed."""
        if self._is_full():
            self.crew.submit(job)
            return
        before = self._publications.get(job.call.task_id)
        if before is not None:  # it replaced itself, say, and has something to say first
            before.claim_now()
        try:
            publication = self._publication_of(job)
        except Exception as fault:  # noqa: BLE001 - its id, its task's settings: of whatever make
            log.warning("task %r runs without a stream: %s", job.call.task_id, reason_of(fault))
            self.crew.submit(job)
        else:
            self._admission.admit(publication)

    def discard(self, job: Job, why: str) -> None:
        """Write the end of a job that Celery has let go of before it came to the crew."""
        if not self._is_full():
            self._late.add(job)
            self.background.spawn(self._discard(job, why))

    async def _discard(self, job: Job, why: str) -> None:
        execution_id = job.call.task_id
        try:
            state = await self._state_of(execution_id)
        finally:
            self._late.discard(job)
        # Where its message came twice, the other one ends it.
        if state in ("unknown", "waiting") and execution_id not in self._publications:
            job.stage = Stage.OVER
            publication = self._publication_of(job)
            event = Ended(outcome=Outcome.CANCELLED, type="TaskRevokedError", message=why)
            publication.end(Ending(event), lambda: None)
            self._admission.admit(publication)

    async def _state_of(self, execution_id: str) -> str:
        while True:
            try:
                return (await self.store.look(execution_id)).state
            except StorageError as error:
                self.background.say_unavailable(error)
                await asyncio.sleep(AGAIN_S)

    def _is_full(self) -> bool:
        """Whether so much waits for a Redis that is away that one more would be too much."""
        has_room = self.room.waiting_bytes <= self.settings.total_bytes or not self._late
        if has_room and len(self._late) + len(self.ends) < _MOST_UNSTORED:
            return False
        self._unstreamed += 1
        self.background.warn_seldom(
            "too much waits for Redis: without a stream are %d tasks so far", self._unstreamed
        )
        return True

    def _publication_of(self, job: Job) -> Publication:
        name = job.call.name
        begun = self._begun.get(name)
        if begun is None:
            begun = self._begun[name] = encode_event(Begun(worker=self._worker, task=name))
        kept = self._kept_of(name)
        attempt = Attempt(self.store.core, job, kept, self._worker, begun)
        publication = Publication(self, job, attempt)
        job.publication = publication
        self._publications[publication.execution_id] = publication
        return publication

    def _kept_of(self, name: str) -> ExecutionSettings:
        own = self._own_kept(name)
        return self.store.core.kept_as(**own) if own else self._kept

    def drop_unbegun(self) -> None:
        """The broker is lost: what has not begun will be delivered again."""
        for publication in list(self._publications.values()):
            if not publication.has_begun:
                self.crew.drop(publication.job)

    def forget(self, publication: Publication) -> None:
        """It is over, here: nobody rings for it, and it is no longer held."""
        self._late.discard(publication)
        execution_id = publication.execution_id
        if self._publications.get(execution_id) is publication:
            del self._publications[execution_id]
            if publication.is_held:
                self.notes.release(execution_id)

    def new_claim(self) -> str:
        """An id that no other claim has."""
        self._claims += 1
        return f"{self._claims_of}{self._claims}"

    def _read_on(self, publication: Publication) -> None:
        session = self.crew.session_of(publication.job)
        if session is not None:
            session.read_on(publication.job.execution_id)

    def _on_soon(self, due: list[Publication]) -> None:
        due = [one for one in due if one.phase is not Phase.OVER]
        if unheld := [one for one in due if one.phase is Phase.FRESH and not one.is_held]:
            self.tenure.hold_soon(unheld)
        for publication in due:
            publication.on_due()

    def _on_late_ends(self, late: list[Publication]) -> None:
        self._late.update(late)
        for publication in late:
            publication.call_then()

    # --- under a lease -------------------------------------------------------------------------

    async def _listen(self, incarnation: str) -> None:
        new = {incarnation, ""} - self._heard
        self._heard |= new
        bell_of, listen = self.store.core.bell_of, self._bells.listen
        try:
            await asyncio.gather(*(listen(bell_of(bell), self._on_bell) for bell in new))
        except StorageUnavailable as error:
            # A bell is a hint: whoever claims reads what an execution was told before, and all are
            # rung once the bells are heard. Until then tasks that run do not hear a cancel.
            self.background.warn_seldom("tasks that run cannot be cancelled yet: %s", error)
        for bell in self._heard - {incarnation, ""}:  # of a lease that is lost
            self._heard.discard(bell)
            self._bells.leave(self.store.core.bell_of(bell), self._on_bell)

    def _on_bell(self, said: bytes | None) -> None:
        if said is None:
            for publication in list(self._publications.values()):
                publication.ring()
            return
        execution_id = said.decode(errors="replace")
        if (rung := self._publications.get(execution_id)) is not None:
            rung.ring()
        else:
            self._admission.on_ring(execution_id)

    async def _retake_all(self, incarnation: str) -> None:
        """What runs was claimed under a lease that is lost: claim it anew, before it is reaped."""
        held = [p for p in self._publications.values() if p.attempt.owner != incarnation]
        for first in range(0, len(held), MOST_CLAIMS):
            part = held[first : first + MOST_CLAIMS]
            if not await self.tenure.hold_for_sure(part):
                return  # that lease is lost too: what comes after it takes them
            live = [one for one in part if one.is_live]
            await asyncio.gather(*(one.retake(incarnation) for one in live))

    async def _reap(self, worker: str) -> None:
        try:
            await self._reaper.reap(worker)
        except StorageError as error:
            log.info("worker %s is left to another reaper: %s", worker, error)
