"""Tools whose calls go through the ledger of the run that they work for.

Each kind of tool is changed in place where the SDK calls it. Outside of a durable run the changed
tool does what it did.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any, cast

from agents import (
    ApplyPatchTool,
    CustomTool,
    FunctionTool,
    LocalShellTool,
    ShellTool,
)
from agents._tool_identity import (
    get_function_tool_lookup_key_for_tool,
    serialize_function_tool_lookup_key,
)
from agents.run_internal.tool_actions import ApplyPatchAction, ComputerAction
from agents.tool import _FailureHandlingFunctionToolInvoker, _get_function_tool_invoke_context

from capsule_tasks.openai_agents.current import current_turn, recorded, within
from capsule_tasks.runs import AgentId
from capsule_tasks.runs.approvals import PendingCall
from capsule_tasks.runs.openai_snapshots import shown_call


def prepare_tool(tool: Any) -> None:
    """Have the calls of a tool go through the ledger; does nothing to one that was prepared."""
    match tool:
        case FunctionTool(on_invoke_tool=invoke) if not _is_prepared(invoke):
            tool.on_invoke_tool = _function(tool, invoke)
        case CustomTool(on_invoke_tool=invoke) if not _is_prepared(invoke):
            tool.on_invoke_tool = _custom(tool, invoke)
        case ShellTool(executor=execute) if execute is not None and not _is_prepared(execute):
            tool.executor = _shell(tool, execute)
        case LocalShellTool(executor=execute) if not _is_prepared(execute):
            tool.executor = _local_shell(tool, execute)
        case ApplyPatchTool(editor=editor) if not isinstance(editor, _Editor):
            tool.editor = _Editor(editor)


def _is_prepared(invoke: Any) -> bool:
    return isinstance(invoke, _Invoker) or hasattr(invoke, _PREPARED)


_PREPARED = "capsule_is_prepared"


def _prepared(invoke: Any) -> Any:
    setattr(invoke, _PREPARED, True)
    return invoke


async def _called(function: Callable[..., Any], *args: Any) -> Any:
    result = function(*args)
    return await result if inspect.isawaitable(result) else result


def _call_of(raw: Any, tool_name: str, agent: Any, *, tool: Any = None) -> PendingCall:
    """The call as people see it when it waits for a decision, and so with that fingerprint."""
    data: Any = raw.model_dump(exclude_unset=True) if hasattr(raw, "model_dump") else dict(raw)
    key = get_function_tool_lookup_key_for_tool(tool) if tool is not None else None
    item: Mapping[str, Any] = {
        "raw_item": data,
        "tool_name": tool_name,
        "tool_lookup_key": serialize_function_tool_lookup_key(key),
    }
    return shown_call(item, AgentId(getattr(agent, "name", None) or "unknown"))


# --- functions, MCP tools, agents as tools -------------------------------------------------------


class _Invoker(_FailureHandlingFunctionToolInvoker):
    """The invoker that `@function_tool` makes; a class of the SDK's, which approvals look for."""

    def __init__(self, inner: _FailureHandlingFunctionToolInvoker, tool: FunctionTool) -> None:
        vars(self).update(vars(inner))
        self._function_tool = tool
        self._inner = inner

    def __agents_bind_function_tool__(self, function_tool: FunctionTool) -> _Invoker:
        if self._function_tool is function_tool:
            return self
        return _Invoker(self._inner.__agents_bind_function_tool__(function_tool), function_tool)

    async def __call__(self, ctx: Any, input: str) -> Any:  # noqa: A002  the SDK's name
        tool = self._function_tool
        assert tool is not None
        return await _invoked(tool, ctx, input, lambda: self._inner(ctx, input))


def _function(tool: FunctionTool, invoke: Any) -> Any:
    if isinstance(invoke, _FailureHandlingFunctionToolInvoker):
        return _Invoker(invoke, tool)
    original = _Original(invoke)

    # Without annotations, so that the SDK gives the whole context; `invoke` gets what it asks for.
    async def through_ledger(ctx, arguments):  # type: ignore[no-untyped-def]
        given = _get_function_tool_invoke_context(cast("FunctionTool", original), ctx)
        return await _invoked(tool, ctx, arguments, lambda: _called(invoke, given, arguments))

    return _prepared(through_ledger)


class _Original:
    """Stands for a tool where the SDK chooses the context by the signature of its function."""

    def __init__(self, invoke: Any) -> None:
        self.on_invoke_tool = invoke


