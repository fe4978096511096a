"""A session in memory for tests of its tool calls: what it shows, sends and records."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal, Self

from capsule_tasks.errors import RealtimeClosed
from capsule_tasks.realtime.events import RealtimeEvent
from capsule_tasks.realtime.host import AgentSnapshot
from capsule_tasks.realtime.model import AgentSettings, Command, SendToolOutput, ToolCalled
from capsule_tasks.realtime.settings import RealtimeSettings
from capsule_tasks.realtime.tool_calls import ToolCalls
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import RunContext, ToolContext
from capsule_tasks.runs.agents.functions import function_tool
from capsule_tasks.runs.agents.run_config import RunConfig
from capsule_tasks.runs.approvals import PendingCall
from capsule_tasks.runs.engine.setup import AgentBook, RunSetup
from capsule_tasks.runs.records import Item
from capsule_tasks.runs.state import RunState


class ToolHost:
    """A `SessionHost` without a model. Sends fail with the errors in `failures`, one after another.

    `handing_over` takes the place of the model's answer to a handoff.
    """

    def __init__(self, agent: Agent, state: RunState | None = None) -> None:
        self.context = RunContext(run_id="run", context="the caller's")
        self.book = AgentBook(agent)
        self.first = agent
        self.given = state
        self.is_open = True
        self.events: list[RealtimeEvent] = []
        self.sent: list[tuple[str, str]] = []
        self.failures: list[Exception] = []
        self.failed: list[Exception] = []
        self.handing_over: Callable[[], None] = lambda: None
        self.items: list[Item] = []
        """The outputs in the conversation."""
        self.calls = ToolCalls(self, self.items.append, state or self.first_state())
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self.snapshot = await self.snapshot_of(self.first)
        if self.given is not None:
            self.calls.resume(self.snapshot)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.is_open:
            await self.close()

    async def snapshot_of(self, agent: Agent) -> AgentSnapshot:
        able = await self.book.abilities(self.book.identity(agent), self.context)
        run = RunSetup(self.book, RunConfig(), self.context)
        return AgentSnapshot(run, able, AgentSettings("", able.specs, RealtimeSettings()))

    # --- what a test does ---

    def call(self, tool: str, arguments: str = "{}", call_id: str = "c1") -> None:
        self.calls.called(ToolCalled(tool, call_id, arguments), self.snapshot)

    async def settle(self) -> None:
        """Wait until no call has a task any more."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(
        self, open_approvals: Literal["return", "abandon"] = "return"
    ) -> tuple[PendingCall, ...]:
        self.is_open = False
        for task in self._tasks:
            task.cancel()
        await self.settle()
        return self.calls.end(open_approvals)

    @property
    def state(self) -> RunState:
        """The state of the session, as it is read back from where it was stored."""
        return RunState.from_string(self.calls.in_state(self.first_state(), self.first).to_string())

    def first_state(self) -> RunState:
        first = self.book.identity(self.first)
        return RunState(run_id="run", start_agent=first, agent=first)

    def seen(self, kind: str) -> list[Any]:
        return [event for event in self.events if event.type == kind]

    @property
    def kinds(self) -> list[str]:
        return [event.type for event in self.events]

    @property
    def outputs(self) -> dict[str, str]:
        """The recorded outputs. A call has one at most."""
        found = {item["call_id"]: item["output"] for item in self.items}
        assert len(found) == len(self.items)
        return found

    # --- what its parts do ---

    def emit(self, event: RealtimeEvent) -> None:
        self.events.append(event)

    async def send(self, command: Command) -> None:
        await asyncio.sleep(0)
        if not self.is_open:
            raise RealtimeClosed("closed")
        if self.failures:
            raise self.failures.pop(0)
        assert isinstance(command, SendToolOutput)
        self.sent.append((command.call_id, command.output))

    async def send_if(self, command: Command, condition: Callable[[], bool]) -> bool:
        raise NotImplementedError

    def start(self, work: Coroutine[Any, Any, None], about: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=about)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def end(self, failure: Exception | None) -> None:
        assert failure is not None
        self.failed.append(failure)

    async def hand_over(self, to: Agent, of: AgentSnapshot) -> None:
        await asyncio.sleep(0)
        assert of is self.snapshot
        self.handing_over()
        self.snapshot = await self.snapshot_of(to)


FIVE = '{"euros": 5}'


class Shop:
    """A tool `pay`, and what it has paid."""

    def __init__(
        self, before: Callable[[ToolContext], Awaitable[Any]] | None = None, **options: Any
    ) -> None:
        self.paid: list[int] = []

        @function_tool(**options)
        async def pay(context: ToolContext, euros: int) -> str:
            if before is not None:
                await before(context)
            self.paid.append(euros)
            return f"paid {euros}"

        self.pay = pay
        self.agent = Agent(name="Shop", tools=[pay])
