"""Writes of one turn that go to the store together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

from capsule_tasks.storage.runs.types import MAX_CALLS

V = TypeVar("V")
R = TypeVar("R")

MAX_BATCH_BYTES = 1 << 20
"""Values that are written together are smaller than this; a larger one is written by itself."""


class Batches(Generic[V, R]):
    """Values with names, written in order: one write at a time, of all that wait for it by then.

    What is asked for in one iteration of the event loop is written together, and so is what is
    asked for while a write is on its way. Whoever is cancelled before the write of its value takes
    the value back; a write that is on its way goes on without it.
    """

    def __init__(
        self,
        write: Callable[[Mapping[str, V]], Awaitable[Mapping[str, R]]],
        size_of: Callable[[V], int] = lambda _: 0,
    ) -> None:
        """`write` gives an answer for each value. What it raises is raised for each of them."""
        self._write = write
        self._size_of = size_of
        self._waiting: list[tuple[str, V, asyncio.Future[R]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def ask(self, name: str, value: V) -> R:
        """The answer to the write of a value."""
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((name, value, answer))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all())
        return await answer

    async def drained(self) -> None:
        """Wait until nothing is being written any more."""
        if self._writer is not None:
            await asyncio.wait({self._writer})

    async def _write_all(self) -> None:
        batch: dict[str, tuple[V, asyncio.Future[R]]] = {}
        try:
            while batch := self._next_batch():
                await self._write_one(batch)
        finally:
            self._writer = None
            # Something is left only if the event loop ends: then nobody would write it.
            for answer in (*(each[1] for each in batch.values()), *(e[2] for e in self._waiting)):
                answer.cancel()

    async def _write_one(self, batch: Mapping[str, tuple[V, asyncio.Future[R]]]) -> None:
        try:
            answers = await self._write({name: value for name, (value, _) in batch.items()})
        except Exception as error:  # noqa: BLE001  whoever asked for the write gets it
            for _, answer in batch.values():
                if not answer.done():
                    answer.set_exception(error)
            return
        for name, (_, answer) in batch.items():
            if not answer.done():
                answer.set_result(answers[name])

    def _next_batch(self) -> dict[str, tuple[V, asyncio.Future[R]]]:
        """Values that wait. Of two with one name the second waits for the next write."""
        batch: dict[str, tuple[V, asyncio.Future[R]]] = {}
        size, waiting = 0, [each for each in self._waiting if not each[2].done()]
        self._waiting = []
        for name, value, answer in waiting:
            size += self._size_of(value)
            is_full = (bool(batch) and size > MAX_BATCH_BYTES) or len(batch) >= MAX_CALLS
            if name in batch or is_full:
                self._waiting.append((name, value, answer))
            else:
                batch[name] = value, answer
        return batch
