"""How a turn ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from capsule_tasks.errors import (
    GuardrailFailed,
    GuardrailTripped,
    MaxTurnsExceeded,
    ModelFailed,
    ModelMisbehaved,
    ToolFailed,
    ToolTimeout,
)
from capsule_tasks.runs.conversation import Conversation
from capsule_tasks.runs.records import Item
from capsule_tasks.runs.state import RunState

Step = Literal["next", "interrupted", "final"]
FailureKind = Literal["max_turns", "model", "tool", "guardrail", "timeout", "error"]


@dataclass(frozen=True)
class TurnDone:
    """A completed turn, or one that waits for people."""

    state: RunState
    """After the turn; it counts `items` as stored."""
    conversation: Conversation
    items: list[Item]
    """The items to be stored with the state, in order; filters have no effect on them."""
    step: Step
    output: Any = None
    """The final output of the run, if this was its last turn."""
    response_id: str | None = None
    """The id of the model's reply, if it is the final output."""


class TurnFailed(Exception):
    """A turn that ended the run; `cause` says why."""

    def __init__(
        self, kind: FailureKind, cause: Exception, items: list[Item], state: RunState
    ) -> None:
        super().__init__(kind, str(cause))
        self.kind = kind
        self.cause = cause
        self.items = items
        """The items to be stored all the same: the input, and calls with their outputs."""
        self.state = state
        """The state before the turn, which counts `items` as stored: the run may go on from it."""


def kind_of(error: Exception) -> FailureKind:
    """The kind of failure of a run that ends with this error."""
    match error:
        case MaxTurnsExceeded():
            return "max_turns"
        case GuardrailTripped() | GuardrailFailed():
            return "guardrail"
        case ToolFailed():
            return "tool"
        case ToolTimeout():
            return "timeout"
        case ModelFailed() | ModelMisbehaved():
            return "model"
    return "error"
