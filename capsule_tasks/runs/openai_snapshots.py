"""Reads the JSON of an openai-agents `RunState`: its version, its agent, the calls that wait.

A person must see what will be executed. Each type of call has that in a field of its own:
`arguments` for functions and MCP, `input` for custom tools, `action` for shells and computers,
`operation` for patches. A call without that field is refused, since its approval would be blind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from capsule_tasks.errors import InvalidRunState
from capsule_tasks.runs.approvals import PendingCall
from capsule_tasks.runs.identity import AgentId, ToolKey, ToolKind

INTERRUPTIONS = "$.current_step.data.interruptions"


_CALL_TYPES: dict[str, tuple[ToolKind, tuple[str, ...]]] = {
    "function_call": ("bare", ("arguments",)),
    "mcp_approval_request": ("hosted_mcp", ("arguments",)),
    "custom_tool_call": ("custom", ("input",)),
    "shell_call": ("shell", ("action",)),
    "local_shell_call": ("local_shell", ("action",)),
    "apply_patch_call": ("apply_patch", ("operation", "operations")),
    "computer_call": ("computer", ("action", "actions")),
}
"""For each type of call the kind of its tool, and the fields that say what will be executed. A call
must have at least one of these fields."""


def read_snapshot(snapshot: bytes) -> tuple[str, AgentId, list[PendingCall]]:
    """The schema version, the agent and the waiting calls of a snapshot.

    The calls are in the order of the SDK's `get_interruptions`. InvalidRunState refuses data that
    is not a snapshot of openai-agents, and calls that a person could not judge.
    """
    try:
        data = json.loads(snapshot)
        agent = _agent(data["current_agent"])
        step = data.get("current_step") or {}
        found = (step.get("data") or {}).get("interruptions") or []
        calls = [_call(each, agent, index) for index, each in enumerate(found)]
        return _text(data["$schemaVersion"]), agent, calls
    except InvalidRunState:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        why = f"it is not a RunState of openai-agents ({type(error).__name__})"
        raise InvalidRunState("$", why) from None


def call_id_of(raw: Any) -> str:
    """The id under which a call is decided about; the call is JSON or an object of the SDK."""
    if not isinstance(raw, Mapping):
        return _text(getattr(raw, "call_id", None) or getattr(raw, "id", None))
    raw = _unwrapped(raw)
    is_request = raw.get("type") == "mcp_approval_request"
    return _text(raw.get("id") if is_request else raw.get("call_id") or raw.get("id"))


def shown_call(item: Mapping[str, Any], agent: AgentId) -> PendingCall:
    """A call as people see it if it waits for them: `item` is what a snapshot has of it."""
    return _call(item, agent, 0)


def _call(item: Mapping[str, Any], agent: AgentId, index: int) -> PendingCall:
    raw = _unwrapped(item.get("raw_item") or {})
    call_id, name = call_id_of(raw), _text(item.get("tool_name") or raw.get("name"))

    def refusal(reason: str) -> InvalidRunState:
        about = f"call {call_id!r:.100} of tool {name!r:.100}"
        return InvalidRunState(f"{INTERRUPTIONS}[{index}].raw_item", f"{about} {reason}")

    type_name = raw.get("type") or "function_call"
    if type_name not in _CALL_TYPES:
        raise refusal(f"is of type {type_name!r:.100}, and this release cannot show what it does")
    kind, fields = _CALL_TYPES[type_name]
    shown = {field: raw[field] for field in fields if raw.get(field) is not None}
    if not shown:
        needed = " or ".join(f"`{field}`" for field in fields)
        raise refusal(
            f"has no {needed}: nobody could see what they approve. End this run, and use a model "
            "provider that sends it"
        )
    if kind == "hosted_mcp" and not raw.get("server_label"):
        raise refusal(
            "has no `server_label`: a decision could count for another server's tool. End this "
            "run, and use a model provider that sends it"
        )
    return PendingCall(
        call_id=call_id,
        tool=_tool(item, raw, name, kind),
        agent=_agent(item["agent"]) if item.get("agent") else agent,
        arguments=_spelled(next(iter(shown.values())) if len(shown) == 1 else shown),
    )


def _unwrapped(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The MCP request inside a hosted tool call, which the SDK decides about; else the call."""
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
