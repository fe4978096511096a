"""A storm: many faults over many sessions, and what must hold after each of them."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from capsule_tasks.errors import SessionStartFailed
from capsule_tasks.protocol.messages import Result
from capsule_tasks.sessions import SessionConfig, SessionState
from capsule_tasks.settings import (
    ChildSettings,
    DiagnosticSettings,
    InputSettings,
    OutputSettings,
    TimeoutSettings,
)
from tests.chaos.census import Census
from tests.chaos.faults import Fault, Round
from tests.chaos.recorder import Recorder

SCALE = float(os.environ.get("CAPSULE_TEST_SCALE", "0.1"))
SEED = int(os.environ.get("CAPSULE_CHAOS_SEED") or random.SystemRandom().randrange(2**32))
SHARES = range(max(1, round(4 * SCALE)))
"""Long tests run in shares, so that none of them is taken for one that hangs."""
STEP_S = 30.0
"""No step takes this long, on however slow a machine, unless something hangs."""


async def storm(
    recorders: list[Recorder], rng: random.Random, plan: list[Fault], census: Census
) -> None:
    async with asyncio.TaskGroup() as group:
        for number, recorder in enumerate(recorders):
            share = plan[number :: len(recorders)]
            own = random.Random(rng.random())
            group.create_task(
                weather(recorder, own, share, lambda n=number: census.processes(f"-{n}"))
            )


async def weather(
    recorder: Recorder,
    rng: random.Random,
    faults: list[Fault],
    processes: Callable[[], list[int]],
) -> None:
    """One session's share of the storm, then calm: it must be as good as new."""
    for number, fault in enumerate(faults):
        name = getattr(fault, "__name__", str(fault))
        recorder.note(f"=== {number} {name}")
        round_ = Round(recorder, rng, f"{number}-{name}")
        try:
            await recorder.within(STEP_S, name, fault(round_))
            if rng.random() < 0.3:
                await round_.moment()
            await round_.stop_all()
            await recorder.within(STEP_S, f"finishing after {name}", round_.finished())
            await recorder.within(STEP_S, f"rest after {name}", at_rest(recorder, processes))
            await recorder.within(STEP_S, f"recovery from {name}", recovered(recorder, round_))
            assert not recorder.violations
        except AssertionError as error:
            error.add_note(f"CAPSULE_CHAOS_SEED={SEED}\n{await recorder.report()}")
            raise
    await recorder.within(STEP_S, "restart", recorder.session.restart())
    assert await works(recorder, "at last", STEP_S)


async def at_rest(recorder: Recorder, processes: Callable[[], list[int]]) -> None:
    """Nothing runs, and no process of an earlier child does either."""
    session, moving = recorder.session, ("busy", "warming", "shutting_down")
    await until(lambda: not session.info.running and session.state not in moving)
    await until(lambda: session.info.pid is not None or not processes())


async def until(holds: Callable[[], bool]) -> None:
    """Poll for what gives no signal, such as the disappearance of a process."""
    while not holds():
        await asyncio.sleep(0.002)


async def recovered(recorder: Recorder, after: Round) -> None:
    """The session works again; at once, unless what was done to it may come to light later."""
    session = recorder.session
    patience_s = 3.0 if after.is_harmful else STEP_S
    for attempt in range(10):
        rests = session.state in (SessionState.READY, SessionState.IDLE)
        if await works(recorder, f"{after.name} recovery {attempt}", patience_s):
            return
        assert after.is_harmful or not rests, f"{session.state}, but useless"
        try:
            await session.restart()
        except SessionStartFailed as error:
            recorder.note(f"restart failed: {error}")
    raise AssertionError("ten restarts did not bring it back")


async def works(recorder: Recorder, name: str, patience_s: float) -> bool:
    round_ = Round(recorder, random.Random(0), name)
    witness = round_.execute("1 + 1", manner="read", on_busy="wait", timeout_s=patience_s)
    await witness.ended()
    return isinstance(witness.terminal, Result) and witness.terminal.value == 2


def config(rng: random.Random, census: Census, number: int) -> SessionConfig:
    return SessionConfig(
        child=ChildSettings(
            output=OutputSettings(
                backpressure=rng.choice(("block", "block", "drop_oldest")),
                window_bytes=rng.choice((20_000, 200_000, 1_000_000)),
            ),
            input=InputSettings(timeout_s=rng.choice((None, 0.2))),
            diagnostics=DiagnosticSettings(heartbeat_interval_s=0.05),
        ),
        timeouts=TimeoutSettings(
            ready_s=30.0,
            shutdown_s=0.5,
            grace_s=rng.choice((0.1, 0.5)),
            drain_s=0.2,
            idle_s=0.05,
            unresponsive_s=0.2,
        ),
        env=census.environment(f"-{number}"),
        warmup=rng.choice((None, "print('warm')")),
        replace_killed=rng.random() < 0.7,
    )


@contextmanager
def unhandled_errors() -> Iterator[list[dict[str, Any]]]:
    """Errors that the event loop would only have logged: of callbacks, and never retrieved."""
    loop = asyncio.get_running_loop()
    found: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: found.append(context))
    try:
        yield found
    finally:
        loop.set_exception_handler(None)
