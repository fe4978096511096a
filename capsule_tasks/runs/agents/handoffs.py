"""Handoffs: one agent gives the run to another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capsule_tasks.runs.records import Item

if TYPE_CHECKING:
    from capsule_tasks.runs.agents.agent import Agent
    from capsule_tasks.runs.agents.contexts import RunContext


@dataclass(frozen=True)
class HandoffInput:
    """The model's view when a run is handed over: `earlier` items, and those of this turn."""

    earlier: list[Item]
    turn: list[Item]
    arguments: str


@dataclass(kw_only=True)
class Handoff:
    """A handoff with more than its defaults. An agent in `Agent.handoffs` stands for one."""

    agent: Agent
    name: str | None = None
    """Of the tool; by default `transfer_to_<agent>`."""
    description: str | None = None
    input_type: Any = None
    """The type of the arguments that the model gives."""
    on_handoff: Callable[..., Awaitable[None] | None] | None = None
    """Called with the `RunContext`, and with the arguments if there is an `input_type`."""
    input_filter: Callable[[HandoffInput], list[Item] | Awaitable[list[Item]]] | None = None
    """The next agent's view of what came before. The history and the events keep everything."""
    is_enabled: bool | Callable[[RunContext, Agent], bool | Awaitable[bool]] = True
