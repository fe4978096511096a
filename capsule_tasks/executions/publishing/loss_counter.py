"""Counts the child processes that a message has cost, and stops it after too many.

A task that runs out of memory does so each time. With `reject_on_worker_lost` it is redelivered
when its child dies, and any late acknowledged task when its whole worker dies, without end. So the
losses of a message are counted in Redis, over all workers. A *redelivered* message is counted when
it starts, because a worker that dies cannot count, and no longer once it has ended. Without Redis,
or if Redis does not answer, a worker counts for itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

from capsule_tasks.errors import CapsuleError, reason_of
from capsule_tasks.executions.calls import AnyCall, retries_of
from capsule_tasks.storage import SyncConnections
from capsule_tasks.storage.drivers import drive_blocking
from capsule_tasks.storage.losses import LossCore

log = logging.getLogger("capsule_tasks.taskpool")

Key = tuple[str, str]

_MAX_KNOWN = 10_000
_TIMEOUT_S = 5.0


class LossCounter:
    """Counts and judges on the runtime's loop; Redis is asked from other threads."""

    def __init__(self, limit: int, url: str | None = None, prefix: str = "capsule") -> None:
        self._limit = limit
        self._prefix = prefix
        self._connections = SyncConnections(url) if url else None
        self.counted_locally: dict[Key, int] = {}
        """The oldest entries are removed first."""
        self.counted_on_delivery: dict[Key, str] = {}
        """Those that run now and were counted when they began."""

    @property
    def counts_in_redis(self) -> bool:
        """Whether losses are counted over all workers."""
        return self._connections is not None

    async def admit(self, call: AnyCall) -> int:
        """Count a redelivered message; return its losses if they are too many, else 0."""
        key = _key(call)
        # Recorded before the call: a worker that stops meanwhile drops it in `close`, and a
        # message that is delivered to this worker twice is counted once.
        loss = self.counted_on_delivery.setdefault(key, _new_id())
        count = await self._add(key, loss)
        if count > self._limit:
            await self.forget(call)
            return count - 1
        if not count:
            self.counted_on_delivery.pop(key, None)
        return 0

    async def judge(self, call: AnyCall) -> int:
        """Count one more lost process; return the count if it is too high, else 0."""
        key = _key(call)
        here = self.counted_locally.pop(key, 0) + 1
        count = max(here, await self._add(key, self.counted_on_delivery.pop(key, "") or _new_id()))
        if count >= self._limit:
            return count
        self.counted_locally[key] = here
        if len(self.counted_locally) > _MAX_KNOWN:
            del self.counted_locally[next(iter(self.counted_locally))]
        return 0

    def is_counted_on_delivery(self, call: AnyCall) -> bool:
        return _key(call) in self.counted_on_delivery

    async def forget(self, call: AnyCall) -> None:
        """Drop the count on delivery: the execution ended without a loss."""
        key = _key(call)
        if loss := self.counted_on_delivery.get(key):
            await self._drop(key, loss)  # if this is cancelled, `close` drops it
            if self.counted_on_delivery.get(key) == loss:
                del self.counted_on_delivery[key]

    def forget_here(self, call: AnyCall) -> None:
        """The task ended by itself: forget its losses in this worker."""
        self.counted_locally.pop(_key(call), None)

    async def close(self) -> None:
        """The worker stops in order: executions that it stops now are no losses."""
        counted, self.counted_on_delivery = self.counted_on_delivery, {}
        await asyncio.gather(*(self._drop(key, loss) for key, loss in counted.items()))
        if self._connections is not None:
            self._connections.close_blocking()

    async def _add(self, key: Key, loss: str) -> int:
        """The count after this loss; 0 if Redis does not answer."""
        count = await self._ask(lambda core, store: drive_blocking(core.add(loss), store), key)
        return int(count or 0)

    async def _drop(self, key: Key, loss: str) -> None:
        await self._ask(lambda core, store: drive_blocking(core.drop(loss), store), key)

    async def _ask(self, ask: Callable[[LossCore, SyncConnections], Any], key: Key) -> Any:
        if self._connections is None:
            return None
        try:
            asking = asyncio.to_thread(ask, LossCore(*key, self._prefix), self._connections)
            return await asyncio.wait_for(asking, _TIMEOUT_S)
        except (CapsuleError, TimeoutError) as fault:
            log.warning(
                "losses of task %s are counted in this worker only: %s", key[0], reason_of(fault)
            )
            return None


def _key(call: AnyCall) -> Key:
    """Retries have the same id, and are limited by Celery itself."""
    return call.task_id, str(retries_of(call))


def _new_id() -> str:
    return os.urandom(8).hex()
