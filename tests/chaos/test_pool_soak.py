"""A pool over a long day: nothing is lost, nothing is left, nothing grows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal

import pytest

from capsule_tasks.errors import ExecutionFailed, SessionStateError
from capsule_tasks.sessions import Session, SessionConfig, SessionPool
from capsule_tasks.settings import PoolSettings, Profile
from tests.chaos.census import Census, resident_mib

EXECUTIONS = max(500, int(20_000 * float(os.environ.get("CAPSULE_TEST_SCALE", "0.1"))))
SEED = int(os.environ.get("CAPSULE_CHAOS_SEED", random.randrange(2**32)))
_BORROWERS = 8
_STEP_S = 60.0
_GROWTH_MIB = 24.0


@pytest.mark.soak
async def test_a_pool_survives_kills_cancels_and_recycling_with_nothing_left() -> None:
    chance = random.Random(SEED)
    census = Census()
    profile = Profile(
        session=SessionConfig(env=census.environment()),
        pool=PoolSettings(
            min_idle=2, max_sessions=4, fresh=False, max_uses=50, breaker_failures=1000
        ),
    )
    print(f"CAPSULE_CHAOS_SEED={SEED}")  # noqa: T201 - to repeat a failure
    done = 0
    warm_mib = 0.0
    async with SessionPool({"app": profile}) as pool:

        async def borrower(last: int) -> None:
            nonlocal done
            while done < last:
                done += 1
                number = done
                async with asyncio.timeout(_STEP_S), pool.borrow() as session:
                    await _one(session, number, chance)

        for last in (EXECUTIONS // 4, EXECUTIONS):
            async with asyncio.TaskGroup() as group:
                for _ in range(_BORROWERS):
                    group.create_task(borrower(last))
            warm_mib = warm_mib or resident_mib()
        info = pool.info()
        assert info.borrowed == info.waiting == 0
        assert resident_mib() - warm_mib < _GROWTH_MIB
    await census.back_to_start()


async def _one(session: Session, number: int, chance: random.Random) -> None:
    fate = chance.random()
    if fate < 0.9:
        with contextlib.suppress(ExecutionFailed, SessionStateError):
            assert (await session.run(f"{number} + 1")).value == number + 1
    elif fate < 0.95:
        pid = session.info.pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ExecutionFailed, SessionStateError):
            await session.run("1")
    else:
        with contextlib.suppress(ExecutionFailed, SessionStateError):
            running = asyncio.ensure_future(session.run("while True: pass", execution_id="loop"))
            await asyncio.sleep(0)
            while not running.done() and await session.cancel("loop") == "not_running":
                await asyncio.sleep(0)
            await running
