"""Decisions about tool calls, and which decision counts for a call.

An exact decision is bound to the id, the tool and the agent of one call. A standing decision
(`always`) holds for every later call of that tool by that agent. An exact decision overrides a
standing one, and of several standing decisions the latest counts.
"""

from __future__ import annotations

import hashlib

from msgspec.structs import replace

from capsule_tasks.errors import CallChanged, InvalidRunState
from capsule_tasks.protocol.values import sendable
from capsule_tasks.runs.identity import AgentId, ToolKey
from capsule_tasks.runs.schema import Part

DEFAULT_REJECTION = "The call of this tool was not approved."


def fingerprint_of(tool: str, arguments: str) -> str:
    """A digest of the tool, as `ToolKey.text`, and the arguments of a call."""
    spelled = f"{tool}\n{arguments}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(spelled).hexdigest()[:32]


class PendingCall(Part, frozen=True, kw_only=True):
    """A tool call that the model asked for and that has not been made."""

    call_id: str
    """The id that the provider sent, never a value that was converted to text."""
    tool: ToolKey
    agent: AgentId
    arguments: str
    """The text that the provider sent."""
    needs_approval: bool = True

    def __post_init__(self) -> None:
        call_id: object = self.call_id
        arguments: object = self.arguments
        if not isinstance(call_id, str) or not call_id:
            raise InvalidRunState("a call's id", "an id is a string that is not empty")
        if not isinstance(arguments, str):
            about = f"call {self.call_id!r:.100} of tool {self.tool.text!r:.100}"
            why = f"{about} has none as text, so nobody could see what they approve"
            raise InvalidRunState("a call's arguments", why)

    @property
    def fingerprint(self) -> str:
        """A digest of what must be the same when the call is made again: tool and arguments."""
        return fingerprint_of(self.tool.text, self.arguments)


class Decision(Part, frozen=True, kw_only=True):
    """The decision about one call, or about all calls of a tool by an agent."""

    approved: bool
    tool: ToolKey
    agent: AgentId
    call_id: str | None = None
    """None in a standing decision."""
    fingerprint: str | None = None
    """The fingerprint of the call that was decided about."""
    message: str | None = None
    """For the model, if the call was rejected."""
    by: str | None = None
    at_ms: int = 0

    @property
    def rejection(self) -> str:
        return sendable(self.message) if self.message else DEFAULT_REJECTION


class RunApprovals(Part, frozen=True, kw_only=True):
    """All decisions of a run; recording a decision returns a new object."""

    exact: tuple[Decision, ...] = ()
    standing: tuple[Decision, ...] = ()

    def decision_for(self, call: PendingCall) -> Decision | None:
        """The decision that counts for this call, or None.

        Raises CallChanged if the decision was about other arguments.
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

    def with_decision(self, call: PendingCall, decision: Decision) -> RunApprovals:
        """These decisions with one about this call in place of an earlier one."""
        exact = replace(decision, call_id=call.call_id, fingerprint=call.fingerprint)
        kept = [each for each in self.exact if _place(each) != _place(exact)]
        return replace(self, exact=(*kept, exact))

    def with_standing(self, *decisions: Decision) -> RunApprovals:
        """These standing decisions added, each in place of an earlier one on its tool and agent."""
        known = {(each.tool, each.agent) for each in decisions}
        kept = [each for each in self.standing if (each.tool, each.agent) not in known]
        return replace(self, standing=(*kept, *decisions))

    def without_calls(self, call_ids: frozenset[str]) -> RunApprovals:
        """These decisions without the exact ones about calls that are over; standing ones stay."""
        kept = tuple(each for each in self.exact if each.call_id not in call_ids)
        return replace(self, exact=kept)


def _place(decision: Decision) -> tuple[str | None, ToolKey, AgentId]:
    return decision.call_id, decision.tool, decision.agent
