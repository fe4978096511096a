"""Thousands of realtime sessions: nothing is left of them, and nothing grows."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections import Counter
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import pytest

from capsule_tasks import Agent, function_tool
from capsule_tasks.errors import RealtimeLost
from capsule_tasks.realtime import (
    OpenAIRealtime,
    RealtimeModelConfig,
    RealtimeRunner,
    RealtimeSession,
)
from capsule_tasks.testing.models import calls
from capsule_tasks.testing.realtime import Hold, RealtimeConnection, RealtimeServer, speaks, writes
from tests.chaos.census import Census, resident_mib

SESSIONS = max(100, int(2_000 * float(os.environ.get("CAPSULE_TEST_SCALE", "0.1"))))
SEED = int(os.environ.get("CAPSULE_CHAOS_SEED", random.randrange(2**32)))
_SIDE_BY_SIDE = 8
_SESSION_S = 30.0
_GROWTH_MIB = 8.0
_FATES = ("talk", "speak", "call", "leave", "cancel", "call and leave", "close", "reset", "refuse")
"""The ways in which sessions go on and end. The user's message tells the server which one it is."""


@function_tool
async def look(where: str) -> str:
    """Look somewhere."""
    return f"nothing {where}"


@function_tool
async def wait() -> str:
    """Wait for something that never happens."""
    await asyncio.Event().wait()
    return "it has happened"


@pytest.mark.soak
async def test_sessions_that_end_in_every_way_leave_nothing_behind() -> None:
    print(f"CAPSULE_CHAOS_SEED={SEED}")  # noqa: T201 - to repeat a failure
    fates = random.Random(SEED).choices(_FATES, k=SESSIONS)
    ends: Counter[str] = Counter()
    census = Census()
    warm_mib = 0.0
    async with RealtimeServer(lambda _: repeat(_reply)) as server:
        for share in (fates[: SESSIONS // 4], fates[SESSIONS // 4 :]):
            waiting = iter(share)

            async with asyncio.TaskGroup() as group:
                for _ in range(_SIDE_BY_SIDE):
                    group.create_task(_visitor(server, waiting, ends))
            await server.wait_for_open(0)
            warm_mib = warm_mib or resident_mib()
        grown_mib = resident_mib() - warm_mib
        print(f"{SESSIONS} sessions, {grown_mib:.2f} MiB more; {dict(ends)}")  # noqa: T201
        assert grown_mib < _GROWTH_MIB
    assert ends.total() == SESSIONS
    assert ends["lost"] >= fates.count("refuse")
    await census.back_to_start()
    kinds = (RealtimeSession, OpenAIRealtime, RealtimeConnection)
    assert [each for each in gc.get_objects() if isinstance(each, kinds)] == []


def _reply(connection: RealtimeConnection) -> Any:
    """The server's answer to the last item of the conversation."""
    last = connection.conversation.items[-1]
    if last["type"] == "function_call_output":
        return "There is nothing."
    match last["content"][0]["text"]:
        case "speak":
            return speaks("A sentence that is spoken, and is of no interest at all.")
        case "call":
            return calls("look", {"where": "under the table"})
        case "call and leave":
            return [calls("wait"), calls("look", {"where": "there"})]
        case "cancel" | "leave":
            return writes("half of it", Hold(), "the rest")
        case "close":
            return _closing(connection)
        case "reset":
            connection.abort()
    return "Hello."


async def _closing(connection: RealtimeConnection) -> str:
    await connection.close(1001, "the server goes away")
    return "too late"


async def _visitor(server: RealtimeServer, fates: Iterator[str], ends: Counter[str]) -> None:
    """Have sessions, one after the other; all visitors share the fates that are left."""
    runner = RealtimeRunner(Agent(name="guide", tools=[look, wait]))
    config = RealtimeModelConfig(url=server.url, api_key="a-key")
    for fate in fates:
        if fate == "refuse":
            server.refuse_handshakes(503)
        ends[await _one(runner.run(model_config=config), fate)] += 1
        server.forget()


async def _one(session: RealtimeSession, fate: str) -> str:
    """Have a session meet its fate; returns how it has ended."""
    visit = asyncio.create_task(_visit(session, fate))
    try:
        async with asyncio.timeout(_SESSION_S):
            return await visit
    except RealtimeLost:
        return "lost"
    except asyncio.CancelledError:
        if not visit.cancelled():
            raise
        return "cancelled"


async def _visit(session: RealtimeSession, fate: str) -> str:
    async with session:
        await session.send_message(fate)
        async for event in session:
            match fate, event.type:
                case (("talk" | "speak" | "refuse"), "agent_end"):
                    return "done"
                case "call", "agent_end" if len(session.history) == 4:
                    return "done"
                case "call and leave", "tool_end":
                    return "left"
                case "leave", "agent_start":
                    return "left"
                case "cancel", "agent_start":
                    current = asyncio.current_task()
                    assert current is not None
                    current.cancel()
        return "closed"
