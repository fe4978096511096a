"""Guardrails: checks of a run's input, its output, and the calls of its tools."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

from capsule_tasks.runs.agents.checking import check, check_fields
from capsule_tasks.runs.agents.contexts import RunContext
from capsule_tasks.runs.records import Item
from capsule_tasks.settings import Text, takes

if TYPE_CHECKING:
    from capsule_tasks.runs.agents.agent import Agent


@dataclass(frozen=True)
class Verdict:
    """The finding of a guardrail of an input or an output."""

    tripped: bool = False
    info: Any = None

    def __post_init__(self) -> None:
        check_fields(Verdict, self)


@dataclass(frozen=True)
class ToolVerdict:
    """The finding of a tool guardrail: the call goes on, gets another output, or ends the run."""

    behavior: Literal["allow", "reject", "raise"] = "allow"
    message: str | None = None
    """In place of the output, if the call is rejected."""
    info: Any = None

    def __post_init__(self) -> None:
        check_fields(ToolVerdict, self)


@dataclass(frozen=True)
class InputGuardrail:
    """Checks the input of a run, beside the first model call or before it."""

    check: Callable[[RunContext, Agent, str | list[Item]], Verdict | Awaitable[Verdict]]
    name: Text
    parallel: bool = True
    """Beside the first model call, whose reply waits for the verdict; else before that call."""

    def __post_init__(self) -> None:
        check_fields(InputGuardrail, self, self.name)


@dataclass(frozen=True)
class OutputGuardrail:
    """Checks the final output of a run before it is stored or returned."""

    check: Callable[[RunContext, Agent, Any], Verdict | Awaitable[Verdict]]
    name: Text

    def __post_init__(self) -> None:
        check_fields(OutputGuardrail, self, self.name)


@dataclass(frozen=True)
class ToolGuardrail:
    """Checks a tool call before it is made, or its output.

    A guardrail before the call runs after an approval in any case, as the world may have changed
    since; with `before_approval` it runs before people are asked, too.
    """

    check: Callable[..., ToolVerdict | Awaitable[ToolVerdict]]
    """Called with the `ToolContext`; one for outputs also with the output."""
    name: Text
    before_approval: bool = False

    def __post_init__(self) -> None:
        check_fields(ToolGuardrail, self, self.name)
        takes_call = takes(self.check, 1) or takes(self.check, 2)
        must = "a function of 1 or 2 arguments"
        check(f"ToolGuardrail({self.name}).check", self.check, takes_call, must)


# --- decorators ----------------------------------------------------------------------------------

G = TypeVar("G", InputGuardrail, OutputGuardrail, ToolGuardrail)


class _Decorator(Generic[G]):
    """Makes guardrails of functions, with or without options in parentheses."""

    def __init__(self, kind: Callable[..., G]) -> None:
        self._kind: Callable[..., G] = kind

    @overload
    def __call__(self, function: Callable[..., Any], /) -> G: ...
    @overload
    def __call__(
        self, function: None = None, /, **options: Any
    ) -> Callable[[Callable[..., Any]], G]: ...
    def __call__(
        self, function: Callable[..., Any] | None = None, /, **options: Any
    ) -> G | Callable[[Callable[..., Any]], G]:
        def made(function: Callable[..., Any]) -> G:
            named = {"name": getattr(function, "__name__", "")} | options
            return self._kind(check=function, **named)

        return made if function is None else made(function)


input_guardrail = _Decorator(InputGuardrail)
"""`@input_guardrail` or `@input_guardrail(name=…, parallel=…)` of a function
`check(context, agent, input)` that returns a Verdict."""
output_guardrail = _Decorator(OutputGuardrail)
"""`@output_guardrail` or `@output_guardrail(name=…)` of a function
`check(context, agent, output)` that returns a Verdict."""
tool_input_guardrail = _Decorator(ToolGuardrail)
"""`@tool_input_guardrail` or `@tool_input_guardrail(name=…, before_approval=…)` of a function
`check(tool_context)` that returns a ToolVerdict."""
tool_output_guardrail = _Decorator(ToolGuardrail)
"""`@tool_output_guardrail` or `@tool_output_guardrail(name=…)` of a function
`check(tool_context, output)` that returns a ToolVerdict."""
