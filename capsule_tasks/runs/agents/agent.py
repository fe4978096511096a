"""Agents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from capsule_tasks.runs.agents.checking import check_fields, snake_case
from capsule_tasks.runs.agents.contexts import RunContext, ToolContext
from capsule_tasks.runs.agents.guardrails import InputGuardrail, OutputGuardrail
from capsule_tasks.runs.agents.handoffs import Handoff
from capsule_tasks.runs.agents.outputs import output_type_of
from capsule_tasks.runs.agents.tools import AgentTool, HostedTool, Tool
from capsule_tasks.runs.models.model import Model, ModelSettings
from capsule_tasks.settings import Text

Instructions = str | Callable[[RunContext, "Agent"], str | Awaitable[str]] | None


@dataclass(frozen=True)
class ToolResult:
    """A tool call of a turn, for `Agent.after_tools`."""

    tool: str
    call_id: str
    output: Any


AfterTools = (
    Literal["ask_again", "stop"]
    | frozenset[str]
    | Callable[[RunContext, list[ToolResult]], Any | Awaitable[Any]]
)


@dataclass(kw_only=True, eq=False)
class Agent:
    """A model with instructions, tools, and agents to which it may give the run."""

    name: Text
    instructions: Instructions = None
    model: Model | str | None = None
    """A model, or a name for the model provider of the run."""
    model_settings: ModelSettings = field(default_factory=ModelSettings)
    tools: list[Tool | AgentTool | HostedTool] = field(default_factory=list)
    handoffs: list[Agent | Handoff] = field(default_factory=list)
    input_guardrails: list[InputGuardrail] = field(default_factory=list)
    output_guardrails: list[OutputGuardrail] = field(default_factory=list)
    output_type: Any = str
    """The type of the final output: text, or what msgspec can make from JSON."""
    after_tools: AfterTools = "ask_again"
    """After its tools the model is asked again; or their first output is the final one (`stop`),
    or that of the tools with these names, or whatever a function returns that is not None."""
    reset_tool_choice: bool = True
    """After a tool was used, `tool_choice` is the model's own again: it would call it for ever."""
    handoff_description: Text | None = None
    key: Text | None = None
    """Tells apart agents of one name that are otherwise alike."""

    def __post_init__(self) -> None:
        check_fields(Agent, self, self.name)
        for target in self.handoffs:
            if isinstance(target, Agent):
                Handoff(target)  # an agent may have a name that makes no name of a tool
        output_type_of(self.output_type)

    def __repr__(self) -> str:
        return f"Agent({self.name!r})"  # events and errors show agents; all fields are a page

    def clone(self, **changes: Any) -> Self:
        """A copy of the agent with some of its fields changed; lists are copied."""
        lists = {name: list(value) for name, value in vars(self).items() if isinstance(value, list)}
        return replace(self, **(lists | changes))

    def as_tool(
        self,
        name: str | None = None,
        description: str | None = None,
        *,
        needs_approval: bool | Callable[[ToolContext], bool | Awaitable[bool]] = False,
        max_turns: int | None = None,
        output: Callable[[Any], Any] | None = None,
    ) -> AgentTool:
        """This agent as a tool of another one, which is given one text and gets one output."""
        return AgentTool(
            name=snake_case(self.name) if name is None else name,
            description=description or self.handoff_description or "",
            agent=self,
            needs_approval=needs_approval,
            max_turns=max_turns,
            output=output,
        )
