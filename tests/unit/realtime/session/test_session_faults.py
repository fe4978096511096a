"""A fault at every await of a whole conversation: whatever happens, nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from capsule_tasks import Agent, RunContext, function_tool
from capsule_tasks.realtime.model import (
    ItemChanged,
    ResponseEnded,
    ResponseStarted,
    SendToolOutput,
    TextDelta,
    ToolCalled,
)
from capsule_tasks.realtime.runner import RealtimeRunner
from capsule_tasks.realtime.session.session import RealtimeSession
from capsule_tasks.realtime.settings import RealtimeConfig
from tests.unit.realtime.session.fake_model import FakeModel

HELLO = {"role": "user", "content": "Hello"}
QUIET = RealtimeConfig(close_timeout_s=5)


class Fault(Exception):
    """The injected error."""


class Steps:
    """Counts the awaits of everything around a session, and calls `act` at one of them."""

    def __init__(self, at: int | None, act: Callable[[], None]) -> None:
        self.count = 0
        self._at = at
        self._act = act

    async def __call__(self) -> None:
        await asyncio.sleep(0)
        self.count += 1
        if self.count == self._at:
            self._act()
            await asyncio.sleep(0)


class CountedModel(FakeModel):
    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self._steps = steps

    async def _step(self, name: str) -> None:
        await self._steps()


class CountedHistory:
    def __init__(self, steps: Steps) -> None:
        self.items = [HELLO]
        self._steps = steps

    async def get_items(self, limit: int | None = None) -> list[dict[str, Any]]:
        await self._steps()
        return list(self.items)

    async def add_items(self, items: list[dict[str, Any]]) -> None:
        await self._steps()
        self.items += items


class Conversation:
    """A session that is opened, calls a tool, changes its agent twice, and is closed."""

    def __init__(self, at: int | None = None, act: Callable[[], None] = lambda: None) -> None:
        self.steps = steps = Steps(at, act)
        self.model = CountedModel(steps)
        self.history = CountedHistory(steps)
        self.calls = 0

        @function_tool
        async def look() -> str:
            await steps()
            self.calls += 1
            return "seen"

        async def instructions(context: RunContext, agent: Agent) -> str:
            await steps()
            return agent.name

        self.billing = Agent(name="Billing", instructions=instructions)
        handoffs: list[Any] = [self.billing]
        self.support = Agent(
            name="Support", instructions=instructions, tools=[look], handoffs=handoffs
        )
        runner = RealtimeRunner(self.support, self.model, QUIET)
        self.session: RealtimeSession = runner.run(history=self.history)

    async def hold(self) -> None:
        async with self.session as session:
            consuming = asyncio.create_task(self._consume())
            try:
                await session.send_message("Look!")
                self.model.says(
                    ResponseStarted("r"),
                    TextDelta("I will.", "r", "item"),
                    ItemChanged({"id": "i", "type": "function_call", **CALL}, is_final=True),
                    ToolCalled("look", "call_1", "{}", response_id="r"),
                    ToolCalled("transfer_to_billing", "call_2", "{}", response_id="r"),
                    ResponseEnded("r"),
                )
                while session.is_open and len(self.model.told(SendToolOutput)) < 2:
                    await asyncio.sleep(0)
                await session.update_agent(self.support)
            finally:
                await session.close()
                await asyncio.gather(consuming, return_exceptions=True)

    async def _consume(self) -> None:
        async for _ in self.session:
            pass

    async def released(self) -> None:
        """Close once more, or twice if a step of the cleanup failed; check what is left."""
        with suppress(Fault, asyncio.CancelledError):
            await self.session.close()
        await self.session.close()
        assert self.model.listeners == []
        assert not self.model.is_connected
        for _ in range(5):  # callbacks of tasks that have ended
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert self.calls <= 1
        assert self.history.items[0] is HELLO
        outputs = [item for item in self.history.items if "output" in item]
        assert len({item["call_id"] for item in outputs}) == len(outputs)


CALL = {"call_id": "call_1", "name": "look", "arguments": "{}", "status": "completed"}


async def count_of_steps() -> int:
    conversation = Conversation()
    await conversation.hold()
    await conversation.released()
    assert conversation.calls == 1
    return conversation.steps.count


async def test_without_a_fault_a_conversation_has_many_steps() -> None:
    assert await count_of_steps() > 10


async def test_an_error_at_any_step_leaves_nothing() -> None:
    def fail() -> None:
        raise Fault

    for at in range(1, await count_of_steps() + 1):
        conversation = Conversation(at, fail)
        with suppress(Exception):
            async with asyncio.timeout(5):
                await conversation.hold()
        assert conversation.steps.count >= at
        await conversation.released()


async def test_a_cancel_at_any_step_leaves_nothing() -> None:
    holding: asyncio.Task[None]

    def cancel() -> None:
        holding.cancel()

    for at in range(1, await count_of_steps() + 1):
        conversation = Conversation(at, cancel)
        holding = asyncio.create_task(conversation.hold())
        await asyncio.wait({holding}, timeout=5)
        assert holding.done()
        assert conversation.steps.count >= at
        await conversation.released()


@pytest.mark.parametrize("way", ["close", "fail"])
async def test_an_end_at_any_step_leaves_nothing(way: str) -> None:
    closing: list[asyncio.Task[None]] = []

    def end() -> None:
        if way == "fail":
            conversation.session.end(Fault())
        else:
            closing.append(asyncio.create_task(conversation.session.close()))

    for at in range(1, await count_of_steps() + 1):
        conversation = Conversation(at, end)
        with suppress(Exception):
            async with asyncio.timeout(5):
                await conversation.hold()
        assert conversation.steps.count >= at
        await asyncio.gather(*closing, return_exceptions=True)
        await conversation.released()


async def test_a_cancel_at_any_moment_leaves_nothing() -> None:
    """Between any two steps of the event loop, not only where something outside is awaited."""
    for ticks in range(1, 400):
        conversation = Conversation()
        holding = asyncio.create_task(conversation.hold())
        for _ in range(ticks):
            await asyncio.sleep(0)
        is_over = holding.done()
        holding.cancel()
        await asyncio.wait({holding}, timeout=5)
        assert holding.done()
        await conversation.released()
        if is_over:
            return
    raise AssertionError("the conversation never ends")
