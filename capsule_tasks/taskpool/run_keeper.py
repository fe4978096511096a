"""Keeps durable runs going from the main process of a worker, whoever had them before.

Redis has the truth of each run. Every worker keeps all runs: those whose owner is gone, those whose
approvals have expired, and those whose message nobody sent. A keeper that dies leaves nothing
half done: what it had changed and not sent, the others find among the unsent messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sized
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from capsule_tasks.client.redis_location import redis_url
from capsule_tasks.client.runs.messages import RUN_TASK, at_once, send
from capsule_tasks.client.runs.registry import runs_of
from capsule_tasks.client.runs.stores import run_store
from capsule_tasks.errors import RunEnded, RunNotFound, StorageError, reason_of
from capsule_tasks.executions.background import RETRY_DELAY_S, BackgroundTasks
from capsule_tasks.storage.runs.store import RunStore
from capsule_tasks.storage.runs.types import ENDED, RunRecord

log = logging.getLogger("capsule_tasks.taskpool")

_random = random.Random()  # noqa: S311  spreads load, and leaves the program's own generator alone

LOOK_EVERY_S = 3.0
"""At most this long, a run waits to be looked at: for an owner that is gone, after its lease."""
_DROP_EVERY_S = 3600.0
"""Between two looks for ended runs that have expired, but are still in the index."""
_MIN_PAUSE_S = 0.05
"""Between two looks while there is more to do than one look does."""
_THREADS = 4
"""Messages that are sent at once: a broker that hangs delays no event loop."""
_SEND_S = 30.0
"""How long a look waits for messages that are being sent."""

SendMessage = Callable[[str, bytes], object]
"""Sends the message of a run under the id of the run; blocks, and may raise."""


def make_run_keeper(app: Any) -> RunKeeper | None:
    """The keeper of a worker; None where there is no Redis for runs."""
    if redis_url(app) is not None:
        return RunKeeper(run_store(app), partial(send, app), runs_of(app).agents)
    if runs_of(app).agents:
        log.warning("runs are not kept going: set capsule_redis_url to the Redis they should be in")
    return None


class RunKeeper:
    """Started and stopped with the pool; everything but the sending runs on the loop."""

    def __init__(self, store: RunStore, send: SendMessage, agents: Sized) -> None:
        """The keeper closes the store. Without `agents` in the worker, it looks after no runs."""
        self._store = store
        self._send = send
        self._agents = agents
        self._background = BackgroundTasks()
        self._threads = ThreadPoolExecutor(_THREADS, "capsule-runs")
        self._sending: dict[str, asyncio.Future[object]] = {}
        """Messages on their way to the broker, by run."""
        self._next_drop_at = 0.0
        self._is_started = False

    # --- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Look after runs from now on; a Redis or broker that is unavailable is waited for."""
        if self._agents and not self._is_started:
            self._is_started = True
            self._background.spawn(self._run())

    async def stop(self) -> None:
        """Look after nothing more. A message that is being sent is sent; safe at any time."""
        self._is_started = True
        await self._background.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._store.close()

    def cancel(self, run_id: str, by: str) -> None:
        """Cancel a run whose execution was cancelled in this worker: there is nothing to send."""
        self._background.spawn(self._cancel(run_id, by))

    async def _cancel(self, run_id: str, by: str) -> None:
        cancel = partial(self._store.cancel, run_id, by=by)
        # The run has ended, or no worker had created it: the one that does finds the end in its
        # stream.
        with contextlib.suppress(RunEnded, RunNotFound):
            cancelled = await self._background.call_until_answered(cancel)
            if cancelled.resume:
                note = partial(self._store.note_sent, run_id, cancelled.updated_us)
                await self._background.call_until_answered(note)

    async def after_lost_attempt(self, task: str, run_id: str) -> None:
        """Have the end of a run reported, if its worker died between that end and the report.

        The broker would deliver the message again, but some take an hour for that.
        """
        if task != RUN_TASK:
            return
        with contextlib.suppress(RunNotFound):
            record = await self._store.read(run_id, with_snapshot=False)
            if record.status in ENDED and record.message:
                log.info("run %s is %s, and its worker did not report that", run_id, record.status)
                loop = asyncio.get_running_loop()
                send = partial(self._send, run_id, record.message)
                await loop.run_in_executor(self._threads, send)

    # --- looks ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            due_in_s = await self.look()
            # Workers that were started together look at different times.
            pause_s = min(due_in_s, LOOK_EVERY_S) * _random.uniform(0.7, 1.0)
            await asyncio.sleep(max(pause_s, _MIN_PAUSE_S))

    async def look(self) -> float:
        """Do all that is due for any run; the seconds until more is known to be due."""
        sweeps = (self._decide_expired, self._requeue_lapsed, self._send_unsent, self._drop_expired)
        due = [await self._tried(sweep) for sweep in sweeps]
        return min((in_s for in_s in due if in_s is not None), default=LOOK_EVERY_S)

    async def _tried(self, sweep: Callable[[], Awaitable[float | None]]) -> float | None:
        """The answer of one sweep; the others do not depend on it."""
        try:
            return await sweep()
        except StorageError as error:
            self._background.warn_seldom("Redis is unavailable; runs are not kept going: %s", error)
        except Exception as fault:  # noqa: BLE001 - one run must not end the keeping of all others
            name, why = type(fault).__name__, reason_of(fault)
            self._background.warn_seldom("runs are not kept going: %s: %s", name, why)
        return RETRY_DELAY_S

    async def _decide_expired(self) -> float | None:
        """Decide calls whose time limit has passed."""
        sweep = await self._store.approvals.expire_due()
        for expired in sweep.expired:
            log.info(
                "run %s: the time limit of calls %s has passed; it is %s",
                expired.run_id,
                ", ".join(expired.calls),
                expired.status,
            )
        await self._send_by_id(each.run_id for each in sweep.expired if each.resume)
        return sweep.next_in_s

    async def _requeue_lapsed(self) -> float | None:
        """Queue runs of owners whose leases have lapsed."""
        sweep = await self._store.requeue_lapsed()
        for requeued in sweep.requeued:
            log.warning("run %s: its owner is gone; it is %s", requeued.run_id, requeued.status)
        await self._send_by_id(each.run_id for each in sweep.requeued)
        return sweep.next_in_s

    async def _send_unsent(self) -> float | None:
        """Send messages that whoever had to send them did not."""
        unsent = await self._store.queued_unsent()
        for record in await self._send_all(unsent.runs):
            log.info("run %s is %s, and nobody had sent its message", record.run_id, record.status)
        return unsent.next_in_s

    async def _drop_expired(self) -> float | None:
        """Now and then, drop runs from the index that have expired, or never had their status."""
        if time.monotonic() >= self._next_drop_at:
            self._next_drop_at = time.monotonic() + _DROP_EVERY_S * _random.uniform(0.7, 1.0)
            await self._store.drop_expired()
            # Each claim lists its run as running, and those that are refused leave that behind:
            # reading the list drops what is not true.
            running = partial(self._store.list, status="running", newest_first=False)
            page = await running()
            while page.cursor is not None:
                page = await running(cursor=page.cursor)
        return None

    # --- messages ------------------------------------------------------------------------------

    async def _send_by_id(self, run_ids: Iterable[str]) -> None:
        records: list[RunRecord] = []
        for run_id in run_ids:
            with contextlib.suppress(RunNotFound):
                records.append(await self._store.read(run_id, with_snapshot=False))
        await self._send_all(records)

    async def _send_all(self, records: Iterable[RunRecord]) -> list[RunRecord]:
        """Send the messages of runs that need one; return those whose message was sent.

        A message that could not be sent is found later, and sent again. Runs without a message are
        left to whoever created them.
        """
        loop = asyncio.get_running_loop()
        sending: dict[asyncio.Future[object], RunRecord] = {}
        for record in records:
            if record.unsent_us and record.message and record.run_id not in self._sending:
                is_over = record.status == "cancelled"  # maybe before it was to start
                message = at_once(record.message) if is_over else record.message
                send = partial(self._send, record.run_id, message)
                future = loop.run_in_executor(self._threads, send)
                self._sending[record.run_id] = future
                future.add_done_callback(partial(self._on_sent, record.run_id))
                sending[future] = record
        if sending:
            await asyncio.wait(sending, timeout=_SEND_S)
        sent = [record for future, record in sending.items() if _has_returned(future)]
        for record in sent:
            with contextlib.suppress(RunNotFound):
                await self._store.note_sent(record.run_id, record.unsent_us)
        return sent

    def _on_sent(self, run_id: str, future: asyncio.Future[object]) -> None:
        self._sending.pop(run_id, None)
        if not future.cancelled() and (fault := future.exception()) is not None:
            why = reason_of(fault)
            self._background.warn_seldom("messages of runs cannot be sent, and wait: %s", why)


def _has_returned(future: asyncio.Future[object]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
