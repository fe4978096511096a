"""The parts with which one process drives runs: a store, a lease, and the events it publishes."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from celery import signals

from capsule_tasks.child.io.capture import publish_run_event
from capsule_tasks.client.configuration import (
    retention_settings,
    run_lease_settings,
    setting,
)
from capsule_tasks.client.runs.registry import RegisteredAgent
from capsule_tasks.client.runs.stores import run_store, sync_run_store
from capsule_tasks.durable import RunDriver, RunEvent, RunFailure, RunStop
from capsule_tasks.errors import LeaseLost, RunEnded
from capsule_tasks.storage.executions.store import ExecutionStore
from capsule_tasks.storage.runs.types import ENDED

log = logging.getLogger("capsule_tasks.child")

_ATTRIBUTE = "capsule_run_host"
_MAX_EVENT_BYTES = 64 * 1024
_HAND_BACK_S = 1.0
"""How long a cancel waits until its run is handed back: less than the grace of a cancel."""
_RELEASE_S = 2.0
"""How long the end of a process waits until its lease is released."""

T = TypeVar("T")


class RunHost:
    """Drives any number of runs on one event loop, under one lease at a time."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._store = run_store(app)
        self._executions = ExecutionStore(self._store.store, settings=retention_settings(app))
        self._lease: KeptLease | None = None
        self._drives: set[asyncio.Task[Any]] = set()
        self._pid = os.getpid()
        signals.worker_process_shutdown.connect(self._on_shutdown)

    @property
    def is_of_this_process(self) -> bool:
        return self._pid == os.getpid()

    async def create(
        self, run_id: str, session: str | None, agent: RegisteredAgent, given: Any, context: Any
    ) -> None:
        """Store a run that came with its input."""
        snapshot, schema, _ = agent.engine.first(given, context)
        await self._store.create(
            run_id, session or run_id, snapshot, schema=schema, agent=agent.name
        )

    async def drive(self, run_id: str, agent: RegisteredAgent, message: bytes) -> RunStop:
        """Drive a run to its end or to a decision, as `RunDriver.drive` does.

        LeaseLost says that this process may have lost the run. The run is handed back before the
        error of a cancel, or of a time limit, is raised.
        """
        publish = EventPublisher()
        return await self._driven(
            agent,
            lambda driver: driver.drive(run_id, agent.engine, message=message, publish=publish),
        )

    async def fail(self, run_id: str, agent: RegisteredAgent, failure: RunFailure) -> RunStop:
        """End a run that is queued as failed."""
        return await self._driven(agent, lambda driver: driver.fail(run_id, agent.engine, failure))

    async def refuse_ended(self, run_id: str) -> None:
        """Raise RunEnded, as a claim does, for a run that has ended."""
        record = await self._store.read(run_id, with_snapshot=False)
        if record.status in ENDED:
            raise RunEnded(run_id, record.status, record.result, record.error)

    async def execution_state(self, run_id: str) -> str:
        """The state of the run's execution; `lost` if it runs under a lease that has lapsed."""
        record = await self._executions.read_record(run_id)
        if record.state != "running":
            return record.state
        if record.owner and await self._store.lease(record.owner).remaining_s():
            return "running"
        return "lost"

    async def _driven(
        self, agent: RegisteredAgent, work: Callable[[RunDriver], Coroutine[Any, Any, T]]
    ) -> T:
        lease = await self._kept_lease()
        driver = RunDriver(
            self._store,
            lease.incarnation,
            turn_timeout_s=agent.turn_timeout_s,
            hand_back_s=lease.lease_s,
            loss_limit=setting(self._app, "capsule_loss_limit"),
        )
        # A stop, or a time limit, is raised here, and not somewhere in the engine, where a library
        # may make something else of it.
        driving = asyncio.create_task(work(driver))
        self._drives.add(driving)
        driving.add_done_callback(self._drives.discard)
        try:
            await asyncio.wait({driving})
        except BaseException as stop:
            driving.cancel()
            # Until the run is handed back. A process whose task does not stop is killed, with all
            # other runs in it: so the rest, while Redis is away, happens in the background.
            is_cancel = isinstance(stop, asyncio.CancelledError)
            await asyncio.wait({driving}, timeout=_HAND_BACK_S if is_cancel else None)
            if not driving.done() or driving.cancelled() or driving.exception() is not None:
                raise
        if driving.cancelled():
            raise LeaseLost(lease.incarnation)
        return driving.result()

    # --- the lease ------------------------------------------------------------------------------

    async def _kept_lease(self) -> KeptLease:
        """The lease of this process; a new one, under a new incarnation, once that is lost."""
        lease = self._lease
        if lease is None:
            lease = self._lease = KeptLease(self._app)
            loop = asyncio.get_running_loop()
            lease.start(partial(loop.call_soon_threadsafe, self._on_lost, lease))
        try:
            await asyncio.shield(asyncio.wrap_future(lease.acquired))
        except Exception:
            if self._lease is lease:
                self._lease = None
            raise
        return lease

    def _on_lost(self, lease: KeptLease) -> None:
        log.warning(
            "the lease under which this process drives %d runs was lost; others take them",
            len(self._drives),
        )
        if self._lease is lease:
            self._lease = None
        for drive in self._drives:
            drive.cancel()

    def _on_shutdown(self, **_: Any) -> None:
        """The process ends: its runs, if it has any, need not wait for the end of the lease."""
        if self._lease is not None and self.is_of_this_process:
            self._lease.release()


