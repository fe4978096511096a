"""Tools of agents: functions, and what is run elsewhere behind one port."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from capsule_tasks.errors import ToolTimeout, WrongArguments
from capsule_tasks.runs.agents.checking import (
    check,
    check_condition,
    check_flag,
    check_function,
    check_list,
    check_seconds,
    check_tool_name,
    is_agent,
    is_function,
)
from capsule_tasks.runs.agents.contexts import ToolContext
from capsule_tasks.runs.agents.guardrails import ToolGuardrail
from capsule_tasks.runs.agents.schemas import Codec, Unfit, strict_schema
from capsule_tasks.runs.identity import ToolKey
from capsule_tasks.runs.models.model import ToolSpec
from capsule_tasks.runs.parking import Limits

if TYPE_CHECKING:
    from capsule_tasks.runs.agents.agent import Agent
    from capsule_tasks.runs.agents.contexts import RunContext

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
    timeout_s: float | None = None
    """A call that takes longer leaves the call uncertain; a function in a thread goes on there."""
    on_error: Callable[[ToolContext, Exception], str] | Literal["tell", "raise"] = "tell"
    """The text for the model about an error of the tool; `raise` fails the run."""
    on_uncertain: OnUncertain | None = None
    """None for the policy of the run."""
    limits: Limits | None = None
    """Who may approve a call, how long, and what happens then; None for those of the run."""
    check: Callable[[str], None] | None = None
    """Raises WrongArguments for arguments that do not fit, so that nobody is asked about them."""

    def __post_init__(self) -> None:
        _check_common(self)
        of = f"Tool({self.name}).{{}}".format
        check(of("parameters"), self.parameters, isinstance(self.parameters, dict), "a JSON schema")
        check_function(of("invoke"), self.invoke, 2)
        check_flag(of("strict"), self.strict)
        if self.namespace is not None:
            check_tool_name(of("namespace"), self.namespace)
        check_list(of("input_guardrails"), self.input_guardrails, (ToolGuardrail,))
        check_list(of("output_guardrails"), self.output_guardrails, (ToolGuardrail,))
        check_seconds(of("timeout_s"), self.timeout_s)
        is_rule = self.on_error in ("tell", "raise") or is_function(self.on_error, 2)
        check(
            of("on_error"), self.on_error, is_rule, "'tell', 'raise' or a function of 2 arguments"
        )
        is_known = self.on_uncertain in (None, *get_args(OnUncertain))
        must = f"None or one of {', '.join(get_args(OnUncertain))}"
        check(of("on_uncertain"), self.on_uncertain, is_known, must)
        if self.check is not None:
            check_function(of("check"), self.check, 1)

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


class _AgentInput(msgspec.Struct, forbid_unknown_fields=True):
    input: str


_agent_input = Codec(_AgentInput)


@dataclass(kw_only=True, frozen=True, eq=False)
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

    def __post_init__(self) -> None:
        _check_common(self)
        of = f"AgentTool({self.name}).{{}}".format
        check(of("agent"), self.agent, is_agent(self.agent), "an Agent")
        turns = self.max_turns
        is_count = turns is None or (type(turns) is int and turns > 0)
        check(of("max_turns"), turns, is_count, "None or a whole number above 0")
        if self.output is not None:
            check_function(of("output"), self.output, 1)

    @cached_property
    def key(self) -> ToolKey:
        return ToolKey(self.name)

    def as_spec(self) -> ToolSpec:
        return ToolSpec(
            name=self.name,
            description=self.description,
            parameters=strict_schema(_agent_input.schema),
        )

    def input_of(self, arguments: str) -> str:
        """The input of the inner run. Raises WrongArguments, which is for the model."""
        try:
            decoded: _AgentInput = _agent_input.decode(arguments)
        except Unfit as error:
            raise WrongArguments(self.name, str(error)) from None
        return decoded.input


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


def _check_common(tool: Tool | AgentTool) -> None:
    kind = type(tool).__name__
    check_tool_name(f"{kind}.name", tool.name)
    of = f"{kind}({tool.name}).{{}}".format
    check(of("description"), tool.description, isinstance(tool.description, str), "a text")
    check_condition(of("needs_approval"), tool.needs_approval, 1)
    check_condition(of("is_enabled"), tool.is_enabled, 2)
    is_valid = tool.limits is None or isinstance(tool.limits, Limits)
    check(of("limits"), tool.limits, is_valid, "None or Limits")
