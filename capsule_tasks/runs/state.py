"""RunState: all that is needed to continue a run, as plain data.

Items that are in the history are counted here, not repeated. A state is immutable: methods return
a new one, so the owner of a run knows what was committed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from capsule_tasks.errors import CallChanged, InvalidRunState, UnknownCall
from capsule_tasks.runs.approvals import Decision, PendingCall, RunApprovals
from capsule_tasks.runs.contexts import MAX_DEPTH, SavedContext, problem_in
from capsule_tasks.runs.identity import AgentGraph, AgentId, AgentNode, ToolKey
from capsule_tasks.runs.records import (
    CodeSession,
    FilteredInput,
    GuardrailResult,
    Item,
    ModelResponse,
    Spent,
    Usage,
)
from capsule_tasks.runs.redaction import without_secrets
from capsule_tasks.runs.schema import CURRENT_SCHEMA_VERSION, VERSION_FIELD, Part, migrated
from capsule_tasks.settings import Count


class ToolUse(Part, frozen=True):
    """The tools that an agent has used in this run, so that its tool choice is reset as before."""

    agent: AgentId
    tools: tuple[str, ...] = ()


class TraceState(Part, frozen=True):
    """The trace that the run belongs to, without the key that exports it.

    Metadata that looks like a secret is left out, unless `unfiltered` allows it to be stored.
    """

    trace_id: str
    workflow: str | None = None
    group_id: str | None = None
    metadata: dict[str, str] | None = None
    unfiltered: bool = False
    left_out: tuple[str, ...] = ()
    """The places where metadata was left out."""

    def __post_init__(self) -> None:
        if isinstance(self.metadata, dict) and not self.unfiltered:
            kept, left_out = without_secrets(self.metadata)
            msgspec.structs.force_setattr(self, "metadata", kept)
            msgspec.structs.force_setattr(self, "left_out", (*self.left_out, *left_out))


class ServerConversation(Part, frozen=True):
    """The position in a server-side conversation, so that acknowledged items are not replayed."""

    conversation_id: str | None = None
    previous_response_id: str | None = None
    acknowledged_items: int = 0


class RunState(Part, frozen=True):
    """One run between two turns."""

    run_id: str
    start_agent: AgentId
    agent: AgentId
    """The agent whose turn is next."""
    turn: Count = 0
    """The number of completed turns."""
    max_turns: Count | None = None
    input: str | list[Item] = ""
    """The input that the run was started with, unless it is in the history."""
    stored_items: Count = 0
    """How many items of this run are in the history."""
    first_item: str | None = None
    """The digests of the first and the last of them, by which a resume finds them there."""
    last_item: str | None = None
    held_items: list[Item] = msgspec.field(default_factory=list)
    """Items of this run that no history keeps: of an agent used as a tool, or of a run without a
    session. Where the model's server keeps the conversation, those that it was not sent yet."""
    calls: tuple[PendingCall, ...] = ()
    approvals: RunApprovals = RunApprovals()
    tool_use: tuple[ToolUse, ...] = ()
    usage: tuple[Usage, ...] = ()
    context: SavedContext = SavedContext()
    trace: TraceState | None = None
    nested: dict[str, RunState] = msgspec.field(default_factory=dict)
    """Runs of agents that are used as tools, by the id of the tool call."""
    conversation: ServerConversation | None = None
    responses: tuple[ModelResponse, ...] = ()
    """Replies of models in the turn that the run is in."""
    guardrails: tuple[GuardrailResult, ...] = ()
    """Results of guardrails; those of tools are of calls that are not over."""
    filtered_input: FilteredInput | None = None
    """Items that the model sees in place of earlier ones; None if no filter changed its view."""
    code: CodeSession | None = None

    def to_json(self) -> dict[str, Any]:
        """The snapshot, as JSON values, in the current schema version.

        Raises InvalidRunState for a state that could not be read back.
        """
        try:
            found = _problem_in(self)
            fields = {} if found else _with_lists(msgspec.to_builtins(self))
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            why = f"a field has a value that no state can have ({type(error).__name__})"
            raise InvalidRunState("$", why) from None
        if found:
            raise InvalidRunState("$", f"{found}, which is not JSON")
        _converted(fields)
        return {VERSION_FIELD: CURRENT_SCHEMA_VERSION, **fields}

    @classmethod
    def from_json(cls, data: Any) -> RunState:
        """The state of a snapshot of any readable version; errors do not repeat its values."""
        return _converted(migrated(data))

    def to_string(self) -> str:
        """The snapshot as text; refuses what `to_json` refuses."""
        quickly = _written(self)
        if quickly is not None:
            return f"{_HEAD}{quickly[1:]}"
        return json.dumps(self.to_json(), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_string(cls, text: str | bytes) -> RunState:
        """The state of a snapshot that is text."""
        quickly = _read(text)
        if quickly is not None:
            return quickly
        try:
            data = json.loads(text, parse_constant=_refuse_constant)
        except (TypeError, ValueError, RecursionError):
            raise InvalidRunState("$", "it is not JSON") from None
        return cls.from_json(data)

    def with_graph(self, graph: AgentGraph) -> AgentNode:
        """The agent whose turn is next; raises if the graph lacks any agent of this state.

        Nested runs are not checked, because an agent used as a tool has a graph of its own.
        """
        for identity in self._identities():
            graph.resolve(identity)
        return graph.resolve(self.agent)

    def unresolved(self) -> list[PendingCall]:
        """Calls that wait for a decision, including those of nested runs."""
        return [call for state, call in _awaited(self) if not state.approvals.decision_for(call)]

    def decision_for(self, call: PendingCall) -> Decision | None:
        """The decision that counts for a call of this run, or None."""
        return self.approvals.decision_for(call)

    def approve(
        self,
        call_id: str,
        *,
        tool: ToolKey | None = None,
        agent: AgentId | None = None,
        always: bool = False,
        by: str | None = None,
        at_ms: int = 0,
    ) -> RunState:
        """Approve a waiting call; with `always` also every other call of its tool by its agent."""
        return self._decided(call_id, tool, agent, always, approved=True, by=by, at_ms=at_ms)

    def reject(
        self,
        call_id: str,
        *,
        tool: ToolKey | None = None,
        agent: AgentId | None = None,
        message: str | None = None,
        always: bool = False,
        by: str | None = None,
        at_ms: int = 0,
    ) -> RunState:
        """Reject a waiting call; the message is for the model."""
        decision = {"approved": False, "message": message, "by": by, "at_ms": at_ms}
        return self._decided(call_id, tool, agent, always, **decision)

    def with_calls(self, calls: Iterable[PendingCall]) -> RunState:
        """The state with more waiting calls.

        Raises CallChanged for another call under the id of a call that already waits.
        """
        known = {call.call_id: call for call in self.calls}
        for call in calls:
            other = known.setdefault(call.call_id, call)
            if (other.fingerprint, other.agent) != (call.fingerprint, call.agent):
                raise CallChanged(call.call_id, "it waits with another tool, agent or arguments")
        return replace(self, calls=tuple(known.values()))

    def without_calls(self, call_ids: Iterable[str]) -> RunState:
        """The state after these calls were made, without exact decisions about them."""
        over = frozenset(call_ids)
        return replace(
            self,
            calls=tuple(call for call in self.calls if call.call_id not in over),
            approvals=self.approvals.without_calls(over),
            nested={each: state for each, state in self.nested.items() if each not in over},
        )

    def with_tool_use(self, agent: AgentId, tools: Iterable[str]) -> RunState:
        """The state in which this agent has used exactly these tools."""
        kept = [use for use in self.tool_use if use.agent != agent]
        use = ToolUse(agent=agent, tools=tuple(tools))
        return replace(self, tool_use=(*kept, use))

    def with_usage(self, agent: AgentId, spent: Spent) -> RunState:
        """The state with this usage of an agent added."""
        before = next((each for each in self.usage if each.agent == agent), Spent())
        more = Usage(agent=agent, **msgspec.structs.asdict(spent.plus(before)))
        kept = [each for each in self.usage if each.agent != agent]
        return replace(self, usage=(*kept, more))

    def with_response(self, response: ModelResponse) -> RunState:
        """The state with one more reply of a model in this turn, and with its usage."""
        after = self.with_usage(response.agent, response.spent)
        return replace(after, responses=(*self.responses, response))

    def with_code(self, code: CodeSession) -> RunState:
        """The state of a run that has seen its code session so far, unless it has seen more."""
        known = self.code
        is_same = known is not None and known.session_id == code.session_id
        if known is not None and is_same and known.last_call > code.last_call:
            return self
        return replace(self, code=code)

    def with_guardrails(self, results: Iterable[GuardrailResult]) -> RunState:
        """The state with more results of guardrails."""
        return replace(self, guardrails=(*self.guardrails, *results))

    def after_turn(self, *, agent: AgentId | None = None, stored_items: int = 0) -> RunState:
        """The state after its turn: the replies, and the guardrails of calls that are over, go.

        `stored_items` more items of the run are in the history. The next turn is that of `agent`.
        """
        waiting = {call.call_id for call in self.calls}
        kept = [each for each in self.guardrails if not each.call_id or each.call_id in waiting]
        return replace(
            self,
            turn=self.turn + 1,
            agent=agent or self.agent,
            stored_items=self.stored_items + stored_items,
            responses=(),
            guardrails=tuple(kept),
        )

    def total_usage(self) -> Spent:
        """The usage of all agents of the run, and of those that are used as tools."""
        inner = [nested.total_usage() for nested in self.nested.values()]
        total = Spent()
        for spent in (*self.usage, *inner):
            total = total.plus(spent)
        return total

    def tools_used_by(self, agent: AgentId) -> tuple[str, ...]:
        return next((use.tools for use in self.tool_use if use.agent == agent), ())

    def _decided(
        self,
        call_id: str,
        tool: ToolKey | None,
        agent: AgentId | None,
        always: bool,
        **fields: Any,
    ) -> RunState:
        found = [
            (state, call)
            for state, call in _awaited(self)
            if call.call_id == call_id and tool in (None, call.tool) and agent in (None, call.agent)
        ]
        if not found:
            raise UnknownCall(call_id, "no waiting call of the run has this id, tool and agent")
        if len(found) > 1:
            raise UnknownCall(call_id, f"{len(found)} calls have that id; give tool= and agent=")
        [(owner, call)] = found
        decision = Decision(tool=call.tool, agent=call.agent, **fields)
        after = _with_approvals(self, owner, owner.approvals.with_decision(call, decision))
        return after.with_standing(decision) if always else after

    def with_standing(self, *decisions: Decision) -> RunState:
        """The state with standing decisions, which hold for nested runs and later ones, too."""
        nested = {each: state.with_standing(*decisions) for each, state in self.nested.items()}
        return replace(self, approvals=self.approvals.with_standing(*decisions), nested=nested)

    def _identities(self) -> Iterable[AgentId]:
        # Standing decisions may be about agents that are used as tools, which have other graphs.
        parts: list[Any] = [*self.calls, *self.approvals.exact, *self.tool_use]
        parts += [*self.usage, *self.responses, *self.guardrails]
        # In this order, so that an error names the same agent each time.
        return dict.fromkeys((self.start_agent, self.agent, *(part.agent for part in parts)))


_HEAD = f'{{"{VERSION_FIELD}":"{CURRENT_SCHEMA_VERSION}",'
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(RunState).decode
_NOT_QUICKLY = (AttributeError, TypeError, ValueError, OverflowError, RecursionError)
"""Errors upon which a state is written or read step by step, which gives the reason."""


def _written(state: RunState) -> str | None:
    """The fields of a state as text, if they read back as they are; most states do."""
    try:
        text = _encode(state)
        if _decode(text) != state:
            return None
        _check(state)
        if text.count(b"[") + text.count(b"{") > MAX_DEPTH and _problem_in(state):
            return None
        return text.decode()
    except _NOT_QUICKLY:
        return None


def _read(text: str | bytes) -> RunState | None:
    """The state of a snapshot that begins as those do that `to_string` writes."""
    try:
        spelled = text if isinstance(text, str) else text.decode()
        if not spelled.startswith(_HEAD):
            return None
        state = _decode("{" + spelled[len(_HEAD) :])
        _check(state)
    except _NOT_QUICKLY:
        return None
    return state


def _awaited(state: RunState) -> Iterator[tuple[RunState, PendingCall]]:
    """Calls that need an approval, each with its run, which may be a nested one."""
    for call in state.calls:
        if call.needs_approval:
            yield state, call
    for nested in state.nested.values():
        yield from _awaited(nested)


def _with_approvals(state: RunState, owner: RunState, approvals: RunApprovals) -> RunState:
    """The state in which `owner`, the state itself or a nested run, has these approvals."""
    if state is owner:
        return replace(state, approvals=approvals)
    nested = {key: _with_approvals(each, owner, approvals) for key, each in state.nested.items()}
    return replace(state, nested=nested)


def _problem_in(state: RunState) -> str | None:
    """The first of the caller's values that is not JSON. All other fields are, by their types."""
    parts = {
        "input": state.input,
        "held_items": state.held_items,
        "context": state.context.value,
        "metadata": state.trace and state.trace.metadata,
        "responses": [response.items for response in state.responses],
        "guardrails": [result.info for result in state.guardrails],
        "filtered_input": state.filtered_input and state.filtered_input.items,
    }
    found = problem_in(parts)
    inner = (_problem_in(nested) for nested in state.nested.values())
    return found or next(filter(None, inner), None)


def _with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_lists(each) for key, each in value.items()}
    return [_with_lists(each) for each in value] if isinstance(value, (list, tuple)) else value


