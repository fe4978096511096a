"""One link to Redis for all executions of a worker: the only retry loop, the only output budget.

A new execution starts without a question to Redis and is claimed with its first events. Any other
(a retry, a redelivered message, an execution that was sent a command before it started) is claimed
first. The message tells whether it is redelivered, and a command for an execution that no worker
has rings the doorbell of every worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from capsule_tasks.errors import (
    CapsuleError,
    LeaseLost,
    StorageError,
    StorageUnavailable,
    reason_of,
)
from capsule_tasks.executions.background import BackgroundTasks, Delay
from capsule_tasks.executions.claims import Streaming
from capsule_tasks.executions.ends import LastEvent, failure_of, outcome_of
from capsule_tasks.executions.execution import Execution
from capsule_tasks.executions.lifecycle import Lifecycle
from capsule_tasks.executions.origin import Origin
from capsule_tasks.executions.publishing.claimer import Claimer, LeaseFollower
from capsule_tasks.executions.publishing.output_budget import OutputBudget
from capsule_tasks.executions.publishing.reaper import Reaper
from capsule_tasks.executions.publishing.stream_writer import StreamWriter
from capsule_tasks.executions.publishing.worker_lease import WorkerLease
from capsule_tasks.protocol.events import AttemptClaimed, encode_event
from capsule_tasks.settings import (
    ConnectionSettings,
    ExecutionSettings,
    LeaseSettings,
    NamedSessionSettings,
    PublishSettings,
)
from capsule_tasks.storage.connections.doorbells import Doorbells, OnRing
from capsule_tasks.storage.connections.pipelined import PipelinedConnection
from capsule_tasks.storage.executions.holds import HoldStore
from capsule_tasks.storage.executions.store import ExecutionStore
from capsule_tasks.storage.executions.types import RecentEntry
from capsule_tasks.storage.operations import Reply
from capsule_tasks.storage.scripts import Call
from capsule_tasks.storage.sessions.store import NamedSessionStore

if TYPE_CHECKING:
    from capsule_tasks.executions.supervisor import Supervisor

log = logging.getLogger("capsule_tasks.taskpool")

_STOP_S = 5.0
_DOORBELLS_S = 5.0
"""How long, at most, claims under a new lease wait for its doorbells to be subscribed to."""
_MAX_UNSTORED = 5000
"""Ends that wait for Redis, each with its execution; executions that come then have no stream."""

_GATHER_S = 0.05
"""How long records of the indexes gather before they are written."""
_BATCH_SIZE = 200
"""In one call."""


class Publisher:
    """Started and stopped with the pool; everything runs on the loop."""

    supervisor: Supervisor
    """Receives what Redis answers about executions; set before the first of them is opened."""

    def __init__(
        self,
        url: str,
        *,
        worker: str,
        settings: PublishSettings,
        retention: ExecutionSettings,
        sessions: NamedSessionSettings | None = None,
        lease: LeaseSettings,
        may_drop: bool,
        ended_elsewhere: Callable[[str], LastEvent | None],
        fail_result: Callable[[str, str], object],
        task_retention: Callable[[str], dict[str, Any] | None],
    ) -> None:
        """`task_retention` gives the settings that the task of a name has of its own."""
        self.worker = worker
        self.settings = settings
        self.connection = PipelinedConnection(
            url,
            ConnectionSettings(replicas=settings.replicas, replica_wait_s=settings.replica_wait_s),
        )
        self._keeps_order = self.connection.preserves_order
        self.store = ExecutionStore(self.connection, settings=retention)
        self.background = BackgroundTasks()
        self.budget = OutputBudget(settings, may_drop=may_drop)
        self.writers: dict[str, StreamWriter] = {}
        """The streams of this worker's executions, by execution id."""
        self.retention = retention
        self.ends_waiting = Delay[Execution](settings.end_wait_s, self._on_ends_waited)
        """Executions whose last event was sent: the end is reported then, stored or not."""
        self.sessions = NamedSessionStore(
            self.connection, settings=sessions or NamedSessionSettings(prefix=retention.prefix)
        )
        hold_store = HoldStore(self.connection, retention)
        self.lease = WorkerLease(
            connection=self.connection,
            hold_store=hold_store,
            sessions=self.sessions,
            settings=lease,
            background=self.background,
            present=self.writers,
            prefix=retention.prefix,
        )
        self.index = IndexWriter(self.store, self.lease, self.background, worker)
        self._doorbells = Doorbells(url, timeout_s=min(_DOORBELLS_S, lease.lease_s / 3))
        self.reaper = Reaper(
            self.store,
            hold_store,
            self.sessions,
            ended_elsewhere,
            fail_result,
            self._retention_of,
            self.writers,
        )
        self.claimer = Claimer(self, self._doorbells, self.reaper)
        self._task_retention = task_retention
        self._of_tasks: dict[str, tuple[ExecutionSettings, bytes]] = {}
        """By name of the task: how long its streams are retained, and their first event."""
        self._unstored_ends: set[Execution] = set()
        """Executions whose end is reported and not stored."""
        self._unstreamed = 0
        self._claim_prefix, self._claims = os.urandom(6).hex(), 0
        self._replied = asyncio.Event()
        self._is_started = False

    # --- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start; a Redis that is unavailable is waited for in the background."""
        if not self._is_started:
            self._is_started = True
            self.background.spawn(self.lease.run(self.claimer))
            self.background.spawn(self.claimer.run())
            self.background.spawn(self.index.run())

    async def stop(self) -> None:
        """Store what can be stored, for some seconds; feed `on_worker_stopping` before."""
        with contextlib.suppress(TimeoutError, CapsuleError):
            async with asyncio.timeout(_STOP_S):
                while any(writer.is_busy for writer in self.writers.values()):
                    self._replied.clear()
                    await self._replied.wait()
                await self.index.write()
                await self.lease.end()
        await self.background.stop()
        await self._doorbells.close()
        await self.connection.close()

    def listen(self, channel: str, ring: OnRing) -> None:
        """Have `ring` called, on the loop, for each message on the channel.

        It is called with None whenever messages may have been missed, also before the first.
        """
        self.background.spawn(self._listen(channel, ring))

    async def _listen(self, channel: str, ring: OnRing) -> None:
        with contextlib.suppress(StorageUnavailable):  # then `ring` is called once it is subscribed
            await self._doorbells.listen(channel, ring)
            ring(None)

    def leave(self, channel: str, ring: OnRing) -> None:
        """Stop calling `ring`."""
        self._doorbells.leave(channel, ring)

    def follow_lease(self, follower: LeaseFollower) -> None:
        """Have the follower told of each lease from now on, and of the present one."""
        self.claimer.followers.append(follower)
        if self.lease.is_held.is_set():
            follower.lease_started(self.lease.incarnation)

    # --- executions ----------------------------------------------------------------------------

    def open(self, execution: Execution) -> Streaming:
        """Give the execution a stream, unless so much waits for Redis that there is no room."""
        if self._is_full():
            return Streaming.NONE
        execution_id = execution.life.origin.execution_id
        previous = self.writers.get(execution_id)
        if previous is not None:  # a task that replaced itself, say, publishes its end first
            previous.feed(Lifecycle.on_successor_admitted)
        try:
            writer = StreamWriter(self, execution, *self._of_task(execution.call.name))
        except Exception as fault:  # noqa: BLE001 - ids and settings of any make
            log.warning("task %r runs without a stream: %s", execution_id, reason_of(fault))
            return Streaming.NONE
        if previous is not None and not execution.life.origin.is_redelivered:
            writer.previous_released = previous.released = asyncio.Event()
        execution.stream = writer
        if not execution.life.origin.claims_with_output:
            self.present(writer)
        return self._streaming_of(execution.life.origin)

    def present(self, writer: StreamWriter) -> None:
        """From now on this is the stream of its execution here, which commands are meant for."""
        self.writers[writer.execution_id] = writer

    def _streaming_of(self, origin: Origin) -> Streaming:
        rung = self.claimer.rung
        was_rung = origin.execution_id in rung
        rung.pop(origin.execution_id, None)
        if origin.claims_with_output:
            return Streaming.CLAIM_LATER
        is_known = was_rung or origin.is_retry or origin.is_redelivered
        is_new = not (is_known or origin.needs_claim)
        if is_new and self._keeps_order and self.lease.is_held.is_set():
            return Streaming.CLAIM_LATER
        return Streaming.CLAIM_FIRST

    def new_claim_id(self) -> str:
        """An id that no other claim has."""
        self._claims += 1
        return f"{self._claim_prefix}{self._claims}"

    async def is_discarded_here(self, execution: Execution) -> bool:
        """Whether the end of an execution that never came to the pool is to be written here."""
        if self._is_full():
            return False
        execution_id = execution.life.origin.execution_id
        self._unstored_ends.add(execution)
        try:
            read = partial(self.store.read_record, execution_id)
            state = (await self.background.call_until_answered(read)).state
        finally:
            self._unstored_ends.discard(execution)
        # If the message was delivered twice, the other delivery ends the execution.
        return state in ("unknown", "waiting") and execution_id not in self.writers

    def release(self, writer: StreamWriter) -> None:
        """The execution is over here: it has no stream and is no longer held."""
        execution = writer.execution
        execution.stream = None
        self._unstored_ends.discard(execution)
        self.claimer.awaiting_renewal.pop(execution, None)
        self.claimer.due.discard(execution)
        self.ends_waiting.discard(execution)
        if writer.released is not None:
            writer.released.set()
        if self.writers.get(writer.execution_id) is writer:
            del self.writers[writer.execution_id]
            if writer.is_held:
                self.index.release(writer.execution_id)

    def _is_full(self) -> bool:
        has_room = self.budget.waiting_bytes <= self.settings.total_bytes or not self._unstored_ends
        if has_room and len(self._unstored_ends) + len(self.ends_waiting.waiting) < _MAX_UNSTORED:
            return False
        self._unstreamed += 1
        self.background.warn_seldom(
            "Redis is unavailable and the buffer is full: %d tasks run without a stream",
            self._unstreamed,
        )
        return True

    def _on_ends_waited(self, late: list[Execution]) -> None:
        self._unstored_ends.update(late)
        for execution in late:
            self.supervisor.feed(execution, Lifecycle.on_end_wait)

    # --- settings of tasks ---------------------------------------------------------------------

    def forget_tasks(self) -> None:
        """The app was imported again: tasks may have other settings."""
        self._of_tasks.clear()

    def _of_task(self, name: str) -> tuple[ExecutionSettings, bytes]:
        known = self._of_tasks.get(name)
        if known is None:
            claimed_event = encode_event(AttemptClaimed(worker=self.worker, task=name))
            known = self._of_tasks[name] = self._retention_of(name), claimed_event
        return known

    def _retention_of(self, name: str) -> ExecutionSettings:
        own = self._task_retention(name)
        return replace(self.retention, **own) if own else self.retention

    # --- calls ---------------------------------------------------------------------------------

    def send(
        self, call: Call, on_reply: Callable[[Call, Reply], object], *, may_batch: bool
    ) -> None:
        """Make a call until Redis answers it; `on_reply` has the answer."""

        def on_answer(reply: Reply | StorageError) -> None:
            if isinstance(reply, StorageError):
                self.background.spawn(self._send_again(call, on_reply))
            else:
                on_reply(call, reply)
                self._replied.set()

        if self._keeps_order:
            self.connection.send_nowait(call, on_answer, may_batch=may_batch)
        else:
            self.background.spawn(self._send_again(call, on_reply))

    async def _send_again(self, call: Call, on_reply: Callable[[Call, Reply], object]) -> None:
        on_reply(call, await self.call_until_answered(call))
        self._replied.set()

    async def call_until_answered(self, call: Call) -> Reply:
        return await self.background.call_until_answered(partial(self.store.call, call))


