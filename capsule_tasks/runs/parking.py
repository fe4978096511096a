"""Between the state of a run and the store: what is stored of it, and how it comes back.

A store keeps any snapshot byte for byte. For our own states this module makes the header around
one; for the `RunState` of openai-agents it reads the header off the JSON, and leaves that as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast, get_args
from urllib.parse import unquote

import msgspec

from capsule_tasks.errors import CallChanged, InvalidRunState, InvalidSetting
from capsule_tasks.runs.approvals import Decision, PendingCall, RunApprovals
from capsule_tasks.runs.identity import AgentId, ToolKey, ToolKind
from capsule_tasks.runs.openai_snapshots import INTERRUPTIONS, call_id_of, read_snapshot
from capsule_tasks.runs.schema import CURRENT_SCHEMA_VERSION, SUPPORTED_SCHEMA_VERSIONS
from capsule_tasks.runs.state import RunState
from capsule_tasks.storage.runs.types import ApprovalRequest, Claim, OnExpiry, StoredDecision

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
    approval_requests: tuple[ApprovalRequest, ...]

    @property
    def header(self) -> dict[str, Any]:
        """The arguments of `create` and `commit`, the snapshot aside."""
        return {
            "schema": self.schema,
            "agent": self.agent,
            "approval_requests": self.approval_requests,
        }


def parked(
    state: RunState, *, limits: Limits | None = None, of_tool: Mapping[str, Limits] | None = None
) -> Parked:
    """A state as it is stored; `of_tool` are limits by the tool's key as text, before `limits`.

    That is `ToolKey.text`, as in `bare:refund`; a name alone is refused, as it would limit nothing.
    """
    for text in of_tool or {}:
        _check_tool(text)
    waiting = state.unresolved()
    _check_ids_differ(waiting, "$.calls")
    requests = tuple(
        _request(call, (of_tool or {}).get(call.tool.text) or limits) for call in waiting
    )
    snapshot = state.to_string().encode()
    return Parked(snapshot, CURRENT_SCHEMA_VERSION, state.agent.text, requests)


def _request(call: PendingCall, limits: Limits | None) -> ApprovalRequest:
    own = limits or Limits()
    return ApprovalRequest(
        call_id=call.call_id,
        tool=call.tool.text,
        agent=call.agent.text,
        fingerprint=call.fingerprint,
        arguments=call.arguments,
        expires_in_s=own.expires_in_s,
        on_expiry=own.on_expiry,
        may_decide=own.may_decide,
    )


def _check_ids_differ(calls: Sequence[PendingCall], where: str) -> None:
    """The store, its ledger and decisions name a call by its id, so two must not share one.

    A model keeps the ids of one run apart; agents used as tools have runs of their own.
    """
    by_id = defaultdict[str, list[PendingCall]](list)
    for call in calls:
        by_id[call.call_id].append(call)
    for call_id, same in by_id.items():
        if len(same) > 1:
            which = " and ".join(f"{call.tool.text} of agent {call.agent.text}" for call in same)
            raise InvalidRunState(
                where,
                f"{len(same)} waiting calls have one id, {call_id!r:.100}: {which:.300}. Agents "
                "used as tools have runs of their own, whose models may give the same ids, but a "
                "decision names a call by its id alone and would count for each of them. Have the "
                "models give ids that are unique, as by a prefix for each agent",
            )


def _check_tool(text: object) -> None:
    kind, colon, _ = text.partition(":") if isinstance(text, str) else ("", "", "")
    if not colon or kind not in get_args(ToolKind):
        must = "tools' keys as text, as ToolKey('refund').text is: 'bare:refund'"
        raise InvalidSetting("of_tool", text, must)


def readable_versions() -> tuple[str, ...]:
    """What a worker of this release says to a claim."""
    return SUPPORTED_SCHEMA_VERSIONS


def resumed(claim: Claim) -> RunState:
    """The state of a claimed run, with all decisions that were taken since it was parked."""
    state = RunState.from_string(claim.snapshot)
    for stored in claim.decisions.exact:
        waiting = [call for call in state.unresolved() if call.call_id == stored.call]
        for call in waiting:
            _check_same(stored, call.tool.text, call.agent.text, call.fingerprint)
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
    book = RunApprovals(exact=state.approvals.exact, standing=(*kept, *decisions))
    nested = {call_id: _with_standing(inner, standing) for call_id, inner in state.nested.items()}
    return msgspec.structs.replace(state, approvals=book, nested=nested)


def _tool(text: str) -> ToolKey:
    """The key that is spelled so."""
    kind, _, rest = text.partition(":")
    namespace, slash, name = rest.rpartition("/")
    place = unquote(namespace) if slash else None
    return ToolKey(unquote(name), cast("ToolKind", kind), place)


def _agent(text: str) -> AgentId:
    """The identity that is spelled so."""
    name, _, tag = text.partition("#")
    return AgentId(unquote(name), unquote(tag) or None)


def parked_openai(snapshot: str | bytes, *, limits: Limits | None = None) -> Parked:
    """A snapshot of openai-agents, unchanged, with the header that its JSON tells.

    The calls that wait are those of its own `get_interruptions`. InvalidRunState refuses a call
    that does not say what it would execute, and two calls of one id.
    """
    given = snapshot.encode() if isinstance(snapshot, str) else snapshot
    read = read_snapshot(given)
    _check_ids_differ(read.calls, INTERRUPTIONS)
    requests = tuple(_request(call, limits) for call in read.calls)
    return Parked(given, f"{OPENAI_SCHEMA}{read.version}", read.agent.text, requests)


class OpenAIState(Protocol):
    """What `resumed_openai` needs of the SDK's `RunState`, which is never imported here."""

    def get_interruptions(self) -> list[Any]: ...

    def approve(self, approval_item: Any, always_approve: bool = False) -> None: ...

    def reject(
        self,
        approval_item: Any,
        always_reject: bool = False,
        *,
        rejection_message: str | None = None,
    ) -> None: ...


