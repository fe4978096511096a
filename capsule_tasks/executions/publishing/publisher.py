"""One link to Redis for all executions of a worker: the only retry loop, the only output budget.

A new execution begins at once, and is claimed with its first words. Any other (a retry, a message
that came before, an execution that was sent a command before it began) is claimed first. To tell
them apart costs no question to Redis: the message says whether it came before, and a command for an
execution that nobody has rings every worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from capsule_tasks.errors import CapsuleError, StorageError, StorageUnavailable, reason_of
from capsule_tasks.executions import events as on
from capsule_tasks.executions.background import BackgroundTasks
from capsule_tasks.executions.delay import Delay
from capsule_tasks.executions.ends import LastEvent
from capsule_tasks.executions.events import Event, Streaming, Timer
from capsule_tasks.executions.execution import Execution
from capsule_tasks.executions.publishing.index_writer import IndexWriter
from capsule_tasks.executions.publishing.output_budget import OutputBudget
from capsule_tasks.executions.publishing.reaper import Reaper
from capsule_tasks.executions.publishing.stream_writer import StreamWriter
from capsule_tasks.executions.publishing.worker_lease import WorkerLease
from capsule_tasks.protocol.events import AttemptClaimed, encode_event
from capsule_tasks.settings import ExecutionSettings, LeaseSettings, PublishSettings
from capsule_tasks.storage.connections.doorbells import Doorbells, Ring
from capsule_tasks.storage.connections.pipelined import PipelinedConnection
from capsule_tasks.storage.executions.store import ExecutionStore, HoldStore
from capsule_tasks.storage.operations import Reply
from capsule_tasks.storage.scripts import Call

log = logging.getLogger("capsule_tasks.taskpool")

_CLAIM_DUE_S = 0.01
"""How long a new task runs before it is claimed, if it says nothing and does not end."""
_STOP_S = 5.0
_BELLS_S = 5.0
"""How long nothing is claimed under a new lease because its bells are not heard yet, at most."""
_MAX_UNSTORED = 5000
"""Ends that wait for Redis, each with its execution; what comes then has no stream."""
_CLAIM_BATCH_SIZE = 500
"""Noted as held in one call."""
_MAX_RUNG = 10_000
_PREVIOUS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Pauses between looks at the attempt before."""
_MAX_UNKNOWN_S = 0.05
"""How long the attempt before may be without its first words."""

_DOORBELL_RANG = on.DoorbellRang()
_SUCCESSOR_ADMITTED = on.SuccessorAdmitted()
_PREVIOUS_ENDED = on.PreviousEnded()
_CLAIM_DUE = on.TimerFired(Timer.CLAIM_DUE)
_END_WAIT = on.TimerFired(Timer.END_WAIT)


class PublisherListener(Protocol):
    """Hears what Redis says of executions."""

    def feed(self, execution: Execution, event: Event) -> None: ...

    def resume_output(self, execution: Execution) -> None:
        """There is room for the execution's output again."""


