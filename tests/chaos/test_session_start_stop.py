"""Sessions that are stopped, restarted and killed at every moment of their start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from typing import Any

import pytest

from capsule_tasks.errors import SessionStartFailed, SessionStateError
from capsule_tasks.sessions import Session, SessionConfig, SessionState
from capsule_tasks.settings import TimeoutSettings
from tests.chaos.census import Census
from tests.chaos.recorder import Recorder
from tests.chaos.storm import SCALE, SEED, SHARES, STEP_S, unhandled_errors

pytestmark = pytest.mark.chaos

AT_ONCE = 8
_NO_PROCESS = 2**30
ALLOWED = (SessionStartFailed, SessionStateError)


@pytest.mark.parametrize("share", SHARES)
async def test_a_session_stopped_while_it_starts_leaves_nothing_behind(share: int) -> None:
    print(f"CAPSULE_CHAOS_SEED={SEED}")  # noqa: T201 - shown when the test fails
    rng = random.Random(f"{SEED} {share}")
    with unhandled_errors() as unhandled:
        for _ in range(max(2, round(20 * SCALE / len(SHARES)))):
            census = Census()
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(disturbed_life(random.Random(rng.random()), census))
            del group
            await census.back_to_start()
    assert not unhandled, unhandled


async def disturbed_life(rng: random.Random, census: Census) -> None:
    """Start, be disturbed a few times, end; now and then prove to be none the worse for it."""
    warmup = rng.choice((None, "x = 1", "import time\ntime.sleep(0.02)"))
    timeouts = TimeoutSettings(ready_s=STEP_S, shutdown_s=0.5, idle_s=0.01)
    config = SessionConfig(env=census.environment(), warmup=warmup, timeouts=timeouts)
    recorder = Recorder(Session(config))
    session = recorder.session
    calls = [asyncio.create_task(session.start(), name="start")]
    cancelled: set[asyncio.Task[Any]] = set()
    for _ in range(rng.randrange(1, 5)):
        await some_time(rng)
        name = rng.choice(("cancel", "kill", "shutdown", "terminate", "restart"))
        recorder.note(name)
        if name == "cancel":
            victim = rng.choice(calls)
            victim.cancel()
            cancelled.add(victim)
        elif name == "kill":
            with contextlib.suppress(ProcessLookupError):
                os.kill(session.info.pid or _NO_PROCESS, signal.SIGKILL)
        else:
            calls.append(asyncio.create_task(getattr(session, name)(), name=name))
    try:
        await recorder.within(STEP_S, "what was called", asyncio.wait(calls))
        for call in calls:
            if call.cancelled():
                assert call in cancelled, f"{call.get_name()}: nothing cancelled it"
            else:
                assert isinstance(call.exception(), (*ALLOWED, type(None))), call.exception()
        if rng.random() < 0.3:
            await recorder.within(STEP_S, "a last restart", restarted(session))
            assert (await recorder.within(STEP_S, "1 + 1", session.run("1 + 1"))).value == 2
        await recorder.within(
            STEP_S, "the end", rng.choice((session.shutdown, session.terminate))()
        )
        assert session.state is SessionState.TERMINATED
        assert not recorder.violations
    except AssertionError as error:
        error.add_note(f"CAPSULE_CHAOS_SEED={SEED}\n{await recorder.report()}")
        raise


async def restarted(session: Session) -> None:
    try:
        await session.restart()
    except SessionStartFailed:  # it shared a restart whose child had been killed
        await session.restart()


async def some_time(rng: random.Random) -> None:
    if rng.random() < 0.5:
        for _ in range(rng.randrange(30)):
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(rng.random() ** 2 * 0.25)