S = TypeVar("S", bound=OpenAIState)


def resumed_openai(claim: Claim, state: S) -> S:
    """Apply all decisions of a claim to the SDK's state of that claim's snapshot; gives the state.

    Decisions on single calls and standing ones alike: a run that a standing decision has woken has
    no other, and would be parked and woken for ever without it. Raises CallChanged for a call that
    was decided about as another tool's or with other arguments.
    """
    requests = parked_openai(claim.snapshot).approval_requests
    items = state.get_interruptions()
    if [call_id_of(item.raw_item) for item in items] != [request.call_id for request in requests]:
        why = "other calls wait in the state; make it from claim.snapshot with RunState.from_string"
        raise InvalidRunState(INTERRUPTIONS, why)
    waiting = list(zip(requests, items, strict=True))
    # Standing decisions first: in the SDK one of them clears the exact ones that were there before.
    for decision in claim.decisions.standing:
        for request, item in waiting:
            if (request.tool, request.agent) == (decision.tool, decision.agent):
                _decide(state, item, decision, lasting=_is_function(request.tool))
    exact = {decision.call: decision for decision in claim.decisions.exact}
    for request, item in waiting:
        if (found := exact.get(request.call_id)) is not None:
            _check_same(found, request.tool, request.agent, request.fingerprint)
            _decide(state, item, found, lasting=False)
    return state


def _check_same(decision: StoredDecision, *wanted: str) -> None:
    """A decision counts for the call that people saw; any other under its id is refused.

    Without the refusal the run would be parked, woken by that decision and parked again for ever.
    """
    if (decision.tool, decision.agent, decision.fingerprint) != wanted:
        was = f"{decision.tool:.100} of agent {decision.agent:.100}"
        why = f"it was decided about as a call of {was}; its tool, agent or arguments now differ"
        raise CallChanged(decision.call, why)


def _is_function(tool: str) -> bool:
    """Whether a lasting decision of the SDK's holds for one agent only, as ours do.

    For its other tools the SDK would let it count for every agent of the run.
    """
    return tool.partition(":")[0] in ("bare", "namespaced", "deferred_top_level")


def _decide(state: OpenAIState, item: Any, decision: StoredDecision, *, lasting: bool) -> None:
    if decision.approved:
        state.approve(item, always_approve=lasting)
    else:
        state.reject(item, always_reject=lasting, rejection_message=decision.message)
