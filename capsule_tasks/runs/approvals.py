"""Decisions on tool calls, and which of them counts.

A decision is bound to the call id, the tool and the agent that it was asked for. A standing one
(`always`) holds for every later call of that tool by that agent. An exact decision beats a standing
one, and among standing ones the latest counts.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from capsule_tasks.errors import CallChanged, InvalidRunState
from capsule_tasks.runs.identity import AgentId, ToolKey

DEFAULT_REJECTION = "The call of this tool was not approved."


class PendingCall(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A tool call that the model asked for and that has not been made."""

    call_id: str
    """As the provider sent it."""
    tool: ToolKey
    agent: AgentId
    arguments: str
    """As the provider sent them."""
    needs_approval: bool = True

    def __post_init__(self) -> None:
        if not is_call_id(self.call_id):
            raise InvalidRunState("a call's id", "an id is a string that is not empty")
        if not _is_text(self.arguments):
            about = f"call {self.call_id!r:.100} of tool {self.tool.text!r:.100}"
            why = f"{about} has none as text, so nobody could see what they approve"
            raise InvalidRunState("a call's arguments", why)

    @property
    def fingerprint(self) -> str:
        """The fields of a call that must be the same when the call is made again."""
        return fingerprint(self.tool, self.arguments)


class Decision(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What was decided about one call, or about all calls of a tool by an agent."""

    approved: bool
    tool: ToolKey
    agent: AgentId
    call_id: str | None = None
    """None in a standing decision."""
    fingerprint: str | None = None
    """Of the call that was decided about."""
    message: str | None = None
    """For the model, where the call was rejected."""
    by: str | None = None
    at_ms: int = 0

    @property
    def rejection(self) -> str:
        return self.message or DEFAULT_REJECTION


class RunApprovals(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """All decisions of a run; recording one gives a new book."""

    exact: tuple[Decision, ...] = ()
    standing: tuple[Decision, ...] = ()

    def decision_for(self, call: PendingCall) -> Decision | None:
        """The decision that counts for this call, if there is one.

        Raises CallChanged for a call whose arguments are not those that were decided about.
        """
        for decision in self.exact:
            if _place(decision) == (call.call_id, call.tool, call.agent):
                if decision.fingerprint not in (None, call.fingerprint):
                    raise CallChanged(call.call_id, "it was decided about with other arguments")
                return decision
        for decision in reversed(self.standing):
            if (decision.tool, decision.agent) == (call.tool, call.agent):
                return decision
        return None

    def with_decision(
        self,
        call: PendingCall,
        *,
        approved: bool,
        always: bool = False,
        message: str | None = None,
        by: str | None = None,
        at_ms: int = 0,
    ) -> RunApprovals:
        """The book with a decision on this call in the place of an earlier one."""
        common: dict[str, Any] = {
            "approved": approved,
            "tool": call.tool,
            "agent": call.agent,
            "message": message,
            "by": by,
            "at_ms": at_ms,
        }
        exact = Decision(call_id=call.call_id, fingerprint=call.fingerprint, **common)
        kept = [each for each in self.exact if _place(each) != _place(exact)]
        standing = list(self.standing)
        if always:
            whom = (call.tool, call.agent)
            standing = [each for each in standing if (each.tool, each.agent) != whom]
            standing.append(Decision(**common))
        return RunApprovals(exact=(*kept, exact), standing=tuple(standing))

    def without_calls(self, call_ids: frozenset[str]) -> RunApprovals:
        """The book without exact decisions on calls that are over; standing ones stay."""
        kept = tuple(each for each in self.exact if each.call_id not in call_ids)
        return RunApprovals(exact=kept, standing=self.standing)


def is_call_id(value: object) -> bool:
    """Nothing is ever made an id: what the provider sent is one, or it is not."""
    return isinstance(value, str) and bool(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def fingerprint(tool: ToolKey, arguments: str) -> str:
    spelled = f"{tool.text}\n{arguments}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(spelled).hexdigest()[:32]


def _place(decision: Decision) -> tuple[str | None, ToolKey, AgentId]:
    return decision.call_id, decision.tool, decision.agent
