"""A session for tests of its parts: it notes what the parts do with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from capsule_tasks.realtime.events import RealtimeEvent
from capsule_tasks.realtime.host import AgentSnapshot
from capsule_tasks.realtime.model import AgentSettings, Command
from capsule_tasks.realtime.settings import RealtimeSettings
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.agents.contexts import RunContext
from capsule_tasks.runs.agents.outputs import output_type_of
from capsule_tasks.runs.agents.run_config import RunConfig
from capsule_tasks.runs.engine.setup import Abilities, AgentBook, RunSetup
from capsule_tasks.runs.identity import AgentId


def snapshot_of(agent: Agent) -> AgentSnapshot:
    """The snapshot of an agent that has neither tools nor handoffs."""
    context = RunContext(run_id="run")
    able = Abilities(agent, AgentId(agent.name), {}, {}, (), output_type_of(None), b"")
    run = RunSetup(AgentBook(agent), RunConfig(), context)
    return AgentSnapshot(run, able, AgentSettings("", (), RealtimeSettings()))


class FakeHost:
    """Notes events, commands and errors, in order. A test may do something within a command."""

    def __init__(self, agent: Agent) -> None:
        self.context = RunContext(run_id="run")
        self.snapshot = snapshot_of(agent)
        self.is_open = True
        self.events: list[RealtimeEvent] = []
        self.commands: list[Command] = []
        self.order: list[object] = []
        self.errors: list[BaseException] = []
        self.on_command: Callable[[Command], Any] = lambda command: None
        self._tasks: set[asyncio.Task[None]] = set()

    def emit(self, event: RealtimeEvent) -> None:
        self.events.append(event)
        self.order.append(event)

    async def send(self, command: Command) -> None:
        await asyncio.sleep(0)
        self.commands.append(command)
        self.order.append(command)
        self.on_command(command)

    async def send_if(self, command: Command, condition: Callable[[], bool]) -> bool:
        await asyncio.sleep(0)
        if is_due := condition():
            await self.send(command)
        return is_due

    def start(self, work: Coroutine[Any, Any, None], about: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=about)
        self._tasks.add(task)
        return task

    def end(self, failure: Exception | None) -> None:
        raise AssertionError(failure)

    async def hand_over(self, to: Agent, of: AgentSnapshot) -> None:
        raise NotImplementedError

    async def settle(self) -> None:
        """Wait until all tasks have ended, and those that they have started."""
        while self._tasks:
            done, self._tasks = await asyncio.wait(self._tasks)
            self.errors += [error for task in done if (error := task.exception())]

    async def cancel(self) -> None:
        """Cancel all tasks, as the close of a session does."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