class KeptLease:
    """A lease that threads keep: code that blocks the event loop does not lose it."""

    def __init__(self, app: Any) -> None:
        self.incarnation = os.urandom(8).hex()
        self.acquired: Future[None] = Future()
        self._app = app
        self._settings = run_lease_settings(app)
        self._lost: threading.Event | None = None
        self._is_released = False
        self._thread: threading.Thread | None = None

    @property
    def lease_s(self) -> float:
        return self._settings.lease_s

    def start(self, on_lost: Callable[[], object]) -> None:
        """Acquire and keep it; `acquired` tells when that is done, or why it cannot be."""
        self._thread = threading.Thread(
            target=self._keep, args=(on_lost,), name="capsule-run-lease", daemon=True
        )
        self._thread.start()

    def _keep(self, on_lost: Callable[[], object]) -> None:
        try:
            with (
                sync_run_store(self._app) as store,
                store.lease(self.incarnation, self._settings).keep() as lost,
            ):
                self._lost = lost
                self.acquired.set_result(None)
                lost.wait()
                if not self._is_released:
                    with suppress(RuntimeError):  # the loop has ended
                        on_lost()
        except Exception as fault:
            if self.acquired.done():
                log.exception("the lease of runs could not be released")
            else:
                self.acquired.set_exception(fault)

    def release(self) -> None:
        """Give the lease up, within a short time."""
        if self._lost is not None and self._thread is not None:
            self._is_released = True
            self._lost.set()
            self._thread.join(_RELEASE_S)


class EventPublisher:
    """Publishes the events of a run in the stream of the execution that drives it."""

    def __init__(self) -> None:
        self._dropped = 0

    def __call__(self, event: RunEvent) -> None:
        if len(event.json) > _MAX_EVENT_BYTES:
            event.left_out_bytes, event.json = len(event.json), b"null"
        event.dropped_events = self._dropped
        is_sent = publish_run_event(event, is_last=event.kind == "run_parked")
        self._dropped = 0 if is_sent else self._dropped + 1


def run_host(app: Any) -> RunHost:
    """The host of this process; made on the event loop that drives runs."""
    host: RunHost | None = vars(app).get(_ATTRIBUTE)
    if host is None or not host.is_of_this_process:
        host = RunHost(app)
        setattr(app, _ATTRIBUTE, host)
    return host
