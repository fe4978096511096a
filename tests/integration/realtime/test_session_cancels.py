"""A cancel at every await of a session, over real sockets: nothing is left, and nothing is lost."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from capsule_tasks import Agent, RunContext, function_tool
from capsule_tasks.errors import RealtimeClosed
from capsule_tasks.realtime import (
    RealtimeConfig,
    RealtimeHistoryAdded,
    RealtimeModelConfig,
    RealtimeRunner,
    RealtimeSession,
)
from capsule_tasks.testing.models import calls, hands_over
from capsule_tasks.testing.realtime import RealtimeServer
from tests.integration.realtime.cancelling import CancelAt, cancelling

OUTPUT = "function_call_output"
SCRIPT = [[calls("look"), hands_over("Billing")], "I am Billing.", "I am Billing."]
MOST_AWAITS = 1_000


class ItemList:
    """A history in memory."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = [{"role": "user", "content": "I was here before."}]

    async def get_items(self, limit: int | None = None) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        return list(self.items)

    async def add_items(self, items: list[dict[str, Any]]) -> None:
        await asyncio.sleep(0)
        self.items += items


class Conversation:
    """A session that is opened, calls a tool, changes its agent twice, and is closed."""

    def __init__(self, server: RealtimeServer) -> None:
        self.server = server
        self.history = ItemList()
        self.calls = 0

        @function_tool
        async def look() -> str:
            self.calls += 1
            await asyncio.sleep(0)
            return "seen"

        async def instructions(context: RunContext, agent: Agent) -> str:
            await asyncio.sleep(0)
            return agent.name

        billing = Agent(name="Billing", instructions=instructions)
        self.support = Agent(
            name="Support", instructions=instructions, tools=[look], handoffs=[billing]
        )
        connection = RealtimeModelConfig(url=server.url, api_key="a key")
        runner = RealtimeRunner(self.support, config=RealtimeConfig(close_timeout_s=5))
        self.session: RealtimeSession = runner.run(None, connection, history=self.history)

    async def hold(self) -> None:
        async with self.session as session:
            await session.send_message("Look!")
            outputs = 0
            async for event in session:
                if isinstance(event, RealtimeHistoryAdded):
                    outputs += event.item["type"] == OUTPUT
                if outputs == 2:
                    break
            await session.update_agent(self.support)
            with pytest.raises(RealtimeClosed):
                await self._close_beside(session)

    async def _close_beside(self, session: RealtimeSession) -> None:
        await asyncio.gather(session.close(), session.close())
        await session.interrupt()

    async def check_released(self) -> None:
        with suppress(asyncio.CancelledError):
            await self.session.close()
        await self.session.close()
        await self.server.wait_for_open(0)
        assert self.calls <= 1
        outputs = self._ids_of(OUTPUT)
        assert sorted(outputs) == sorted(set(outputs))
        left = {call.call_id for call in self.session.state.calls}
        assert {*self._ids_of("function_call")} == {*outputs} | left

    def _ids_of(self, kind: str) -> list[str]:
        return [item["call_id"] for item in self.history.items if item.get("type") == kind]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def check_cancels(name: str, *, anybody: bool = False) -> None:
    """Cancel the task with this name at each await, in one conversation each."""
    async with RealtimeServer(lambda number: SCRIPT) as server:
        tasks, files = asyncio.all_tasks(), open_files()
        for at in range(1, MOST_AWAITS):
            conversation = Conversation(server)
            plan = CancelAt(name, at, anybody=anybody)
            with cancelling(plan):
                holding = asyncio.create_task(conversation.hold(), name="conversation")
                await asyncio.wait({holding}, timeout=10)
                assert holding.done(), f"after a cancel at await {at}"
                await conversation.check_released()
            for _ in range(20):  # callbacks of tasks that have ended
                await asyncio.sleep(0)
            assert asyncio.all_tasks() - tasks == set()
            assert open_files() == files
            server.forget()
            if not plan.has_cancelled:
                holding.result()
                return
            holding.cancelled() or holding.exception()  # of either nothing is expected
    raise AssertionError(f"the task {name!r} never ends")


@pytest.mark.parametrize(
    "name",
    [
        "conversation",
        "opening of a realtime session",
        "update of the agent",
        "handoff",
        "call ",
        "closing of a realtime session",
    ],
)
async def test_a_cancel_of_any_task_at_any_await_leaves_nothing(name: str) -> None:
    await check_cancels(name)


async def test_a_cancel_at_any_await_of_anybody_leaves_nothing() -> None:
    """As while the model connects, which it does in a task of its own."""
    await check_cancels("conversation", anybody=True)
