"""What the parts of a session may do with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from capsule_tasks.realtime.events import RealtimeEvent
from capsule_tasks.realtime.model import AgentSettings, Command
from capsule_tasks.runs.agents.agent import Agent
from capsule_tasks.runs.engine.setup import Abilities, RunSetup


@dataclass(frozen=True, eq=False)
class AgentSnapshot:
    """An agent as it was told to the model: what was resolved once for a transition."""

    run: RunSetup
    """The agents that it can hand over to are in the book of this."""
    able: Abilities
    settings: AgentSettings

    @property
    def agent(self) -> Agent:
        return self.able.agent


class SessionHost(Protocol):
    """A session, for the parts that it consists of."""

    @property
    def snapshot(self) -> AgentSnapshot:
        """The agent that the model works as now."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether anything may still be sent and done."""
        ...

    def emit(self, event: RealtimeEvent) -> None:
        """Show an event to those who iterate over the session; from any thread, as tools run."""
        ...

    async def send(self, command: Command) -> None:
        """Tell the model. Raises RealtimeClosed once the session closes."""
        ...

    async def send_if(self, command: Command, condition: Callable[[], bool]) -> bool:
        """Tell the model, if the condition holds at the write and the session is open."""
        ...

    def start(self, work: Coroutine[Any, Any, None], about: str) -> asyncio.Task[None]:
        """Do this in a task that the session owns: it is cancelled, and waited for, at the close.

        An error of it becomes an `error` event.
        """
        ...

    def end(self, failure: Exception | None) -> None:
        """End the session: it closes, and its iterators end, or raise the failure."""
        ...

    async def hand_over(self, to: Agent, of: AgentSnapshot) -> None:
        """Make an agent that `of` can hand over to the current one, once the model has accepted.

        Raises RealtimeRefused or another error if it has not; the agent is the same as before then.
        """
        ...
