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


Entry = tuple[str, V, asyncio.Future[R]]


class Batches(Generic[V, R]):
    """Values with names, written in order: one write at a time, of all that wait for it by then.

    What is asked for in one iteration of the event loop is written together, and so is what is
    asked for while a write is on its way. A write of several values outlives those who asked for
    it; a single one is made by whoever asked.
    """

    def __init__(
        self,
        write: Callable[[Mapping[str, V]], Awaitable[Mapping[str, R]]],
        size_of: Callable[[V], int] = lambda _: 0,
        *,
        outlives_callers: bool = False,
    ) -> None:
        """`write` gives an answer for each value. What it raises is raised for each of them.

        With `outlives_callers` each value is written, whoever is cancelled, and if need be again;
        else a value that is not on its way is taken back.
        """
        self._write = write
        self._size_of = size_of
        self._outlives_callers = outlives_callers
        self._waiting: list[Entry[V, R]] = []
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._writer: asyncio.Task[None] | None = None

    async def ask(self, name: str, value: V) -> R:
        """The answer to the write of a value."""
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        if not self._is_idle.is_set():
            self._waiting.append((name, value, answer))
            return await answer
        self._is_idle.clear()
        try:
            await asyncio.sleep(0)  # for the others of this iteration
            if not self._waiting:
                return (await self._write({name: value}))[name]
            self._waiting.insert(0, (name, value, answer))
        except asyncio.CancelledError:
            if self._outlives_callers:
                self._waiting.insert(0, (name, value, answer))
            raise
        finally:
            if self._waiting:
                self._writer = asyncio.create_task(self._write_all())
            else:
                self._is_idle.set()
        return await answer

    async def drained(self) -> None:
        """Wait until nothing is being written any more."""
        await self._is_idle.wait()

    async def _write_all(self) -> None:
        batch: dict[str, Entry[V, R]] = {}
        try:
            while batch := self._next_batch():
                await self._write_some(batch)
        finally:
            # Something is left only if the event loop ends: then nobody would write it.
            for _, _, answer in (*batch.values(), *self._waiting):
                answer.cancel()
            self._waiting.clear()
            self._is_idle.set()

    async def _write_some(self, batch: Mapping[str, Entry[V, R]]) -> None:
        try:
            answers = await self._write({name: value for name, value, _ in batch.values()})
        except Exception as error:  # noqa: BLE001  whoever asked for the write gets it
            for _, _, answer in batch.values():
                if not answer.done():
                    answer.set_exception(error)
                    answer.exception()  # it was seen, although whoever asked may be gone
            return
        for name, _, answer in batch.values():
            if not answer.done():
                answer.set_result(answers[name])

    def _next_batch(self) -> dict[str, Entry[V, R]]:
        """Values that wait. Of two with one name the second waits for the next write."""
        batch: dict[str, Entry[V, R]] = {}
        size, waiting = 0, self._waiting
        self._waiting = []
        for entry in waiting:
            name, value, answer = entry
            if answer.done() and not self._outlives_callers:
                continue
            size += self._size_of(value)
            is_full = (bool(batch) and size > MAX_BATCH_BYTES) or len(batch) >= MAX_CALLS
            if name in batch or is_full:
                self._waiting.append(entry)
            else:
                batch[name] = entry
        return batch
