"""Stops a message that costs every process it is given to, and is delivered again each time.

What runs out of memory once does so again. A task with `reject_on_worker_lost` is delivered again
when its child dies, and any late acknowledged one when its whole worker does; neither would ever
end. So the processes that a message has cost are counted in Redis, over all workers. One that is
delivered *again* is counted when it begins, as a worker that dies counts nothing, and no more when
it has ended, in whatever way. Where no Redis is known, or none answers, a worker counts for itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

from capsule_tasks.errors import CapsuleError, reason_of
from capsule_tasks.protocol.messages import TaskCall
from capsule_tasks.storage import SyncConnections
from capsule_tasks.storage.drivers import drive_blocking
from capsule_tasks.storage.losses import LossCore

log = logging.getLogger("capsule_tasks.taskpool")

Key = tuple[str, str]

_MAX_KNOWN = 10_000
_TIMEOUT_S = 5.0


class LossCounter:
    """Counts and judges on the runtime's loop; Redis is asked from other threads."""

    def __init__(self, most: int, url: str | None = None, prefix: str = "capsule") -> None:
        self._most = most
        self._prefix = prefix
        self._connections = SyncConnections(url) if url else None
        self.counted_locally: dict[Key, int] = {}
        """The oldest are forgotten first."""
        self.noted: dict[Key, str] = {}
        """Those that run now and were counted when they began."""

    @property
    def counts_in_redis(self) -> bool:
        """Whether losses are counted over all workers."""
        return self._connections is not None

    async def admit(self, call: TaskCall) -> int:
        """Count a message that was delivered before; how many processes it cost if too many."""
        key = _key(call)
        # Known from here on: a worker that leaves meanwhile takes it back, see `close`; and a
        # message that this worker was given twice is counted once.
        loss = self.noted.setdefault(key, _new_id())
        count = await self._add(key, loss)
        if count > self._most:
            await self.forget(call)
            return count - 1
        if not count:
            self.noted.pop(key, None)
        return 0

    async def judge(self, call: TaskCall) -> int:
        """Count one more lost process; how many there were if the message may not come again."""
        key = _key(call)
        here = self.counted_locally.pop(key, 0) + 1
        count = max(here, await self._add(key, self.noted.pop(key, "") or _new_id()))
        if count >= self._most:
            return count
        self.counted_locally[key] = here
        if len(self.counted_locally) > _MAX_KNOWN:
            del self.counted_locally[next(iter(self.counted_locally))]
        return 0

    def is_counted_on_delivery(self, call: TaskCall) -> bool:
        return _key(call) in self.noted

    async def forget(self, call: TaskCall) -> None:
        """It came to an end that cost nothing."""
        key = _key(call)
        if loss := self.noted.get(key):
            await self._drop(key, loss)  # cancelled here, it is dropped by `close`
            if self.noted.get(key) == loss:
                del self.noted[key]

    def forget_here(self, call: TaskCall) -> None:
        """It came to its own end."""
        self.counted_locally.pop(_key(call), None)

    async def close(self) -> None:
        """Its worker leaves in good order: what it stops now is no loss."""
        noted, self.noted = self.noted, {}
        await asyncio.gather(*(self._drop(key, loss) for key, loss in noted.items()))
        if self._connections is not None:
            self._connections.close_blocking()

    async def _add(self, key: Key, loss: str) -> int:
        """How many there are now; 0 if nobody can say."""
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
            log.warning("what task %s has cost is counted here only: %s", key[0], reason_of(fault))
            return None


def _key(call: TaskCall) -> Key:
    """A retry has the same id, and is counted by Celery itself."""
    return call.task_id, str(call.request.get("retries") or 0)


def _new_id() -> str:
    return os.urandom(8).hex()
