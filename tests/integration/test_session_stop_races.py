"""Stops that meet ends, neighbours and other stops. Each of these once went wrong."""

from __future__ import annotations

import asyncio

from capsule_tasks.protocol.messages import Ack, Output, Result
from capsule_tasks.sessions import Session, SessionConfig
from capsule_tasks.settings import TimeoutSettings
from tests.chaos.workloads import STUBBORN
from tests.sessions import HANG_S, Watched, collect

SHORT = SessionConfig(timeouts=TimeoutSettings(grace_s=0.05, drain_s=0.1))
PATIENT = SessionConfig(timeouts=TimeoutSettings(grace_s=HANG_S, drain_s=2 * HANG_S))
LATE = (
    "import asyncio\n"
    "print('begun')\n"
    "try: await asyncio.sleep(300)\n"
    "except asyncio.CancelledError: await asyncio.sleep(0.3)"
)
"""Stops, but not within a short grace."""


async def test_a_caller_that_gives_up_waiting_has_still_cancelled() -> None:
    async with Session(SHORT) as session:
        watched = Watched(session, STUBBORN["swallows"])
        await watched.until(Output)
        cancelling = asyncio.create_task(session.cancel(watched.execution_id))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        cancelling.cancel()
        assert (await watched.ended()).kind == "killed"
        assert (await session.run("1 + 1")).value == 2


async def test_a_condemned_session_is_replaced_without_a_waiter() -> None:
    async with Session(SHORT) as session:
        neighbour = Watched(session, "import asyncio\nawait asyncio.sleep(300)")
        watched = Watched(session, STUBBORN["await ignores"])
        await watched.until(Output)
        cancelling = asyncio.create_task(session.cancel(watched.execution_id, 0.0))
        async with asyncio.timeout(HANG_S):
            while session.info.condemned_by is None:
                await asyncio.sleep(0)
        cancelling.cancel()
        assert (await watched.ended()).kind == "killed"
        assert (await neighbour.ended()).kind == "lost_with_neighbour"
        assert (await session.run("1 + 1")).value == 2


async def test_neighbours_outlive_an_execution_that_stops_late() -> None:
    async with Session(PATIENT) as session:
        neighbour = Watched(session, "import asyncio\nawait asyncio.sleep(1.0)\n'unharmed'")
        watched = Watched(session, LATE)
        await watched.until(Output)
        await session.cancel(watched.execution_id, 0.05)
        end = await neighbour.ended()
        assert isinstance(end, Result)
        assert end.value == "unharmed"
        assert session.info.condemned_by is None
        assert (await session.run("1 + 1")).value == 2


async def test_two_that_do_not_stop_are_both_killed_and_neither_is_a_neighbour() -> None:
    async with Session(SHORT) as session:
        pair = [Watched(session, STUBBORN["await ignores"]) for _ in range(2)]
        for watched in pair:
            await watched.until(Output)
        outcomes = await asyncio.gather(*(session.cancel(w.execution_id) for w in pair))
        assert outcomes == ["killed", "killed"]
        assert [(await w.ended()).kind for w in pair] == ["killed", "killed"]


async def test_a_cancel_without_grace_does_not_kill_the_next_execution() -> None:
    async with Session() as session:
        for _ in range(20):
            watched = Watched(session, "import time\ntime.sleep(300)")
            await watched.until(Ack)
            cancelling = asyncio.create_task(session.cancel(watched.execution_id, 0.0))
            await watched.ended()
            await cancelling
            assert (await session.run("1 + 1")).value == 2


async def test_a_cancel_stays_a_cancel_when_the_session_is_shut_down() -> None:
    session = Session(PATIENT)
    await session.start()
    watched = Watched(
        session,
        "import time\n"
        "try: print('begun'), time.sleep(300)\n"
        "finally: print('stopping'), time.sleep(0.3)",
    )
    await watched.until(Output)
    cancelling = asyncio.create_task(session.cancel(watched.execution_id))
    await watched.until_output("stopping")
    await session.shutdown()
    assert (await watched.ended()).kind == "cancelled"
    assert await cancelling == "interrupted"


async def test_a_cancel_that_arrives_as_the_code_ends_reports_its_effect() -> None:
    async with Session(PATIENT) as session:
        for turns in range(60):
            name = f"short-{turns}"
            running = asyncio.create_task(collect(session, "x = 1", execution_id=name))
            for _ in range(turns % 20):
                await asyncio.sleep(0)
            outcome = await session.cancel(name)
            end = (await running)[-1]
            assert (outcome == "not_running") == isinstance(end, Result), (outcome, end)
