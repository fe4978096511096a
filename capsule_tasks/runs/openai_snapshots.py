"""Read the JSON of an openai-agents `RunState`: its version, its agent, the calls that wait.

A person must see what will be executed. Each type of call keeps that in a field of its own:
`arguments` for functions and MCP, `input` for custom tools, `action` for shells and computers,
`operation` for patches. A call without that field is refused: its approval would be blind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from capsule_tasks.errors import InvalidRunState
from capsule_tasks.runs.approvals import PendingCall
from capsule_tasks.runs.identity import AgentId, ToolKey, ToolKind

INTERRUPTIONS = "$.current_step.data.interruptions"


@dataclass(frozen=True)
class _CallType:
    kind: ToolKind
    fields: tuple[str, ...]
    """Where calls of this type say what will be executed; at least one has to be there."""


_CALL_TYPES = {
    "function_call": _CallType("bare", ("arguments",)),
    "mcp_approval_request": _CallType("hosted_mcp", ("arguments",)),
    "custom_tool_call": _CallType("custom", ("input",)),
    "shell_call": _CallType("shell", ("action",)),
    "local_shell_call": _CallType("local_shell", ("action",)),
    "apply_patch_call": _CallType("apply_patch", ("operation", "operations")),
    "computer_call": _CallType("computer", ("action", "actions")),
}


@dataclass(frozen=True)
class OpenAISnapshot:
    """The parts of a snapshot of openai-agents that a store's header is made of."""

    version: str
    agent: AgentId
    calls: tuple[PendingCall, ...]
    """In the order of the SDK's own `get_interruptions`."""


def read_snapshot(snapshot: bytes) -> OpenAISnapshot:
    """Read a snapshot; InvalidRunState refuses what is none, and calls that nobody could judge."""
    try:
        data = json.loads(snapshot)
        agent = _agent(data["current_agent"])
        step = data.get("current_step") or {}
        found = (step.get("data") or {}).get("interruptions") or []
        calls = tuple(_call(each, agent, index) for index, each in enumerate(found))
        return OpenAISnapshot(_text(data["$schemaVersion"]), agent, calls)
    except InvalidRunState:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        why = f"it is no RunState of openai-agents ({type(error).__name__})"
        raise InvalidRunState("$", why) from None


def call_id_of(raw: Any) -> str:
    """The id of a call, as JSON or as an object of the SDK's, under which it is decided about."""
    if not isinstance(raw, Mapping):
        return _text(getattr(raw, "call_id", None) or getattr(raw, "id", None))
    raw = _unwrapped(raw)
    is_request = raw.get("type") == "mcp_approval_request"
    return _text(raw.get("id") if is_request else raw.get("call_id") or raw.get("id"))


def _call(item: Mapping[str, Any], agent: AgentId, index: int) -> PendingCall:
    raw = _unwrapped(item.get("raw_item") or {})
    call_id, name = call_id_of(raw), _text(item.get("tool_name") or raw.get("name"))

    def refusal(reason: str) -> InvalidRunState:
        about = f"call {call_id!r:.100} of tool {name!r:.100}"
        return InvalidRunState(f"{INTERRUPTIONS}[{index}].raw_item", f"{about} {reason}")

    type_name = raw.get("type") or "function_call"
    call_type = _CALL_TYPES.get(type_name)
    if call_type is None:
        raise refusal(f"is of type {type_name!r:.100}, and this release cannot show what it does")
    shown = {field: raw[field] for field in call_type.fields if raw.get(field) is not None}
    if not shown:
        needed = " or ".join(f"`{field}`" for field in call_type.fields)
        raise refusal(
            f"has no {needed}: nobody could see what they approve. End this run, and use a model "
            "provider that sends it"
        )
    if call_type.kind == "hosted_mcp" and not raw.get("server_label"):
        raise refusal(
            "has no `server_label`: a decision could count for another server's tool. End this "
            "run, and use a model provider that sends it"
        )
    return PendingCall(
        call_id=call_id,
        tool=_tool(item, raw, name, call_type.kind),
        agent=_agent(item["agent"]) if item.get("agent") else agent,
        arguments=_spelled(next(iter(shown.values())) if len(shown) == 1 else shown),
    )


def _unwrapped(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """A hosted tool call carries its MCP request inside, which is what the SDK decides about."""
    request = raw.get("provider_data")
    if raw.get("type") != "hosted_tool_call" or not isinstance(request, Mapping):
        return raw
    if request.get("type") != "mcp_approval_request":
        return raw
    outer = {"id": raw.get("call_id") or raw.get("id"), "name": raw.get("name")}
    outer["arguments"] = raw.get("arguments")
    return {**outer, **{field: value for field, value in request.items() if value is not None}}


def _tool(item: Mapping[str, Any], raw: Mapping[str, Any], name: str, kind: ToolKind) -> ToolKey:
    if kind == "hosted_mcp":
        return ToolKey.hosted_mcp(_text(raw["server_label"]), name)
    if kind != "bare":
        return ToolKey(name, kind)
    known = item.get("tool_lookup_key") or {}
    if known.get("kind") == "deferred_top_level":
        return ToolKey.deferred(_text(known["name"]))
    namespace = item.get("tool_namespace") or known.get("namespace")
    return ToolKey.namespaced(_text(namespace), name) if namespace else ToolKey(name)


def _spelled(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _agent(entry: Mapping[str, Any]) -> AgentId:
    tag = entry.get("identity")
    return AgentId(_text(entry["name"]), tag if isinstance(tag, str) else None)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError
    return value
