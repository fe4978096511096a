"""Hooks without the starts of agents that only resuming turn by turn causes."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from agents import AgentHooks, RunHooks

starts_hidden_of: ContextVar[Any] = ContextVar("capsule_starts_hidden_of", default=None)
"""The agent that goes on in this turn, whose start was told of in an earlier turn."""


class QuietRunHooks(RunHooks[Any]):
    """The hooks of a run. The SDK tells of an agent's start with each resume; they hear it once."""

    def __init__(self, inner: RunHooks[Any]) -> None:
        self._inner = inner

    async def on_agent_start(self, context: Any, agent: Any) -> None:
        if starts_hidden_of.get() is not agent:
            await self._inner.on_agent_start(context, agent)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and name != "on_agent_start":
            return getattr(object.__getattribute__(self, "_inner"), name)
        return object.__getattribute__(self, name)


class QuietAgentHooks(AgentHooks[Any]):
    """The hooks of one agent, in the same way."""

    def __init__(self, inner: AgentHooks[Any]) -> None:
        self._inner = inner

    async def on_start(self, context: Any, agent: Any) -> None:
        if starts_hidden_of.get() is not agent:
            await self._inner.on_start(context, agent)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and name != "on_start":
            return getattr(object.__getattribute__(self, "_inner"), name)
        return object.__getattribute__(self, name)