async def _invoked(
    tool: FunctionTool, ctx: Any, arguments: str, invoke: Callable[[], Awaitable[Any]]
) -> Any:
    turn = current_turn()
    if turn is None or not hasattr(ctx, "tool_call_id"):
        return await invoke()
    if tool._is_agent_tool:
        # The agent is asked again under the same id when the run resumes. Its own model calls and
        # tool calls are recorded.
        with within(turn, ctx.tool_call_id):
            return await invoke()
    raw = ctx.tool_call or {
        "type": "function_call",
        "call_id": ctx.tool_call_id,
        "name": ctx.tool_name,
        "arguments": arguments,
    }
    call = _call_of(raw, tool.name, ctx.agent, tool=tool)
    return await recorded(turn, call, invoke)


# --- custom tools and shells ---------------------------------------------------------------------


def _custom(tool: CustomTool, invoke: Any) -> Any:
    @wraps(invoke)
    async def through_ledger(ctx: Any, given: str) -> Any:
        turn = current_turn()
        if turn is None:
            return await _called(invoke, ctx, given)
        data = {"type": "custom_tool_call", "call_id": ctx.tool_call_id, "input": given}
        call = _call_of(data, tool.name, ctx.agent)
        return await recorded(turn, call, lambda: _called(invoke, ctx, given))

    return _prepared(through_ledger)


def _shell(tool: ShellTool, execute: Any) -> Any:
    @wraps(execute)
    async def through_ledger(request: Any) -> Any:
        turn = current_turn()
        if turn is None:
            return await _called(execute, request)
        call = _call_of(request.data.raw, tool.name, None)
        return await recorded(turn, call, lambda: _called(execute, request))

    return _prepared(through_ledger)


def _local_shell(tool: LocalShellTool, execute: Any) -> Any:
    @wraps(execute)
    async def through_ledger(request: Any) -> Any:
        turn = current_turn()
        if turn is None:
            return await _called(execute, request)
        call = _call_of(request.data, tool.name, None)
        return await recorded(turn, call, lambda: _called(execute, request))

    return _prepared(through_ledger)


# --- patches and computers: the SDK does not tell editors and computers which call they work for --


_patch_call: ContextVar[Any] = ContextVar("capsule_patch_call", default=None)
_OPERATIONS = ("create_file", "update_file", "delete_file")


class _PatchCall:
    """A call of apply_patch, and how many of its operations were made."""

    def __init__(self, call: Any, agent: Any) -> None:
        self.call = call
        self.agent = agent
        self.operations = 0


class _Editor:
    """The editor of the user, each of whose operations is recorded."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":  # asked for by `copy`, of an editor half made
            raise AttributeError(name)
        method = getattr(self._inner, name)
        if name not in _OPERATIONS:
            return method

        async def through_ledger(operation: Any) -> Any:
            turn, current = current_turn(), _patch_call.get()
            if turn is None or current is None:
                return await _called(method, operation)
            tool_call = current.call.tool_call
            call = _call_of(tool_call, current.call.apply_patch_tool.name, current.agent)
            part = f"/{current.operations}" if current.operations else ""
            current.operations += 1
            return await recorded(turn, call, lambda: _called(method, operation), part=part)

        return through_ledger


_apply_patch = ApplyPatchAction.execute
_act = ComputerAction._execute_action_and_capture


@wraps(_apply_patch.__func__)  # type: ignore[attr-defined]
async def _apply_patch_of_a_known_call(cls: Any, /, *, agent: Any, call: Any, **others: Any) -> Any:
    token = _patch_call.set(_PatchCall(call, agent))
    try:
        return await _apply_patch.__func__(cls, agent=agent, call=call, **others)  # type: ignore[attr-defined]
    finally:
        _patch_call.reset(token)


@wraps(_act.__func__)  # type: ignore[attr-defined]
async def _act_through_ledger(cls: Any, computer: Any, tool_call: Any, /) -> Any:
    act = _act.__func__  # type: ignore[attr-defined]
    turn = current_turn()
    if turn is None:
        return await act(cls, computer, tool_call)
    call = _call_of(tool_call, "computer", None)
    return await recorded(turn, call, lambda: act(cls, computer, tool_call))


def teach_the_sdk() -> None:
    """Have the SDK say which call an editor or a computer works for; safe twice."""
    if not hasattr(ApplyPatchAction, _PREPARED):
        ApplyPatchAction.execute = classmethod(_apply_patch_of_a_known_call)  # type: ignore[method-assign,assignment]
        ComputerAction._execute_action_and_capture = classmethod(_act_through_ledger)  # type: ignore[method-assign,assignment]
        setattr(ApplyPatchAction, _PREPARED, True)