@dataclass(eq=False)
class IndexWriter:
    """Writes the indexes: recent executions, and how many members of a group have ended.

    It writes later, many records in a call; then it releases executions that are over.
    """

    store: ExecutionStore
    lease: WorkerLease
    background: BackgroundTasks
    worker: str
    _recent: dict[str, tuple[int, RecentEntry]] = field(default_factory=dict)
    _groups: dict[str, list[tuple[int, str, str, str]]] = field(default_factory=dict)
    _over: list[str] = field(default_factory=list)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def record_state(self, writer: StreamWriter, state: str) -> None:
        """The execution is `running`, `waiting`, or has this outcome."""
        attempt, name = writer.attempt, writer.execution.call.name
        execution_id = writer.execution_id
        entry = RecentEntry(execution_id, 0.0, state, name, self.worker, attempt / 1000)
        self._recent[execution_id] = (attempt, entry)
        self._wake.set()

    def record_end(self, writer: StreamWriter, event: LastEvent) -> None:
        """The last event is stored; a group counts its member if no other attempt follows."""
        outcome = outcome_of(event)
        self.record_state(writer, outcome or "waiting")
        origin = writer.execution.life.origin
        if origin.group and origin.index >= 0 and outcome:
            member = (origin.index, outcome, writer.execution_id, failure_of(event))
            self._groups.setdefault(origin.group, []).append(member)

    def release(self, execution_id: str) -> None:
        """The execution is over here: release its hold once its records are written."""
        self._over.append(execution_id)
        self._wake.set()

    async def run(self) -> None:
        """Write what is recorded; until cancelled."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(_GATHER_S)
            self._wake.clear()
            await self.background.call_until_answered(self.write)

    async def write(self) -> None:
        """Groups first: no reaper repairs what is no longer held."""
        async with self._writing:
            await self._write()

    async def _write(self) -> None:
        """Write what is recorded now: under load more comes at any moment, and is to gather."""
        over = list(self._over)
        for group, members in list(self._groups.items()):
            left = len(members)
            while left:
                part = members[: min(left, _BATCH_SIZE)]
                await _recorded(self.store.record_group_ends(group, part))
                del members[: len(part)]
                left -= len(part)
            if not members:
                del self._groups[group]
        recent = list(self._recent.items())
        for first in range(0, len(recent), _BATCH_SIZE):
            batch = dict(recent[first : first + _BATCH_SIZE])
            await _recorded(self.store.record_recent(list(batch.values())))
            for execution_id, entry in batch.items():
                if self._recent[execution_id] is entry:  # else it has changed since
                    del self._recent[execution_id]
        for execution_id in over:
            self.lease.release(execution_id)
        del self._over[: len(over)]
        with contextlib.suppress(LeaseLost):  # a reaper releases what was held under that lease
            await self.lease.flush_released()


async def _recorded(writing: Awaitable[None]) -> None:
    """Drop a record that Redis refuses for good: all others wait behind it."""
    try:
        await writing
    except StorageError:
        raise
    except CapsuleError as error:
        log.warning("index of recent executions or group counts not updated: %s", error)
