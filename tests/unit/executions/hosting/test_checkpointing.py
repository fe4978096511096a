"""Few sessions of a worker are saved at the same time."""

from __future__ import annotations

import asyncio

from capsule_tasks.executions.hosting.checkpointing import SaveTurns
from tests.streaming import HANG_S

LONG_S = 1000.0


class Saver:
    """A session that is being saved until it is told to end."""

    def __init__(self, turns: SaveTurns, *, keeps: bool = False) -> None:
        self.began = asyncio.Event()
        self.may_end = asyncio.Event()
        self.task = asyncio.create_task(self._save(turns, keeps))

    async def _save(self, turns: SaveTurns, keeps: bool) -> None:
        async with turns.turn() as turn:
            if keeps:
                turn.keep()
            self.began.set()
            await self.may_end.wait()


async def let_run() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_session_waits_until_another_one_is_saved() -> None:
    turns = SaveTurns(2, LONG_S)
    first, second, third = (Saver(turns) for _ in range(3))
    await let_run()
    assert [saver.began.is_set() for saver in (first, second, third)] == [True, True, False]
    second.may_end.set()
    async with asyncio.timeout(HANG_S):
        await third.began.wait()
    for saver in (first, third):
        saver.may_end.set()
    await asyncio.gather(first.task, second.task, third.task)


async def test_a_slow_session_passes_its_turn_on_once() -> None:
    turns = SaveTurns(1, 0.001)
    slow, stored = Saver(turns), Saver(turns, keeps=True)
    async with asyncio.timeout(HANG_S):
        await stored.began.wait()
    slow.may_end.set()
    await slow.task
    next_one = Saver(turns)
    await asyncio.sleep(0.02)  # longer than a turn that is not kept
    assert not next_one.began.is_set()
    stored.may_end.set()
    next_one.may_end.set()
    await asyncio.gather(stored.task, next_one.task)


async def test_a_session_that_stops_waiting_takes_no_turn() -> None:
    turns = SaveTurns(1, LONG_S)
    first, second = Saver(turns), Saver(turns)
    await let_run()
    second.task.cancel()
    await asyncio.gather(second.task, return_exceptions=True)
    first.may_end.set()
    await first.task
    third = Saver(turns)
    third.may_end.set()
    await third.task
