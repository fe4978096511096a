"""Tools of agents: functions, and what is run elsewhere behind one port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from capsule_tasks.runs.agents.contexts import ToolContext
from capsule_tasks.runs.agents.guardrails import ToolGuardrail
from capsule_tasks.runs.identity import ToolKey

if TYPE_CHECKING:
    from capsule_tasks.runs.agents.agent import Agent
    from capsule_tasks.runs.agents.contexts import RunContext
    from capsule_tasks.runs.parking import Limits

OnUncertain = Literal["retry", "park", "fail", "tell"]
"""The policy for a tool call that was started and may or may not have been made: make it again,
wait for a person who finds out, fail the run, or tell the model."""


@dataclass(kw_only=True)
class Tool:
    """A tool that this program runs. `invoke` gets the arguments as the model sent them."""

    name: str
    description: str
    parameters: dict[str, Any]
    invoke: Callable[[ToolContext, str], Awaitable[Any]]
    strict: bool = True
    namespace: str | None = None
    needs_approval: bool | Callable[[ToolContext], bool | Awaitable[bool]] = False
    is_enabled: bool | Callable[[RunContext, Agent], bool | Awaitable[bool]] = True
    input_guardrails: list[ToolGuardrail] = field(default_factory=list)
    output_guardrails: list[ToolGuardrail] = field(default_factory=list)
    timeout_s: float | None = None
    """A call that takes longer leaves the call uncertain."""
    on_error: Callable[[ToolContext, Exception], str] | Literal["tell", "raise"] = "tell"
    """The text for the model about an error of the tool; `raise` fails the run."""
    on_uncertain: OnUncertain | None = None
    """None for the policy of the run."""
    limits: Limits | None = None
    """Who may approve a call, how long, and what happens then; None for those of the run."""

    @property
    def key(self) -> ToolKey:
        if self.namespace is not None:
            return ToolKey.namespaced(self.namespace, self.name)
        return ToolKey(self.name)


@dataclass(kw_only=True)
class AgentTool:
    """An agent that another one calls as a tool, with a run of its own within the turn."""

    name: str
    description: str
    agent: Agent
    needs_approval: bool | Callable[[ToolContext], bool | Awaitable[bool]] = False
    is_enabled: bool | Callable[[RunContext, Agent], bool | Awaitable[bool]] = True
    max_turns: int | None = None
    """Of the inner run; None for that of the run."""
    output: Callable[[Any], Any] | None = None
    """Makes the tool's output of the inner run's."""
    limits: Limits | None = None

    @property
    def key(self) -> ToolKey:
        return ToolKey(self.name)


@dataclass(frozen=True)
class HostedTool:
    """A tool that the model's server runs, in the words of that server."""

    spec: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.spec.get("type", "hosted"))
