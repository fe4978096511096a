"""Tools of agents: functions, and what is run elsewhere behind one port."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from capsule_tasks.errors import ToolTimeout
from capsule_tasks.runs.agents.checking import check, check_fields, check_tool_name
from capsule_tasks.runs.agents.contexts import RunContext, ToolContext
from capsule_tasks.runs.agents.guardrails import ToolGuardrail
from capsule_tasks.runs.agents.parameters import Parameters, parameters_of
from capsule_tasks.runs.identity import ToolKey
from capsule_tasks.runs.models.model import ToolSpec
from capsule_tasks.runs.parking import Limits
from capsule_tasks.settings import PositiveCount, PositiveSeconds

if TYPE_CHECKING:
    from capsule_tasks.runs.agents.agent import Agent

OnUncertain = Literal["retry", "park", "fail", "tell"]
"""The policy for a tool call that was started and may or may not have been made: make it again,
wait for a person who finds out, fail the run, or tell the model."""


@dataclass(kw_only=True, frozen=True, eq=False)
class Tool:
    """A tool that this program runs. `invoke` gets the arguments as the model sent them.

    `invoke` raises WrongArguments, before it does anything, for arguments that do not fit; the
    text of that error is for the model, whatever `on_error` says. `call` is what runs call.
    """

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
    timeout_s: PositiveSeconds | None = None
    """A call that takes longer leaves the call uncertain; a function in a thread goes on there."""
    on_error: Callable[[ToolContext, Exception], str] | Literal["tell", "raise"] = "tell"
    """The text for the model about an error of the tool; `raise` fails the run."""
    on_uncertain: OnUncertain | None = None
    """None for the policy of the run."""
    limits: Limits | None = None
    """Limits of approvals: by whom, how long, and what happens then; None for those of the run."""
    check: Callable[[str], None] | None = None
    """Raises WrongArguments for arguments that do not fit, so that nobody is asked about them."""

    def __post_init__(self) -> None:
        check_tool_name("Tool.name", self.name)
        check_fields(Tool, self, self.name)
        if self.namespace is not None:
            check_tool_name(f"Tool({self.name}).namespace", self.namespace)

    def __repr__(self) -> str:
        return f"Tool({self.name!r})"

    @cached_property
    def key(self) -> ToolKey:
        if self.namespace is not None:
            return ToolKey.namespaced(self.namespace, self.name)
        return ToolKey(self.name)

    def as_spec(self) -> ToolSpec:
        return ToolSpec(
            name=self.name,
            description=self.description,
            parameters=self.parameters,
            strict=self.strict,
            namespace=self.namespace,
        )

    async def call(self, context: ToolContext, arguments: str) -> Any:
        """Invoke the tool; after `timeout_s`, raise ToolTimeout."""
        if self.timeout_s is None:
            return await self.invoke(context, arguments)
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                return await self.invoke(context, arguments)
        except TimeoutError:
            if not limit.expired():
                raise  # an error of the tool's own
            raise ToolTimeout(self.name, self.timeout_s) from None


def _of_agent(input: str) -> None:  # noqa: A002  models know it by this name
    """Show the parameters of an agent as a tool."""


@dataclass(kw_only=True, frozen=True, eq=False)
class AgentTool:
    """An agent that another one calls as a tool, with a run of its own within the turn."""

    name: str
    description: str
    agent: Agent
    needs_approval: bool | Callable[[ToolContext], bool | Awaitable[bool]] = False
    is_enabled: bool | Callable[[RunContext, Agent], bool | Awaitable[bool]] = True
    max_turns: PositiveCount | None = None
    """The most turns of the inner run; None for the limit of the run."""
    output: Callable[[Any], Any] | None = None
    """Makes the tool's output of the inner run's."""
    limits: Limits | None = None

    def __post_init__(self) -> None:
        check_tool_name("AgentTool.name", self.name)
        check_fields(AgentTool, self, self.name)

    def __repr__(self) -> str:
        return f"AgentTool({self.name!r})"

    @cached_property
    def key(self) -> ToolKey:
        return ToolKey(self.name)

    @cached_property
    def _parameters(self) -> Parameters:
        return parameters_of(_of_agent, self.name)

    def as_spec(self) -> ToolSpec:
        schema = self._parameters.schema
        return ToolSpec(name=self.name, description=self.description, parameters=schema)

    def input_of(self, arguments: str) -> str:
        """The input of the inner run. Raises WrongArguments, which is for the model."""
        _, named = self._parameters.decode(arguments)
        return str(named["input"])


@dataclass(frozen=True)
class HostedTool:
    """A tool that the model's server runs, in the words of that server."""

    spec: dict[str, Any]

    def __post_init__(self) -> None:
        spec: object = self.spec
        is_valid = isinstance(spec, dict) and isinstance(spec.get("type"), str)
        check("HostedTool.spec", self.spec, is_valid, "a dict with a type, as the server wants it")

    @property
    def name(self) -> str:
        return str(self.spec["type"])

    def as_spec(self) -> ToolSpec:
        return ToolSpec(name=self.name, description="", parameters={}, hosted=self.spec)
