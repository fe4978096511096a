"""The records of a run for whoever continues it: usage, replies of models, results of guardrails.

None of it repeats items that are in the history, so a snapshot does not grow with the turns.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import msgspec

from capsule_tasks.runs.contexts import problem_in, type_name
from capsule_tasks.runs.identity import AgentId, ToolKey
from capsule_tasks.runs.redaction import without_secrets
from capsule_tasks.runs.schema import Part
from capsule_tasks.settings import Count

Item = dict[str, Any]


class Spent(Part, frozen=True, kw_only=True):
    """The requests to models, and the tokens and the time that they took."""

    requests: int = 0
    input_tokens: int = 0
    """All tokens of the input, those that a cache had among them."""
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    """All tokens of the output, those of the reasoning among them."""
    reasoning_tokens: int = 0
    time_ms: int = 0
    """How long the models took to answer."""

    def plus(self, other: Spent) -> Spent:
        names = Spent.__struct_fields__
        return Spent(**{name: getattr(self, name) + getattr(other, name) for name in names})


class Usage(Spent, frozen=True, kw_only=True):
    """The usage of an agent in this run."""

    agent: AgentId


class ModelResponse(Part, frozen=True, kw_only=True):
    """A reply of a model in the turn that the run is in; those of completed turns are not kept."""

    agent: AgentId
    response_id: str | None = None
    """The provider's id of the reply, and of the request."""
    request_id: str | None = None
    items: list[Item] = msgspec.field(default_factory=list)
    """The items of the reply that are not in the history yet."""
    stored_items: Count = 0
    """How many of its items are in the history."""
    spent: Spent = Spent()


GuardrailKind = Literal["input", "output", "tool_input", "tool_output"]
_TOOL_KINDS = ("tool_input", "tool_output")


class GuardrailResult(Part, frozen=True, kw_only=True):
    """The result of a guardrail, so that it need not run again and is reported in the end.

    Parts of `info` that look like secrets are left out, unless `unfiltered` allows them to be
    stored.
    """

    kind: GuardrailKind
    name: str
    agent: AgentId
    tripped: bool = False
    call_id: str | None = None
    """The call of a tool that a tool's guardrail was about; so is `tool`."""
    tool: ToolKey | None = None
    behavior: Literal["allow", "reject", "raise"] = "allow"
    """The verdict of a tool's guardrail: `reject` puts `message` in place of the output."""
    message: str | None = None
    info: Any = None
    """Details that the guardrail gives, as JSON."""
    info_type: str | None = None
    """The type of an `info` that is not stored because it is not JSON."""
    unfiltered: bool = False
    left_out: tuple[str, ...] = ()
    """The places where parts of the info were left out."""

    def __post_init__(self) -> None:
        if self.info is not None and not self.unfiltered:
            kept, left_out = without_secrets({"info": self.info})
            msgspec.structs.force_setattr(self, "info", kept.get("info"))
            msgspec.structs.force_setattr(self, "left_out", (*self.left_out, *left_out))

    @classmethod
    def recorded(cls, *, info: Any = None, **fields: Any) -> Self:
        """A result whose info may be anything: of what is not JSON only the type is stored."""
        if problem_in(info) is None:
            return cls(info=info, **fields)
        return cls(info_type=type_name(info), **fields)

    @property
    def problem(self) -> str | None:
        """Why there is no such result, or None."""
        is_of_tool = self.kind in _TOOL_KINDS
        if is_of_tool != bool(self.call_id) or is_of_tool != (self.tool is not None):
            return "a guardrail of a tool has the call and the tool, and no other has"
        if not is_of_tool and self.behavior != "allow":
            return "only a guardrail of a tool has a behavior"
        return None


class FilteredInput(Part, frozen=True):
    """The model's view of what came before, where a callback or a handoff's filter has made one.

    The history and `RunState.held_items` keep everything, unfiltered. The model sees these items in
    place of all that was in the history before the run, and of the run's first `stands_for` items,
    its input among them; items after those it sees as they are.
    """

    items: list[Item]
    stands_for: Count = 0
    last_item: str | None = None
    """The digest of the last of the run's items that it stands for."""


class CodeSession(Part, frozen=True, kw_only=True):
    """The named session in which the run's code runs, and how far the run has seen it."""

    session_id: str
    profile: str | None = None
    last_call: Count = 0
    """The number of the run's last call in the session's log. A session that gives the same or a
    smaller one to a later call has begun anew, without its names."""
    generation: str | None = None
    """The checkpoint that the namespace was last saved as, or restored from."""
