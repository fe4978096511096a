"""Plans of models' replies, and of what is left after decisions: no I/O, no callbacks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from capsule_tasks.errors import ModelMisbehaved
from capsule_tasks.runs.agents.agent import AfterTools, Agent, ToolResult
from capsule_tasks.runs.approvals import PendingCall
from capsule_tasks.runs.identity import AgentId, ToolKey
from capsule_tasks.runs.items import call_id_of
from capsule_tasks.runs.models.model import ModelSettings
from capsule_tasks.runs.records import Item
from capsule_tasks.runs.state import RunState

_NOT_RUN_HERE = frozenset(
    (
        *("custom_tool_call", "computer_call", "local_shell_call", "shell_call"),
        *("apply_patch_call", "mcp_approval_request"),
    )
)


@dataclass(frozen=True)
class Plan:
    """The calls that a reply asks for. A reply without calls is the final output."""

    items: list[Item]
    """Those of the reply, without repeated calls."""
    calls: tuple[PendingCall, ...] = ()
    """The calls of tools, in the order of the reply."""
    handoff: PendingCall | None = None
    """The first of the handoffs; the others are not made."""
    told: Mapping[str, str] = field(default_factory=dict)
    """The outputs of calls that cannot be made, for the model, by their ids."""
    text: str | None = None
    """That of the messages; None if there is no message."""

    @property
    def is_final(self) -> bool:
        return not (self.calls or self.handoff or self.told)

    @property
    def all_calls(self) -> list[PendingCall]:
        return [*self.calls, *([self.handoff] if self.handoff else ())]


def planned(
    items: Iterable[Item], agent: AgentId, tools: Collection[ToolKey], handoffs: Collection[str]
) -> Plan:
    """The plan of a reply of an agent with these tools and handoffs.

    Raises ModelMisbehaved for an empty reply, and for a call that has no id of its own, and so
    cannot be answered. The model is told of a tool that it does not have, and may try again.
    """
    kept: list[Item] = []
    calls: dict[str, PendingCall] = {}
    told: dict[str, str] = {}
    for item in items:
        if item.get("type") == "function_call":
            call = call_of(item, agent)
            if (known := calls.setdefault(call.call_id, call)) is not call:
                if known != call:
                    raise ModelMisbehaved(f"it made two different calls with id {call.call_id!r}")
                continue
        kept.append(item)
    _refuse_calls_of_others(kept)
    if all(item.get("type") == "reasoning" for item in kept):
        raise ModelMisbehaved("its reply is empty")
    wanted, handoff = [], None
    for call in calls.values():
        if call.tool in tools:
            wanted.append(call)
        elif call.tool.kind == "bare" and call.tool.name in handoffs:
            if handoff is None:
                handoff = replace(call, needs_approval=False)
            else:
                name = handoff.tool.name
                told[call.call_id] = f"Not done: {name} was called first, and one handoff is made."
        else:
            told[call.call_id] = about_unknown(call, tools, handoffs)
    return Plan(kept, tuple(wanted), handoff, told, _text(kept))


def about_unknown(call: PendingCall, tools: Collection[ToolKey], handoffs: Collection[str]) -> str:
    """The output of a call of a tool that the agent does not have."""
    names = sorted({key.name for key in tools} | set(handoffs))
    known_tools = f"The tools are: {', '.join(names)}." if names else "There are no tools."
    return f"There is no tool {call.tool.name!r}. {known_tools}"


def _refuse_calls_of_others(items: Sequence[Item]) -> None:
    """Refuse calls that neither this engine runs nor the model's server has run."""
    answered = {call_id_of(item) for item in items if item.get("type") not in _NOT_RUN_HERE}
    for item in items:
        kind = item.get("type")
        if kind in _NOT_RUN_HERE and call_id_of(item) not in answered:
            raise ModelMisbehaved(f"it made a {kind}, which our engine does not run")


