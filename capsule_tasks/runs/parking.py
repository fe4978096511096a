"""Between the state of a run and the store: snapshots with their headers, and back.

A store keeps any snapshot byte for byte, with a header. For our own states this module makes both;
for the `RunState` of openai-agents it reads the header from the JSON, which stays unchanged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast, get_args
from urllib.parse import unquote

from capsule_tasks.errors import CallChanged, InvalidRunState, InvalidSetting
from capsule_tasks.runs.approvals import Decision, PendingCall
from capsule_tasks.runs.identity import AgentId, ToolKey, ToolKind
from capsule_tasks.runs.openai_snapshots import INTERRUPTIONS, call_id_of, read_snapshot
from capsule_tasks.runs.schema import CURRENT_SCHEMA_VERSION, SUPPORTED_SCHEMA_VERSIONS
from capsule_tasks.runs.state import RunState
from capsule_tasks.storage.runs.types import ApprovalRequest, Claim, OnExpiry, StoredDecision

OPENAI_SCHEMA = "openai-agents/"
"""In the header, the schema of a snapshot of openai-agents begins with this."""


@dataclass(frozen=True)
class Limits:
    """The time limit of a decision, what happens after it, and who may decide."""

    expires_in_s: float | None = None
    on_expiry: OnExpiry = "reject"
    may_decide: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Parked:
    """A snapshot with the header that is stored with it."""

    snapshot: bytes
    schema: str
    agent: str
    approval_requests: tuple[ApprovalRequest, ...]

    @property
    def header(self) -> dict[str, Any]:
        """The arguments of `create` and `commit` except the snapshot."""
        return {
            "schema": self.schema,
            "agent": self.agent,
            "approval_requests": self.approval_requests,
        }


def parked(
    state: RunState, *, limits: Limits | None = None, of_tool: Mapping[str, Limits] | None = None
) -> Parked:
    """A state as it is stored. `of_tool` has limits by `ToolKey.text`, which override `limits`.

    An example is `bare:refund`. A name alone is refused, since it would limit nothing.
    """
    check_tools("of_tool", of_tool or {})
    waiting = state.unresolved()
    _check_ids_differ(waiting, "$.calls")
    requests = tuple(_request(call, limits, of_tool or {}) for call in waiting)
    snapshot = state.to_string().encode()
    return Parked(snapshot, CURRENT_SCHEMA_VERSION, state.agent.text, requests)


def check_tools(name: str, by_tool: Mapping[str, object]) -> None:
    """Refuse keys that are no `ToolKey.text`: what they are given would hold for no tool."""
    kinds = tuple(f"{kind}:" for kind in get_args(ToolKind))
    for text in by_tool:
        if not str(text).startswith(kinds):
            must = "tools' keys as text, as ToolKey('refund').text is: 'bare:refund'"
            raise InvalidSetting(name, text, must)


def _request(
    call: PendingCall, limits: Limits | None, of_tool: Mapping[str, Limits]
) -> ApprovalRequest:
    own = of_tool.get(call.tool.text) or limits or Limits()
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
    """Refuse two calls with one id: the store, its ledger and decisions know a call by its id.

    A model gives the calls of one run different ids, but agents used as tools have runs of their
    own.
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


def readable_versions() -> tuple[str, ...]:
    """The schema versions that a worker of this release can read, for `claim(readable=…)`."""
    return SUPPORTED_SCHEMA_VERSIONS


def resumed(claim: Claim) -> RunState:
    """The state of a claimed run, with all decisions that were taken since it was parked."""
    state = RunState.from_string(claim.snapshot)
    for stored in claim.decisions.exact:
        for call in [each for each in state.unresolved() if each.call_id == stored.call]:
            _check_same(stored, call.tool.text, call.agent.text, call.fingerprint)
            decide: Callable[..., RunState] = state.approve
            if not stored.approved:
                decide = partial(state.reject, message=stored.message)
            about = {"tool": call.tool, "agent": call.agent, "by": stored.by, "at_ms": stored.at}
            state = decide(call.call_id, **about)
    return _with_standing(state, claim.decisions.standing)


def _with_standing(state: RunState, standing: Sequence[StoredDecision]) -> RunState:
    """The state with these standing decisions, also in nested runs, whose agents may be meant."""
    if not standing:
        return state
    return state.with_standing(
        *(
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
    )


def _tool(text: str) -> ToolKey:
    """The key with this `ToolKey.text`."""
    kind, _, rest = text.partition(":")
    namespace, slash, name = rest.rpartition("/")
    place = unquote(namespace) if slash else None
    return ToolKey(unquote(name), cast("ToolKind", kind), place)


def _agent(text: str) -> AgentId:
    """The identity with this `AgentId.text`."""
    name, _, tag = text.partition("#")
    return AgentId(unquote(name), unquote(tag) or None)


def parked_openai(
    snapshot: str | bytes,
    *,
    limits: Limits | None = None,
    of_tool: Mapping[str, Limits] | None = None,
) -> Parked:
    """A snapshot of openai-agents, unchanged, with the header that is read from its JSON.

    `of_tool` has limits by `ToolKey.text`, which override `limits`.

    The calls that wait are those of the SDK's `get_interruptions`. InvalidRunState refuses a call
    that does not say what it would execute, and two calls with one id.
    """
    check_tools("of_tool", of_tool or {})
    given = snapshot.encode() if isinstance(snapshot, str) else snapshot
    version, agent, calls = read_snapshot(given)
    _check_ids_differ(calls, INTERRUPTIONS)
    requests = tuple(_request(call, limits, of_tool or {}) for call in calls)
    return Parked(given, f"{OPENAI_SCHEMA}{version}", agent.text, requests)


class OpenAIState(Protocol):
    """The methods of the SDK's `RunState` that `resumed_openai` calls; the SDK is not imported."""

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
    """Apply all decisions of a claim to the SDK's state of its snapshot, and return that state.

    Standing decisions are applied, too: a run that was woken by one has no decision about its call,
    and would be parked and woken for ever. Raises CallChanged if a decision was about another tool,
    agent or arguments than the call that waits.
    """
    requests = parked_openai(claim.snapshot).approval_requests
    items = state.get_interruptions()
    if [call_id_of(item.raw_item) for item in items] != [request.call_id for request in requests]:
        why = "other calls wait in the state; make it from claim.snapshot with RunState.from_string"
        raise InvalidRunState(INTERRUPTIONS, why)
    waiting = list(zip(requests, items, strict=True))
    # Standing decisions first: in the SDK, each of them clears exact decisions that came before.
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
    """Refuse a decision that was taken about another call than the one that now has its id.

    Otherwise the run would be parked, woken by that decision and parked again for ever.
    """
    if (decision.tool, decision.agent, decision.fingerprint) != wanted:
        was = f"{decision.tool:.100} of agent {decision.agent:.100}"
        why = f"it was decided about as a call of {was}; its tool, agent or arguments now differ"
        raise CallChanged(decision.call, why)


def _is_function(tool: str) -> bool:
    """Whether a lasting decision in the SDK holds for one agent only, as standing decisions do.

    For tools of other kinds, the SDK would apply it to every agent of the run.
    """
    return tool.partition(":")[0] in ("bare", "namespaced", "deferred_top_level")


def _decide(state: OpenAIState, item: Any, decision: StoredDecision, *, lasting: bool) -> None:
    if decision.approved:
        state.approve(item, always_approve=lasting)
    else:
        state.reject(item, always_reject=lasting, rejection_message=decision.message)
