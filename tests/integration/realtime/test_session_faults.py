"""A fault at every await of a session, over real sockets: nothing is left, and no call is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from capsule_tasks import Agent, Handoff, RunContext, function_tool
from capsule_tasks.errors import CallbackFailed, RealtimeClosed
from capsule_tasks.realtime import (
    OpenAIRealtime,
    RealtimeConfig,
    RealtimeHistoryAdded,
    RealtimeModelConfig,
    RealtimeRunner,
    RealtimeSession,
)
from capsule_tasks.realtime.model import AgentSettings, Command
from capsule_tasks.testing.models import calls, hands_over
from capsule_tasks.testing.realtime import RealtimeServer
from tests.integration.realtime.cancelling import CancelAt, cancelling

OUTPUT = "function_call_output"
SCRIPT = [[calls("look"), hands_over("Billing")], "I am Billing.", "I am Billing."]
MOST_AWAITS = 1_000


class Fault(Exception):
    """What goes wrong."""


class Steps:
    """The moments at which something outside of the session is awaited; one of them may fail."""

    def __init__(self, failing: int | None) -> None:
        self.count = 0
        self._failing = failing

    async def __call__(self) -> None:
        await asyncio.sleep(0)
        self.count += 1
        if self.count == self._failing:
            raise Fault


class FaultyModel(OpenAIRealtime):
    """Commands fail before they are written, or after that."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self._steps = steps

    async def connect(self, config: RealtimeModelConfig, settings: AgentSettings) -> None:
        await self._steps()
        await super().connect(config, settings)

    async def send_event_if(self, command: Command, condition: Callable[[], bool]) -> bool:
        await self._steps()
        is_sent = await super().send_event_if(command, condition)
        await self._steps()
        return is_sent

    async def close(self) -> None:
        await self._steps()
        await super().close()
        await self._steps()


class ItemList:
    """A history in memory, which knows a repeated write by its operation."""

    def __init__(self, steps: Steps) -> None:
        self.items: list[dict[str, Any]] = [{"role": "user", "content": "I was here before."}]
        self._known: set[str] = set()
        self._steps = steps

    async def get_items(self, limit: int | None = None) -> list[dict[str, Any]]:
        await self._steps()
        return self.items[-limit:] if limit else list(self.items)

    async def add_items(self, items: list[dict[str, Any]], *, operation_id: str) -> None:
        await self._steps()
        if operation_id not in self._known:
            self._known.add(operation_id)
            self.items += items
        await self._steps()


class Conversation:
    """A session that is opened, calls a tool, changes its agent twice, and is closed."""

    def __init__(self, server: RealtimeServer, failing: int | None = None) -> None:
        self.server = server
        self.steps = steps = Steps(failing)
        self.history = ItemList(steps)
        self.calls = 0

        @function_tool
        async def look() -> str:
            self.calls += 1
            await steps()
            return "seen"

        async def instructions(context: RunContext, agent: Agent) -> str:
            await steps()
            return agent.name

        async def on_handoff(context: RunContext) -> None:
            await steps()

        billing = Agent(name="Billing", instructions=instructions)
        handoffs: list[Any] = [Handoff(billing, on_handoff=on_handoff)]
        self.support = Agent(
            name="Support", instructions=instructions, tools=[look], handoffs=handoffs
        )
        connection = RealtimeModelConfig(url=server.url, api_key="a key")
        config = RealtimeConfig(close_timeout_s=5)
        runner = RealtimeRunner(self.support, lambda: FaultyModel(steps), config)
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
        with suppress(Fault, asyncio.CancelledError):
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


async def check_released(conversation: Conversation, tasks: set[Any], files: int) -> None:
    """Check that nothing is left of a conversation that has ended."""
    await conversation.check_released()
    for _ in range(20):  # callbacks of tasks that have ended
        await asyncio.sleep(0)
    assert asyncio.all_tasks() - tasks == set()
    assert open_files() == files
    conversation.server.forget()


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
                await check_released(conversation, tasks, files)
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


async def test_an_error_of_anything_that_is_awaited_leaves_nothing() -> None:
    async with RealtimeServer(lambda number: SCRIPT) as server:
        tasks, files = asyncio.all_tasks(), open_files()
        for failing in range(1, MOST_AWAITS):
            conversation = Conversation(server, failing)
            with suppress(Fault, CallbackFailed):
                async with asyncio.timeout(10):
                    await conversation.hold()
            await check_released(conversation, tasks, files)
            if conversation.steps.count < failing:
                return
    raise AssertionError("the conversation never ends")