def call_of(item: Item, agent: AgentId) -> PendingCall:
    """The call in an item of an agent's reply. Raises ModelMisbehaved if it cannot be answered."""
    call_id, name, arguments = item.get("call_id"), item.get("name"), item.get("arguments")
    if not (isinstance(call_id, str) and call_id):
        raise ModelMisbehaved(f"a call of {name!r:.100} has the id {call_id!r:.100}, no text")
    if not (isinstance(name, str) and name):
        raise ModelMisbehaved(f"call {call_id!r:.100} names the tool {name!r:.100}, no text")
    if not isinstance(arguments, str):
        raise ModelMisbehaved(f"call {call_id!r:.100} of {name!r:.100} has no arguments as text")
    namespace = item.get("namespace")
    if not (namespace is None or isinstance(namespace, str)):
        about = f"call {call_id!r:.100} of {name!r:.100}"
        raise ModelMisbehaved(f"{about} has the namespace {namespace!r:.100}, no text")
    return PendingCall(call_id=call_id, tool=called_tool(item), agent=agent, arguments=arguments)


def called_tool(item: Item) -> ToolKey:
    """The tool that a call in the history, or in a reply, names."""
    name, namespace = item["name"], item.get("namespace")
    return ToolKey.namespaced(namespace, name) if namespace else ToolKey(name)


def _text(items: Sequence[Item]) -> str | None:
    """The text of the last message; that of a refusal if the model says nothing else."""
    for item in reversed(items):
        if item.get("type", "message") == "message":
            content = item.get("content")
            if isinstance(content, str):
                return content
            listed = content if isinstance(content, list) else []
            parts = [part for part in listed if isinstance(part, dict)]
            texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
            refusals = [part["refusal"] for part in parts if isinstance(part.get("refusal"), str)]
            return "".join(texts or refusals)
    return None


def output_item(call_id: str, output: str | list[Item]) -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


# --- the settings of a model call ---------------------------------------------------------------


def settings_for(state: RunState, agent: Agent, given: ModelSettings) -> ModelSettings:
    """The settings of the agent's next model call, without a tool choice that was followed."""
    if given.tool_choice is None or given.tool_choice == "none" or not agent.reset_tool_choice:
        return given
    return replace(given, tool_choice=None) if state.tools_used_by(state.agent) else given


def with_tools_used(state: RunState, calls: Iterable[PendingCall]) -> RunState:
    """The state in which its agent has used the tools of these calls, too."""
    names = [call.tool.text for call in calls]
    before = state.tools_used_by(state.agent)
    if all(name in before for name in names):
        return state
    return state.with_tool_use(state.agent, dict.fromkeys((*before, *names)))


# --- after the tools ----------------------------------------------------------------------------


def final_result(rule: AfterTools, results: Sequence[ToolResult]) -> ToolResult | None:
    """The result whose output is the final one, by a rule that is no function; None for none."""
    if rule == "stop":
        return results[0] if results else None
    if isinstance(rule, frozenset):
        return next((each for each in results if each.tool in rule), None)
    return None


def earlier_results(view: Sequence[Item]) -> list[ToolResult]:
    """The results of calls that were made before the others of their reply waited for people.

    They are at the end of the model's view: the reply, and after it the outputs so far.
    """
    outputs: dict[str, Any] = {}
    results: list[ToolResult] = []
    for item in reversed(view):
        kind = item.get("type")
        if kind == "function_call_output" and not results:
            outputs[item["call_id"]] = item.get("output")
        elif kind == "function_call":
            call_id, name = item["call_id"], item["name"]
            results.append(ToolResult(name, call_id, outputs.get(call_id)))
        elif kind not in ("reasoning", "message") or item.get("role", "assistant") != "assistant":
            break
    return [each for each in reversed(results) if each.call_id in outputs]


def without_final_message(items: Sequence[Item]) -> list[Item]:
    """The items of a final reply that may be stored although its text may not.

    Messages go, and the reasoning before them, which no model accepts without them.
    """
    kept: list[Item] = []
    for item in items:
        if item.get("type", "message") != "message":
            kept.append(item)
            continue
        while kept and kept[-1].get("type") == "reasoning":
            kept.pop()
    return kept
