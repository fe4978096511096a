"""Few sessions of a worker are saved, and few restored, at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from capsule_tasks.errors import SnapshotError
from capsule_tasks.executions.background import BackgroundTasks
from capsule_tasks.executions.hosting.checkpointing import Checkpoints, SaveTurns
from capsule_tasks.protocol.messages import Restored
from capsule_tasks.storage.sessions.checkpoints import CheckpointManifest
from tests.streaming import HANG_S

LONG_S = 1000.0


class Saver:
    """A session whose child hands over its namespace when it is told to, as does the store."""

    def __init__(self, turns: SaveTurns) -> None:
        self.began = asyncio.Event()
        self.may_arrive = asyncio.Event()
        self.has_arrived = asyncio.Event()
        self.is_stored = asyncio.Event()
        self.task = asyncio.create_task(self._save(turns))

    async def _save(self, turns: SaveTurns) -> None:
        async with turns.turn() as turn:
            self.began.set()
            await turn.arrival(self.may_arrive.wait())
            self.has_arrived.set()
            await self.is_stored.wait()

    async def end(self) -> None:
        self.may_arrive.set()
        self.is_stored.set()
        await self.task


async def let_run() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_session_waits_until_another_one_is_saved() -> None:
    turns = SaveTurns(2, LONG_S)
    first, second, third = (Saver(turns) for _ in range(3))
    await let_run()
    assert [saver.began.is_set() for saver in (first, second, third)] == [True, True, False]
    await second.end()
    async with asyncio.timeout(HANG_S):
        await third.began.wait()
    await asyncio.gather(first.end(), third.end())


async def test_a_slow_child_loses_its_save_and_only_then_another_session_begins() -> None:
    turns = SaveTurns(1, 0.0)
    slow = Saver(turns)
    await let_run()
    assert slow.began.is_set()
    assert not slow.task.done(), "nobody waits"
    other = Saver(turns)
    with pytest.raises(SnapshotError, match="within 0 s, and other sessions wait to be saved"):
        await slow.task
    async with asyncio.timeout(HANG_S):
        await other.began.wait()
    await other.end()


async def test_a_namespace_that_is_here_keeps_its_turn_until_it_is_stored() -> None:
    turns = SaveTurns(1, 0.0)
    here = Saver(turns)
    here.may_arrive.set()
    async with asyncio.timeout(HANG_S):
        await here.has_arrived.wait()
    other = Saver(turns)
    turns.hurry(0.0)
    await let_run()
    assert not here.task.done()
    assert not other.began.is_set()
    await here.end()
    await other.end()


async def test_a_worker_that_stops_gives_children_less_time() -> None:
    turns = SaveTurns(1, LONG_S)
    slow, other = Saver(turns), Saver(turns)
    await let_run()
    assert not slow.task.done()
    turns.hurry(0.0)
    with pytest.raises(SnapshotError):
        await slow.task
    await other.end()


async def test_a_session_that_stops_waiting_takes_no_turn() -> None:
    turns = SaveTurns(1, LONG_S)
    first, second = Saver(turns), Saver(turns)
    await let_run()
    second.task.cancel()
    await asyncio.gather(second.task, return_exceptions=True)
    await first.end()
    await Saver(turns).end()


class Restorer:
    """A session whose store and child wait until they are told to go on."""

    def __init__(self, restores: asyncio.Semaphore) -> None:
        self.is_read = asyncio.Event()
        self.may_send = asyncio.Event()
        self.may_end = asyncio.Event()
        self.pieces = [b"piece"]
        store: Any = self
        self._checkpoints = Checkpoints("s", store, BackgroundTasks(), restores)
        child: Any = self
        self.task = asyncio.create_task(self._checkpoints.restore(child, 1, 0))

    async def find(self, session_id: str) -> CheckpointManifest:
        return CheckpointManifest(generation="1-g", place="redis", size=5, chunks=1, sha256=b"")

    async def read(self, *_: object) -> list[bytes]:
        self.is_read.set()
        return self.pieces

    async def restore(
        self, data: list[bytes], timeout_s: float, on_sent: Callable[[], object]
    ) -> Restored:
        """What the child does."""
        assert data == [b"piece"]
        assert timeout_s > 0
        await self.may_send.wait()
        on_sent()
        await self.may_end.wait()
        return Restored(in_reply_to="r", names=())


async def test_few_checkpoints_are_in_memory_until_their_children_have_them() -> None:
    restores = asyncio.Semaphore(2)
    first, second, third = (Restorer(restores) for _ in range(3))
    await let_run()
    assert [each.is_read.is_set() for each in (first, second, third)] == [True, True, False]
    first.may_send.set()
    async with asyncio.timeout(HANG_S):
        await third.is_read.wait()  # while code of the first checkpoint still runs
    assert not first.task.done()
    assert first.pieces == []
    for each in (first, second, third):
        each.may_send.set()
        each.may_end.set()
    await asyncio.gather(first.task, second.task, third.task)
    assert not restores.locked()


async def test_a_restore_that_is_given_up_ends_its_turn() -> None:
    restores = asyncio.Semaphore(1)
    first, second = Restorer(restores), Restorer(restores)
    await let_run()
    assert not second.is_read.is_set()
    first.task.cancel()
    await asyncio.gather(first.task, return_exceptions=True)
    second.may_send.set()
    second.may_end.set()
    await second.task
