"""Functions as tools."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.runs.agents.checking import check_tool_name
from capsule_tasks.runs.agents.contexts import ToolContext
from capsule_tasks.runs.agents.guardrails import ToolGuardrail
from capsule_tasks.runs.agents.parameters import parameters_of
from capsule_tasks.runs.agents.tools import OnUncertain, Tool

if TYPE_CHECKING:
    from capsule_tasks.runs.agents.agent import Agent
    from capsule_tasks.runs.agents.contexts import RunContext
    from capsule_tasks.runs.parking import Limits

Function = Callable[..., Any]


@overload
def function_tool(function: Function, /) -> Tool: ...


@overload
def function_tool(
    function: None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    strict: bool | None = None,
    namespace: str | None = None,
    needs_approval: bool | Callable[[ToolContext], bool | Awaitable[bool]] = False,
    is_enabled: bool | Callable[[RunContext, Agent], bool | Awaitable[bool]] = True,
    input_guardrails: Sequence[ToolGuardrail] = (),
    output_guardrails: Sequence[ToolGuardrail] = (),
    timeout_s: float | None = None,
    on_error: Callable[[ToolContext, Exception], str] | Literal["tell", "raise"] = "tell",
    on_uncertain: OnUncertain | None = None,
    limits: Limits | None = None,
) -> Callable[[Function], Tool]: ...


def function_tool(
    function: Function | None = None, /, **options: Any
) -> Tool | Callable[[Function], Tool]:
    """Make a tool of a function: `@function_tool`, or `@function_tool(needs_approval=True, …)`.

    Its schema comes from the signature, its descriptions from the docstring. A first parameter
    that is annotated with ToolContext or RunContext gets the context, and is not in the schema.
    A function that is no coroutine function runs in a thread: after `timeout_s` the call is
    uncertain, while the function goes on in its thread.

    The schema is strict (`additionalProperties` is false, every parameter required, null for a
    default) if it can be. `strict=True` refuses a function whose schema cannot be strict.
    """
    made: Callable[[Function], Tool] = partial(_tool_of, **options)
    return made if function is None else made(function)


def _tool_of(
    function: Function,
    *,
    name: str | None = None,
    description: str | None = None,
    strict: bool | None = None,
    input_guardrails: Sequence[ToolGuardrail] = (),
    output_guardrails: Sequence[ToolGuardrail] = (),
    **options: Any,
) -> Tool:
    if not callable(function):
        raise InvalidSetting("function_tool", function, "a function")
    tool = getattr(function, "__name__", None) if name is None else name
    check_tool_name("function_tool.name", tool)
    assert tool is not None
    parameters = parameters_of(function, tool, strict=strict)
    call = function if _is_coroutine_function(function) else _in_thread(function)

    async def invoke(context: ToolContext, arguments: str) -> Any:
        positional, named = parameters.decode(arguments)
        before = (context,) if parameters.takes_context else ()
        result = await call(*before, *positional, **named)
        # A function that is not declared as a coroutine function may return a coroutine.
        return await result if inspect.isawaitable(result) else result

    return Tool(
        name=tool,
        description=parameters.description if description is None else description,
        parameters=parameters.schema,
        invoke=invoke,
        strict=parameters.strict,
        check=parameters.check,
        input_guardrails=list(input_guardrails),
        output_guardrails=list(output_guardrails),
        **options,
    )


def _in_thread(function: Function) -> Callable[..., Awaitable[Any]]:
    def called(*positional: Any, **named: Any) -> Any:
        try:
            return function(*positional, **named)
        except StopIteration as error:
            # No future takes it as its error: whoever awaits the thread would wait for ever.
            raise RuntimeError(f"{function!r} raised {error!r}") from error

    return partial(asyncio.to_thread, called)


def _is_coroutine_function(function: Function) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  an object with such a method
    )
