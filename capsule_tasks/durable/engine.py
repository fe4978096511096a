"""The port to an agent library: what an engine is given for a turn, and what it returns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from capsule_tasks.protocol.messages import RunEvent
from capsule_tasks.runs.approvals import fingerprint_of
from capsule_tasks.storage import ApprovalRequest, Claim, History
from capsule_tasks.storage.codec import Item

OnUncertain = Literal["retry", "park", "fail", "tell"]
"""The policy for a tool call that was started and may or may not have been made: make it again,
wait for a person who finds out, fail the run, or tell the model."""

FailureKind = Literal[
    "max_turns", "model", "tool", "guardrail", "timeout", "uncertain", "lost", "error"
]


class RunFailure(msgspec.Struct, frozen=True):
    """Why a run failed, as it is stored with the run."""

    kind: FailureKind
    type: str
    message: str


@dataclass(frozen=True)
class ToolCall:
    """A tool call that is about to be made."""

    key: str
    """The id in the ledger: the ids of the enclosing calls and of the call itself."""
    tool: str
    """`ToolKey.text` of the tool."""
    agent: str
    arguments: str
    on_uncertain: OnUncertain = "park"

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.tool, self.arguments)


@dataclass(frozen=True)
class ToolOutcome:
    """The output of a tool call; unknown only where the model is told of an uncertain one."""

    output: bytes = b""
    is_known: bool = True


class ModelCall(Protocol):
    """One call of a model: the journaled reply if it was made before, else a place for it."""

    @property
    def reply(self) -> bytes | None: ...

    async def record(self, reply: bytes) -> None:
        """Journal the complete reply, before anybody acts on it."""
        ...

    def hold(self, reply: bytes) -> None:
        """Have the complete reply journaled together with the next tool call that is started.

        For a reply on which only this turn acts, by tool calls through the ledger and by what it
        commits: a turn that starts no call needs no journal. The replies of a turn, held and
        recorded, are journaled in their order and none without those before it. A crash loses only
        replies after the last call that was started and the last reply that was recorded: the model
        is asked for them again, and nothing has come of them. A turn that is parked within, or
        handed back, has all of its replies journaled.
        """
        ...


class Ledger(Protocol):
    """Keeps the model calls and tool calls of a turn from happening twice.

    Once a method has raised, the turn is over: every later call raises too, and the driver ignores
    what the engine makes of the error. So libraries may turn errors into texts for the model.
    """

    def model_call(self, path: str, digest: str) -> ModelCall:
        """The model call with an input of this digest, within the tool calls of `path`."""
        ...

    async def journal_held(self) -> None:
        """Journal the replies that are held, before something that takes long.

        As before the model call of an agent that is used as a tool, which starts no call itself:
        else a crash meanwhile would lose the reply that asked for the agent.
        """
        ...

    async def tool_call(self, call: ToolCall, make: Callable[[], Awaitable[bytes]]) -> ToolOutcome:
        """The output of a call that was made before, or is made now."""
        ...

    def is_repeat(self, key: str) -> bool:
        """Whether a call that is being made was started before, by this process or a lost one."""
        ...


@dataclass(frozen=True)
class TurnWork:
    """The input of an engine for one turn."""

    claim: Claim
    ledger: Ledger
    history: History
    """To read. What a turn writes is in `TurnEnd.items`, and is committed with the snapshot."""
    publish: Callable[[RunEvent], None] | None = None
    """None if nobody watches, so that events need not be made."""
    live: Any = None
    """`TurnEnd.live` of the turn before, if this process computed it."""
    cut_items: list[Item] = field(default_factory=list)
    """An engine that is cancelled puts here what the history is to keep should the run end."""


@dataclass(frozen=True)
class TurnEnd:
    """The result of one turn of an engine."""

    snapshot: bytes
    schema: str
    agent: str
    status: Literal["running", "interrupted", "completed", "failed"] = "running"
    items: list[Item] = field(default_factory=list)
    approval_requests: tuple[ApprovalRequest, ...] = ()
    output: Any = None
    """The run's output, of types that JSON has."""
    failure: RunFailure | None = None
    usage: dict[str, int] = field(default_factory=dict)
    """The usage of the run's models in all its turns, if the engine knows it."""
    live: Any = None


@runtime_checkable
class Engine(Protocol):
    """An agent in some agent library.

    `turn` makes one turn: at most one call of the agent's model, and the tool calls that it asks
    for. InvalidRunState, UnreadableSchema and UnknownAgent say that the snapshot cannot be read
    here: the run is handed back. Any other exception fails the run.
    """

    @property
    def readable(self) -> Sequence[str]:
        """The versions of snapshots that it reads."""
        ...

    def first(self, given: Any, context: Any = None) -> tuple[bytes, str, str]:
        """The snapshot of a new run with this input, its schema and its agent."""
        ...

    async def turn(self, work: TurnWork) -> TurnEnd: ...

    def waiting(self, claim: Claim) -> tuple[ApprovalRequest, ...]:
        """The calls that wait for a decision in the snapshot of a claim, decided or not."""
        ...

    def encoded(self, output: Any) -> bytes:
        """The output of a tool call as the ledger keeps it; a person gives it as JSON."""
        ...
