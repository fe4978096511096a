"""One call at a time on its way to Redis, until it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from capsule_tasks.errors import StorageError
from capsule_tasks.storage.executions import ExecutionStore
from capsule_tasks.storage.operations import Reply
from capsule_tasks.storage.pipeline import PipelinedConnection
from capsule_tasks.storage.scripts import Call
from capsule_tasks.taskpool.streams.background import AGAIN_S, Background


class Line:
    """What one publication has on its way: never two calls, so that they keep their order."""

    __slots__ = ("_background", "_connection", "_on_free", "_store", "_waiters", "is_busy")

    def __init__(
        self,
        connection: PipelinedConnection,
        store: ExecutionStore,
        background: Background,
        on_free: Callable[[], object],
    ) -> None:
        self.is_busy = False
        self._connection = connection
        self._store = store
        self._background = background
        self._on_free = on_free
        self._waiters: list[asyncio.Future[None]] = []

    def send(self, call: Call, answer: Callable[[Reply], object], *, is_patient: bool) -> None:
        """`answer` has the reply, whenever Redis gives one; while it is told the line is busy."""
        self.is_busy = True
        if self._connection.keeps_order:
            on_reply = partial(self._on_reply, call, answer)
            self._connection.cast(call, on_reply, is_patient=is_patient)
        else:
            self._background.spawn(self._insist(call, answer))

    async def settle(self) -> None:
        """Wait until what is on its way has arrived."""
        if self.is_busy:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _on_reply(
        self, call: Call, answer: Callable[[Reply], object], reply: Reply | StorageError
    ) -> None:
        if isinstance(reply, StorageError):
            self._background.spawn(self._insist(call, answer))
        else:
            self._arrive(answer, reply)

    async def _insist(self, call: Call, answer: Callable[[Reply], object]) -> None:
        while True:
            try:
                reply = await self._store.make(call)
                break
            except StorageError as error:
                self._background.say_unavailable(error)
                await asyncio.sleep(AGAIN_S)
        self._arrive(answer, reply)

    def _arrive(self, answer: Callable[[Reply], object], reply: Reply) -> None:
        try:
            answer(reply)
        finally:
            self.is_busy = False
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
        self._on_free()