def _converted(fields: dict[str, Any]) -> RunState:
    try:
        state = msgspec.convert(fields, RunState, strict=True)
    except InvalidRunState:
        raise
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise _refusal(str(error)) from None
    _check(state)
    return state


def _check(state: RunState) -> None:
    """Refuse what the types alone allow."""
    ids = [call.call_id for call in state.calls]
    if len(set(ids)) != len(ids):
        raise InvalidRunState("$.calls", "two calls have one id")
    if any(decision.call_id is None for decision in state.approvals.exact):
        raise InvalidRunState("$.approvals.exact", "an exact decision needs the id of its call")
    if any(decision.call_id is not None for decision in state.approvals.standing):
        raise InvalidRunState("$.approvals.standing", "a standing decision has no call id")
    for index, result in enumerate(state.guardrails):
        if problem := result.problem:
            raise InvalidRunState(f"$.guardrails[{index}]", problem)
    if strange := state.nested.keys() - set(ids):
        raise InvalidRunState("$.nested", f"{len(strange)} of them belong to no waiting call")
    for nested in state.nested.values():
        _check(nested)


def _refusal(message: str) -> InvalidRunState:
    """The error for a message of msgspec. Only names are repeated, since it may contain a value."""
    if field := re.search(r"^Object (missing|contains unknown) .*`([^`]{1,60})[^`]*`$", message):
        why = "it is missing" if field[1] == "missing" else "there is no such field"
        return InvalidRunState(f"$.{field[2]}", why)
    place = re.search(r" - at (?:key in )?`(\$[^`]*)`$", message)
    why = "it is negative" if " >= 0" in message else "it has the wrong type"
    return InvalidRunState(place[1] if place else "$", why)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
