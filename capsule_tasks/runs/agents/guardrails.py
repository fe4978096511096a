"""Guardrails: checks of a run's input, its output, and the calls of its tools."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from capsule_tasks.runs.records import Item

if TYPE_CHECKING:
    from capsule_tasks.runs.agents.agent import Agent
    from capsule_tasks.runs.agents.contexts import RunContext


@dataclass(frozen=True)
class Verdict:
    """What a guardrail of an input or an output found."""

    tripped: bool = False
    info: Any = None


@dataclass(frozen=True)
class ToolVerdict:
    """What a tool guardrail found: the call goes on, its output is replaced, or the run ends."""

    behavior: Literal["allow", "reject", "raise"] = "allow"
    message: str | None = None
    """In place of the output, if the call is rejected."""
    info: Any = None


@dataclass(frozen=True)
class InputGuardrail:
    """Checks the input of a run, beside the first model call or before it."""

    check: Callable[[RunContext, Agent, str | list[Item]], Verdict | Awaitable[Verdict]]
    name: str
    parallel: bool = True
    """Beside the first model call, whose reply waits for the verdict; else before that call."""


@dataclass(frozen=True)
class OutputGuardrail:
    """Checks the final output of a run before it is stored or returned."""

    check: Callable[[RunContext, Agent, Any], Verdict | Awaitable[Verdict]]
    name: str


@dataclass(frozen=True)
class ToolGuardrail:
    """Checks a tool call before it is made, or its output.

    A guardrail before the call runs after an approval in any case, as the world may have changed
    since; with `before_approval` it runs before people are asked, too.
    """

    check: Callable[..., ToolVerdict | Awaitable[ToolVerdict]]
    """Called with the `ToolContext`; one for outputs also with the output."""
    name: str
    before_approval: bool = False