class Publisher:
    """Opened and stopped with the pool; everything runs on the loop."""

    def __init__(
        self,
        url: str,
        *,
        worker: str,
        settings: PublishSettings,
        retention: ExecutionSettings,
        lease: LeaseSettings,
        may_drop: bool,
        ended_elsewhere: Callable[[str], LastEvent | None],
        fail_result: Callable[[str, str], object],
        task_retention: Callable[[str], dict[str, Any] | None],
    ) -> None:
        """`task_retention` has the settings that the task of a name has of its own."""
        self.worker = worker
        self.prefix = retention.prefix
        self.settings = settings
        self.connection = PipelinedConnection(
            url, replicas=settings.replicas, replica_wait_s=settings.replica_wait_s
        )
        self._is_started = False
        self._keeps_order = self.connection.preserves_order
        self.store = ExecutionStore(self.connection, settings=retention)
        self.background = BackgroundTasks()
        self.budget = OutputBudget(settings, may_drop=may_drop, resume_output=self._resume_output)
        self.claims_due = Delay[Execution](_CLAIM_DUE_S, self._on_claims_due)
        self.ends_waiting = Delay[Execution](settings.end_wait_s, self._on_ends_waited)
        """Executions whose last event is on its way: Celery hears of the end, stored or not."""
        self.listener: PublisherListener | None = None
        self._retention = retention
        self._task_retention = task_retention
        self._bells = Doorbells(url, patience_s=min(_BELLS_S, lease.lease_s / 3))
        self._writers: dict[str, StreamWriter] = {}
        self._unstored_ends: set[Execution] = set()
        """Over for Celery, and not in Redis."""
        self._unstreamed = 0
        holdings = HoldStore(self.connection, retention)
        self.lease = WorkerLease(
            self.connection,
            holdings,
            lease,
            self.background,
            self._writers,
            prefix=retention.prefix,
        )
        self.index = IndexWriter(self.store, self.lease, self.background, worker=worker)
        self._reaper = Reaper(
            self.store, holdings, ended_elsewhere, fail_result, self._retention_of, self._writers
        )
        self._to_claim: deque[StreamWriter] = deque()
        self._has_claims = asyncio.Event()
        self._rung: dict[str, None] = {}
        """Executions that were sent a command, and have not come yet."""
        self._awaiting_renewal: dict[Execution, str] = {}
        """Executions whose owner's lease is in doubt."""
        self._heard: set[str] = set()
        """Owners whose bells are listened to."""
        self._of_tasks: dict[str, tuple[ExecutionSettings, bytes]] = {}
        """By name of the task: how much of its stream is retained, and the first event."""
        self._claims_of, self._claims = os.urandom(6).hex(), 0

    # --- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin; a Redis that is not there yet is waited for in the background."""
        if self._is_started:
            return
        self._is_started = True
        spawn = self.background.spawn
        spawn(
            self.lease.run(
                self._listen, self._on_lease_claimed_event, self._on_renewed, self._on_due
            )
        )
        spawn(self._claim_all())
        spawn(self.index.run())

    async def stop(self) -> None:
        """See everything stored that can be, for some seconds; feed WorkerStopping before."""
        with contextlib.suppress(TimeoutError, CapsuleError):
            async with asyncio.timeout(_STOP_S):
                for writer in list(self._writers.values()):
                    await writer.drained()
                await self.index.write()
                await self.lease.end()
        await self.background.stop()
        await self._bells.close()
        await self.connection.close()

    def feed(self, execution: Execution, event: Event) -> None:
        if self.listener is not None:
            self.listener.feed(execution, event)

    def listen(self, channel: str, ring: Ring) -> None:
        """Have `ring` called, on the loop, for each announcement there, and once it is heard.

        With None it is called whenever announcements may have been missed, the first time too.
        """
        self.background.spawn(self._begin_listening(channel, ring))

    async def _begin_listening(self, channel: str, ring: Ring) -> None:
        with contextlib.suppress(StorageUnavailable):  # then the bell rings once it is heard
            await self._bells.listen(channel, ring)
            ring(None)

    # --- executions ----------------------------------------------------------------------------

    def open(self, execution: Execution) -> Streaming:
        """Give the execution a stream, unless so much waits for Redis that there is no room."""
        if self._is_full():
            return Streaming.NONE
        execution_id = execution.life.origin.execution_id
        before = self._writers.get(execution_id)
        if before is not None:  # a task that replaced itself, say, has something to say first
            self.feed(before.execution, _SUCCESSOR_ADMITTED)
        try:
            writer = StreamWriter(self, execution, *self._of_task(execution.call.name))
        except Exception as fault:  # noqa: BLE001 - ids and settings may be of whatever make
            log.warning("task %r runs without a stream: %s", execution_id, reason_of(fault))
            return Streaming.NONE
        execution.stream = writer
        self._writers[execution_id] = writer
        return Streaming.CLAIM_LATER if self._is_new(execution) else Streaming.CLAIM_FIRST

    async def is_discarded_here(self, execution: Execution) -> bool:
        """Whether the end of an execution that never came to the pool is to be written here."""
        if self._is_full():
            return False
        execution_id = execution.life.origin.execution_id
        self._unstored_ends.add(execution)
        try:
            look = partial(self.store.look, execution_id)
            state = (await self.background.call_until_answered(look)).state
        finally:
            self._unstored_ends.discard(execution)
        # Where its message came twice, the other one ends it.
        return state in ("unknown", "waiting") and execution_id not in self._writers

    def release(self, execution: Execution) -> None:
        """The execution is over here: no bell rings for it, and it is held no longer."""
        self._unstored_ends.discard(execution)
        self._awaiting_renewal.pop(execution, None)
        self.ends_waiting.discard(execution)
        writer, execution.stream = execution.stream, None
        if writer is not None and self._writers.get(writer.execution_id) is writer:
            del self._writers[writer.execution_id]
            if writer.is_held:
                self.index.release(writer.execution_id)

    def _is_new(self, execution: Execution) -> bool:
        """Whether nothing is to be known of the execution before it begins."""
        origin = execution.life.origin
        was_rung = origin.execution_id in self._rung
        self._rung.pop(origin.execution_id, None)
        return (
            not (was_rung or origin.is_retry or origin.is_redelivered)
            and self._keeps_order
            and self.lease.is_held.is_set()
        )

    def _is_full(self) -> bool:
        has_room = self.budget.waiting_bytes <= self.settings.total_bytes or not self._unstored_ends
        if has_room and len(self._unstored_ends) + len(self.ends_waiting) < _MAX_UNSTORED:
            return False
        self._unstreamed += 1
        self.background.warn_seldom(
            "too much waits for Redis: without a stream are %d tasks so far", self._unstreamed
        )
        return True

    def forget_tasks(self) -> None:
        """The app is imported anew: tasks may have other settings."""
        self._of_tasks.clear()

    def _of_task(self, name: str) -> tuple[ExecutionSettings, bytes]:
        known = self._of_tasks.get(name)
        if known is None:
            claimed_event = encode_event(AttemptClaimed(worker=self.worker, task=name))
            known = self._of_tasks[name] = self._retention_of(name), claimed_event
        return known

    def _retention_of(self, name: str) -> ExecutionSettings:
        own = self._task_retention(name)
        return self.store.core.kept_as(**own) if own else self._retention

    def _resume_output(self, writer: StreamWriter) -> None:
        if self.listener is not None:
            self.listener.resume_output(writer.execution)

    # --- timers of many executions -------------------------------------------------------------

    def _on_claims_due(self, due: list[Execution]) -> None:
        """Note in one call that all of them are held, before they are claimed."""
        writers = [one.stream for one in due if one.stream is not None and not one.life.is_over]
        if unheld := [one for one in writers if one.is_unclaimed and not one.is_held]:
            self.lease.hold_soon(unheld)
        for writer in writers:
            self.feed(writer.execution, _CLAIM_DUE)

    def _on_ends_waited(self, late: list[Execution]) -> None:
        self._unstored_ends.update(late)
        for execution in late:
            self.feed(execution, _END_WAIT)

    # --- claims --------------------------------------------------------------------------------

    def new_claim_id(self) -> str:
        """An id that no other claim has."""
        self._claims += 1
        return f"{self._claims_of}{self._claims}"

    def claim_first(self, writer: StreamWriter) -> None:
        """Claim the execution together with others, once all are noted as held."""
        self._to_claim.append(writer)
        self._has_claims.set()

    async def _claim_all(self) -> None:
        while True:
            await self._has_claims.wait()
            self._has_claims.clear()
            while self._to_claim:
                await self.lease.is_held.wait()
                count = min(len(self._to_claim), _CLAIM_BATCH_SIZE)
                await self._claim([self._to_claim.popleft() for _ in range(count)])

    async def _claim(self, writers: list[StreamWriter]) -> None:
        if self._keeps_order:  # the note is sent before the claims
            self.background.spawn(self.lease.hold_until_recorded(writers))
        elif not await self.lease.hold(writers):
            self._to_claim.extendleft(reversed(writers))
            return
        for writer in writers:
            self.background.spawn(writer.claim_first())

    def await_previous_end(self, execution: Execution) -> None:
        self.background.spawn(self._await_previous(execution))

    async def _await_previous(self, execution: Execution) -> None:
        """The attempt before may not have said its last words yet, nor its first."""
        waited_s = 0.0
        for pause_s in _PREVIOUS_S:
            try:
                state = (await self.store.look(execution.life.origin.execution_id)).state
            except StorageError:
                break
            if state != "running" and not (state == "unknown" and waited_s < _MAX_UNKNOWN_S):
                break
            await asyncio.sleep(pause_s)
            waited_s += pause_s
        self.feed(execution, _PREVIOUS_ENDED)

    # --- calls ---------------------------------------------------------------------------------

    def send(
        self, call: Call, on_reply: Callable[[Call, Reply], object], *, may_batch: bool
    ) -> None:
        """Make a call until Redis answers it; `on_reply` has the answer."""
        if self._keeps_order:
            answer = partial(self._on_reply, call, on_reply)
            self.connection.cast(call, answer, may_batch=may_batch)
        else:
            self.background.spawn(self._call_until_answered(call, on_reply))

    def _on_reply(
        self,
        call: Call,
        on_reply: Callable[[Call, Reply], object],
        reply: Reply | StorageError,
    ) -> None:
        if isinstance(reply, StorageError):
            self.background.spawn(self._call_until_answered(call, on_reply))
        else:
            on_reply(call, reply)

    async def _call_until_answered(
        self, call: Call, on_reply: Callable[[Call, Reply], object]
    ) -> None:
        on_reply(call, await self.call_until_answered(call))

    async def call_until_answered(self, call: Call) -> Reply:
        """Make a call until Redis answers it."""
        return await self.background.call_until_answered(partial(self.store.make, call))

    # --- under a lease -------------------------------------------------------------------------

    def confirm_lease(self, execution: Execution, owner: str) -> None:
        """Feed LeaseConfirmed now if the lease is known to last, else once a renewal says so."""
        if self.lease.is_certain(owner):
            self.feed(execution, on.LeaseConfirmed(owner))
        else:
            self._awaiting_renewal[execution] = owner

    def _on_renewed(self, owner: str) -> None:
        if self._awaiting_renewal:
            unsure, self._awaiting_renewal = self._awaiting_renewal, {}
            for execution, owner_of in unsure.items():
                if owner_of == owner:
                    self.feed(execution, on.LeaseConfirmed(owner))

    def _on_lease_claimed_event(self, incarnation: str) -> None:
        self.background.spawn(self._move_all(incarnation))

    def _on_due(self, worker: str) -> None:
        self.background.spawn(self._reap(worker))

    async def _listen(self, incarnation: str) -> None:
        new = {incarnation, ""} - self._heard
        self._heard |= new
        bell_of, listen = self.store.core.bell_of, self._bells.listen
        try:
            await asyncio.gather(*(listen(bell_of(bell), self._on_bell) for bell in new))
        except StorageUnavailable as error:
            # A bell is a hint: whoever claims reads the commands that were sent before, and all
            # are rung once the bells are heard. Until then tasks that run do not hear a cancel.
            self.background.warn_seldom("tasks that run cannot be cancelled yet: %s", error)
        for bell in self._heard - {incarnation, ""}:  # of a lease that is lost
            self._heard.discard(bell)
            self._bells.leave(self.store.core.bell_of(bell), self._on_bell)

    def _on_bell(self, said: bytes | None) -> None:
        if said is None:
            for writer in list(self._writers.values()):
                self.feed(writer.execution, _DOORBELL_RANG)
            return
        execution_id = said.decode(errors="replace")
        if (rung := self._writers.get(execution_id)) is not None:
            self.feed(rung.execution, _DOORBELL_RANG)
            return
        self._rung[execution_id] = None
        if len(self._rung) > _MAX_RUNG:
            del self._rung[next(iter(self._rung))]

    async def _move_all(self, incarnation: str) -> None:
        """Executions were claimed under a lease that is lost: claim them before they are reaped."""
        held = [one for one in self._writers.values() if one.execution.life.owner != incarnation]
        for first in range(0, len(held), _CLAIM_BATCH_SIZE):
            part = held[first : first + _CLAIM_BATCH_SIZE]
            if not await self.lease.hold_until_recorded(part):
                return  # that lease is lost too: what comes after it moves them
            for writer in part:
                self.feed(writer.execution, on.LeaseBegun(incarnation))

    async def _reap(self, worker: str) -> None:
        try:
            await self._reaper.reap(worker)
        except StorageError as error:
            log.info("worker %s is left to another reaper: %s", worker, error)
