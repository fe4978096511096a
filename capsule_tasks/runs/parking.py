"""Between the state of a run and the store: what is stored of it, and how it comes back.

A store keeps any snapshot byte for byte. For our own states this module makes the header around
one; for the `RunState` of openai-agents it reads the header off the JSON, and leaves that as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import msgspec

from capsule_tasks.errors import InvalidRunState
from capsule_tasks.runs.approvals import ApprovalBook, Decision, fingerprint
from capsule_tasks.runs.identity import AgentId, ToolKey
from capsule_tasks.runs.schema import CURRENT_VERSION, READABLE_VERSIONS
from capsule_tasks.runs.state import RunState
from capsule_tasks.storage.run_types import Ask, Claim, OnExpiry, StoredDecision

OPENAI_SCHEMA = "openai-agents/"
"""What the versions of openai-agents' snapshots begin with in the header."""


@dataclass(frozen=True)
class Limits:
    """How long a decision may take, what happens then, and who may take it."""

    expires_in_s: float | None = None
    on_expiry: OnExpiry = "reject"
    may_decide: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Parked:
    """A snapshot with the header that a store keeps around it."""

    snapshot: bytes
    schema: str
    agent: str
    asks: tuple[Ask, ...]

    @property
    def header(self) -> dict[str, Any]:
        """The arguments of `create` and `commit`, the snapshot aside."""
        return {"schema": self.schema, "agent": self.agent, "asks": self.asks}


def parked(
    state: RunState, *, limits: Limits | None = None, of_tool: Mapping[str, Limits] | None = None
) -> Parked:
    """A state as it is stored; `of_tool` are limits by the tool's key as text, before `limits`."""
    asks = []
    for call in state.unresolved():
        own = (of_tool or {}).get(call.tool.text) or limits or Limits()
        asks.append(
            Ask(
                call_id=call.call_id,
                tool=call.tool.text,
                agent=call.agent.text,
                fingerprint=call.fingerprint,
                arguments=call.arguments,
                expires_in_s=own.expires_in_s,
                on_expiry=own.on_expiry,
                may_decide=own.may_decide,
            )
        )
    if len({ask.call_id for ask in asks}) < len(asks):
        why = "two calls that wait, of a run and of one inside of it, have one id"
        raise InvalidRunState("$.calls", why)
    snapshot = state.to_string().encode()
    return Parked(snapshot, CURRENT_VERSION, state.agent.text, tuple(asks))


def readable_versions() -> tuple[str, ...]:
    """What a worker of this release says to a claim."""
    return READABLE_VERSIONS


def resumed(claim: Claim) -> RunState:
    """The state of a claimed run, with all decisions that were taken since it was parked."""
    state = RunState.from_string(claim.snapshot)
    for stored in claim.decisions.exact:
        waiting = [call for call in state.unresolved() if call.call_id == stored.call]
        for call in waiting:
            if (call.tool.text, call.agent.text) != (stored.tool, stored.agent):
                continue
            about: dict[str, Any] = {"tool": call.tool, "agent": call.agent}
            about |= {"by": stored.by, "at_ms": stored.at}
            if stored.approved:
                state = state.approve(call.call_id, **about)
            else:
                state = state.reject(call.call_id, message=stored.message, **about)
    return _with_standing(state, claim.decisions.standing)


def _with_standing(state: RunState, standing: Sequence[StoredDecision]) -> RunState:
    """Each decision on all calls of a tool goes where its agent is: into nested runs, too."""
    if not standing:
        return state
    decisions = tuple(
        Decision(
            approved=each.approved,
            tool=_tool(each.tool),
            agent=_agent(each.agent),
            message=each.message,
            by=each.by,
            at_ms=each.at,
        )
        for each in standing
    )
    known = {(each.tool, each.agent) for each in decisions}
    kept = [each for each in state.approvals.standing if (each.tool, each.agent) not in known]
    book = ApprovalBook(exact=state.approvals.exact, standing=(*kept, *decisions))
    nested = {call_id: _with_standing(inner, standing) for call_id, inner in state.nested.items()}
    return msgspec.structs.replace(state, approvals=book, nested=nested)


def _tool(text: str) -> ToolKey:
    """The key that is spelled so."""
    kind, _, rest = text.partition(":")
    namespace, slash, name = rest.rpartition("/")
    if slash:
        return ToolKey.namespaced(unquote(namespace), unquote(name))
    return ToolKey.deferred(unquote(name)) if kind != "bare" else ToolKey(unquote(name))


def _agent(text: str) -> AgentId:
    """The identity that is spelled so."""
    name, _, tag = text.partition("#")
    return AgentId(unquote(name), unquote(tag) or None)


def parked_openai(snapshot: str | bytes, *, limits: Limits | None = None) -> Parked:
    """A snapshot of openai-agents, unchanged, with the header that its JSON tells.

    What waits is what its own `get_interruptions` would give for the run itself.
    """
    given = snapshot.encode() if isinstance(snapshot, str) else snapshot
    try:
        data = json.loads(given)
        version = _text(data["$schemaVersion"])
        agent = _openai_agent(data["current_agent"])
        step = data.get("current_step") or {}
        found = (step.get("data") or {}).get("interruptions") or []
        own = limits or Limits()
        asks = tuple(_openai_ask(each, agent, own) for each in found)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        why = f"it is no RunState of openai-agents ({type(error).__name__})"
        raise InvalidRunState("$", why) from None
    return Parked(given, f"{OPENAI_SCHEMA}{version}", agent, asks)


def _openai_agent(entry: Mapping[str, Any]) -> str:
    tag = entry.get("identity")
    return AgentId(_text(entry["name"]), tag if isinstance(tag, str) else None).text


def _openai_ask(item: Mapping[str, Any], agent: str, limits: Limits) -> Ask:
    raw = item.get("raw_item") or {}
    name = _text(item.get("tool_name") or raw.get("name"))
    tool = _openai_tool(item, name)
    arguments = raw.get("arguments")
    spelled = arguments if isinstance(arguments, str) else json.dumps(arguments, sort_keys=True)
    return Ask(
        call_id=_text(raw.get("call_id") or raw.get("id")),
        tool=tool.text,
        agent=_openai_agent(item["agent"]) if item.get("agent") else agent,
        fingerprint=fingerprint(tool, spelled),
        arguments=spelled,
        expires_in_s=limits.expires_in_s,
        on_expiry=limits.on_expiry,
        may_decide=limits.may_decide,
    )


def _openai_tool(item: Mapping[str, Any], name: str) -> ToolKey:
    known = item.get("tool_lookup_key") or {}
    if known.get("kind") == "deferred_top_level":
        return ToolKey.deferred(_text(known["name"]))
    namespace = item.get("tool_namespace") or known.get("namespace")
    return ToolKey.namespaced(_text(namespace), name) if namespace else ToolKey(name)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError
    return value
