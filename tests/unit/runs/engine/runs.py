"""Runs for tests of the engine: a session in memory, and each mode in which a run is made."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from capsule_tasks.errors import RunStopped
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.engine.events import StreamEvent
from capsule_tasks.runs.engine.results import RunResult
from capsule_tasks.runs.engine.runner import Runner
from capsule_tasks.runs.records import Item
from capsule_tasks.storage.history.types import PoppedSuffix


class MemorySession:
    """A history in memory. Writes take two steps, so that a cancel may come before or after."""

    session_id = "memory"

    def __init__(self, items: list[Item] | None = None) -> None:
        self.items = list(items or [])
        self.batches: list[list[Item]] = []
        self.operations: list[str | None] = []
        """The ids of the operations that have removed items, or tried to."""
        self.fails_with: Exception | None = None

    async def get_items(self, limit: int | None = None) -> list[Item]:
        await asyncio.sleep(0)
        return self.items[-limit:] if limit else list(self.items)

    async def add_items(self, items: list[Item]) -> None:
        await asyncio.sleep(0)
        if self.fails_with is not None:
            raise self.fails_with
        self.items += items
        self.batches.append(list(items))
        await asyncio.sleep(0)

    async def pop_suffix(
        self, expected: list[Item], *, operation_id: str | None = None
    ) -> PoppedSuffix:
        await asyncio.sleep(0)
        self.operations.append(operation_id)
        if self.fails_with is not None:
            raise self.fails_with
        found = self.items[len(self.items) - len(expected) :]
        if found != expected:
            return PoppedSuffix(False, found)
        del self.items[len(self.items) - len(expected) :]
        return PoppedSuffix(True, found)


@dataclass(frozen=True)
class Mode:
    """How a run is made: streamed or not, and its guardrails beside the model or before it."""

    streamed: bool
    parallel: bool

    async def run(self, agent: Agent, given: Any, **options: Any) -> Ended:
        if not self.streamed:
            try:
                return Ended(await Runner.run(agent, given, **options))
            except RunStopped as error:
                return Ended(error=error)
        stream = Runner.run_streamed(agent, given, **options)
        events: list[StreamEvent] = []
        try:
            async for event in stream.events():
                events.append(event)  # noqa: PERF401  those before an error count, too
        except RunStopped as error:
            return Ended(error=error, events=events)
        return Ended(await stream.result(), events=events)


@dataclass
class Ended:
    """The result of a run, or the error that ended it."""

    got: RunResult | None = None
    error: RunStopped | None = None
    events: list[StreamEvent] = field(default_factory=list)

    @property
    def result(self) -> RunResult:
        assert self.got is not None, self.error
        return self.got


MODES = [
    pytest.param(
        Mode(streamed, parallel),
        id=f"{'streamed' if streamed else 'whole'}-{'parallel' if parallel else 'sequential'}",
    )
    for streamed in (False, True)
    for parallel in (False, True)
]


def spelled(items: list[Item]) -> list[str]:
    """Items in short: `user hi`, `call c1`, `output c1 text`, `says done`, `reasoning`."""
    return [_spelled(item) for item in items]


def _spelled(item: Item) -> str:
    match item.get("type"):
        case "function_call":
            return f"call {item['call_id']}"
        case "function_call_output":
            return f"output {item['call_id']} {item['output']}"
        case "reasoning":
            return "reasoning"
    content = item["content"]
    text = content if isinstance(content, str) else content[0]["text"]
    return f"{'says' if item['role'] == 'assistant' else item['role']} {text}"
