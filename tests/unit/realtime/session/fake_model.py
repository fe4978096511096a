"""A realtime model without a server, for faults that no server can produce."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable

from capsule_tasks.realtime.model import AgentSettings, Command, Listener, ModelEvent
from capsule_tasks.realtime.settings import RealtimeModelConfig


class Gate:
    """Holds whoever comes through, until a test lets them go on."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.released = asyncio.Event()

    async def __call__(self) -> None:
        self.reached.set()
        await self.released.wait()


class FakeModel:
    """Notes what it is told. `steps` has what happens at its awaits, by the name of the step.

    A step is `connect`, `close`, or the name of a command's class. What is put there happens once
    each: an error is raised, a function is called and awaited.
    """

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.commands: list[Command] = []
        self.settings: AgentSettings | None = None
        self.is_connected = False
        self.closes = 0
        self.steps = defaultdict[str, deque[BaseException | Callable[[], Awaitable[None]]]](deque)

    async def connect(self, config: RealtimeModelConfig, settings: AgentSettings) -> None:
        await self._step("connect")
        self.is_connected = True
        self.settings = settings

    def add_listener(self, listener: Listener, *, server_events: bool = False) -> None:
        self.listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        if listener in self.listeners:
            self.listeners.remove(listener)

    async def send_event(self, command: Command) -> None:
        await self.send_event_if(command, lambda: True)

    async def send_event_if(self, command: Command, condition: Callable[[], bool]) -> bool:
        await self._step(type(command).__name__)
        if is_sent := condition():
            self.commands.append(command)
        return is_sent

    async def close(self) -> None:
        self.closes += 1
        await self._step("close")
        self.is_connected = False

    def says(self, *events: ModelEvent) -> list[Awaitable[None]]:
        """Deliver events; answers the pauses that were asked for."""
        return [
            pause
            for event in events
            for listener in list(self.listeners)
            if (pause := listener.on_event(event)) is not None
        ]

    def told(self, kind: type[Command]) -> list[Command]:
        return [command for command in self.commands if isinstance(command, kind)]

    async def _step(self, name: str) -> None:
        await asyncio.sleep(0)
        if self.steps[name]:
            step = self.steps[name].popleft()
            if isinstance(step, BaseException):
                raise step
            await step()
