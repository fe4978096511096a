"""A listener of a model, and what tests of OpenAIRealtime connect it with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from capsule_tasks.realtime.model import (
    AgentSettings,
    ModelEvent,
    SendMessage,
)
from capsule_tasks.realtime.openai.websocket import OpenAIRealtime
from capsule_tasks.realtime.settings import RealtimeModelConfig, RealtimeSettings
from capsule_tasks.runs.models.model import ToolSpec
from capsule_tasks.testing.realtime import RealtimeServer

E = TypeVar("E", bound=ModelEvent)
LOOK = ToolSpec(name="look", description="Look.", parameters={"type": "object", "properties": {}})
HI = SendMessage(({"type": "input_text", "text": "Hi"},))


def agent(*tools: ToolSpec, instructions: str = "Be kind.", **settings: Any) -> AgentSettings:
    return AgentSettings(instructions, tools, RealtimeSettings(**settings))


class Heard:
    """A listener that keeps the events, and that a test can wait for."""

    def __init__(self) -> None:
        self.events: list[ModelEvent] = []
        self.on: Callable[[ModelEvent], Awaitable[None] | None] = lambda _: None
        self._change = asyncio.Event()

    def on_event(self, event: ModelEvent) -> Awaitable[None] | None:
        self.events.append(event)
        self._change.set()
        return self.on(event)

    def all(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    async def wait(self, kind: type[E], count: int = 1) -> E:
        """Wait until so many such events were heard; returns the last of them."""
        async with asyncio.timeout(5):
            while len(found := self.all(kind)) < count:
                self._change.clear()
                await self._change.wait()
        return found[count - 1]


def config(server: RealtimeServer, **fields: Any) -> RealtimeModelConfig:
    return RealtimeModelConfig(**{"url": server.url, "api_key": "a key", **fields})


async def opened(model: OpenAIRealtime, server: RealtimeServer, *tools: ToolSpec) -> None:
    await model.connect(config(server), agent(*tools))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what nobody announces."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)
