"""Values of the store of runs, and checks of what callers give to it.

Snapshots, tools and agents are opaque to the store. Redis turns numbers into text, and Lua takes
any text for true: a value of a wrong type could become another id, or make a call happen twice.
"""

# The annotations of `Checked` structs are needed as objects.
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from capsule_tasks.errors import InvalidSetting, RunTooLarge
from capsule_tasks.settings import Checked, PositiveSeconds, Text, check_value
from capsule_tasks.storage.keys import escaped

Status = Literal["queued", "running", "interrupted", "completed", "failed", "cancelled"]
OnExpiry = Literal["reject", "approve", "cancel"]
RequestKind = Literal["approval", "settle"]
"""A consent to a call, or the answer whether a call was made that had been started."""

ENDED: frozenset[Status] = frozenset({"completed", "failed", "cancelled"})

TRANSITIONS: dict[Status, frozenset[Status]] = {
    "queued": frozenset({"running", "cancelled"}),
    "running": frozenset({"running", "queued", "interrupted", *ENDED}),
    "interrupted": frozenset({"queued", "cancelled"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}
"""running → running is a turn, or a claim after a lapsed lease. A decision queues a parked run."""


Turn = Annotated[int, Meta(ge=0, le=2**53)]
"""Numbers up to here are exact in Lua."""
PageSize = Annotated[int, Meta(ge=1, le=10_000)]
OptionalName = Text | None
OptionalStatus = Status | None
OptionalText = str | None
"""May be empty; characters that UTF-8 cannot encode are escaped."""
MAX_CALLS = 1000
"""Calls that may wait, start or end in one script, or replies in it: it blocks the server."""

_Exact = Annotated[int, Meta(ge=1, le=2**53)]


class ApprovalRequest(Checked, frozen=True, kw_only=True):
    """A tool call that has to wait for a decision."""

    call_id: Text
    tool: Text
    agent: Text
    fingerprint: Text
    """The fingerprint of the tool and its arguments, equal for all calls of one id."""
    arguments: str = ""
    """For the person who decides."""
    expires_in_s: PositiveSeconds | None = None
    on_expiry: OnExpiry = "reject"
    may_decide: Annotated[tuple[Text, ...], Meta(min_length=1)] | None = None
    """People and roles that may decide; None for everybody."""
    kind: RequestKind = "approval"


class StoredDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision as the ledger has it; a standing one has the `call` it was taken on."""

    call: str
    tool: str
    agent: str
    approved: bool
    at: int
    fingerprint: str = ""
    message: str | None = None
    by: str | None = None
    output: str | None = None
    """What a call gave, as JSON, of which a person knows that it was made; such a decision does
    not approve anything."""

    def __str__(self) -> str:
        word = "approved" if self.approved else "rejected"
        word = word if self.output is None else "settled"
        return f"{word} by {self.by}" if self.by else word


class RunUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The usage of the committed turns of a run."""

    requests: int = 0
    """Calls of models."""
    input_tokens: int = 0
    output_tokens: int = 0
    time_ms: int = 0
    """How long its turns took, without waits for people and for workers."""


NO_USAGE = RunUsage()


class Decisions(msgspec.Struct, frozen=True):
    """The decisions of a run: on single calls, and on all calls of a tool."""

    exact: tuple[StoredDecision, ...] = ()
    standing: tuple[StoredDecision, ...] = ()


@dataclass(frozen=True)
class Claim:
    """A claimed run: what its owner continues with, and the token that proves the claim."""

    run_id: str
    session_id: str
    token: int
    revision: int
    turn: int
    schema: str
    agent: str
    snapshot: bytes = field(repr=False)
    decisions: Decisions
    cancelled_by: str | None
    """The requester of the cancel. The owner should commit the run as `cancelled`."""
    updated_us: int
    message: bytes = field(default=b"", repr=False)
    """The message that brings the run to a worker."""
    owner: str = ""
    hold: bytes = field(default=b"", repr=False)
    """The record that the owner has the run."""
    journal: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Replies of models in the turn that comes next, which an owner before recorded."""
    losses: int = 0
    """Owners that were lost, one after the other, since the run last made progress."""
    usage: RunUsage = NO_USAGE


@dataclass(frozen=True)
class Created:
    """A run that was stored; `queued`, or `interrupted` if it waits for decisions."""

    status: Status
    updated_us: int


@dataclass(frozen=True)
class Committed:
    """A turn that was stored; `claim` is the one to commit the next turn with."""

    claim: Claim
    status: Status
    """`queued` or `cancelled` in place of `interrupted`, if a decision or cancel came first."""


@dataclass(frozen=True)
class Resolved:
    """The outcome of a decision; only the caller that gets `resume` sends a message for the run."""

    run_id: str
    call_id: str
    status: Status
    resume: bool
    updated_us: int


@dataclass(frozen=True)
class Expired:
    """Decisions that were taken because a time limit passed."""

    run_id: str
    calls: tuple[str, ...]
    status: Status
    resume: bool
    updated_us: int


@dataclass(frozen=True)
class Sweep:
    """The result of `expire_due`, and when to call it again; None: after the next request."""

    expired: list[Expired]
    next_in_s: float | None


@dataclass(frozen=True)
class Requeued:
    """A run whose owner is gone; whoever is told of it sends a message for the run.

    A run that was to be cancelled is `cancelled` in place of `queued`, and needs the message too.
    """

    run_id: str
    status: Status
    updated_us: int


@dataclass(frozen=True)
class RequeueSweep:
    """The result of `requeue_lapsed`, and when to call it again; None: once a run is claimed."""

    requeued: list[Requeued]
    next_in_s: float | None


@dataclass(frozen=True)
class Cancelled:
    """The outcome of a cancel; a running run ends when its owner, to be notified, commits it."""

    run_id: str
    status: Status
    owner: str | None
    updated_us: int

    @property
    def resume(self) -> bool:
        """Whether the caller sends a message for the run: the worker that gets it ends its task."""
        return self.status == "cancelled"


@dataclass(frozen=True)
class PendingApproval:
    """A tool call that waits for a decision."""

    run_id: str
    session_id: str
    call_id: str
    tool: str
    agent: str
    arguments: str
    fingerprint: str
    asked_at: datetime
    expires_at: datetime | None
    on_expiry: OnExpiry
    may_decide: tuple[str, ...] | None
    kind: RequestKind = "approval"


@dataclass(frozen=True)
class PendingApprovalPage:
    """Calls that wait, oldest first; `cursor` is that of the next page, None on the last."""

    calls: list[PendingApproval]
    cursor: str | None


@dataclass(frozen=True)
class RunRecord:
    """A run as it is stored."""

    run_id: str
    session_id: str
    status: Status
    revision: int
    turn: int
    owner: str | None
    token: int
    cancelled_by: str | None
    schema: str
    agent: str
    created_at: datetime
    updated_us: int
    snapshot: bytes = field(repr=False)
    pending: tuple[PendingApproval, ...] = ()
    message: bytes = field(default=b"", repr=False)
    result: bytes = field(default=b"", repr=False)
    """That with which the owner ended the run; so is the error."""
    error: bytes = field(default=b"", repr=False)
    unsent_us: int = 0
    """`updated_us` of the change that needs a message sent for the run; 0 if none is needed, and
    once it was noted as sent."""
    start_agent: str = ""
    """The agent with which the run was created."""
    usage: RunUsage = NO_USAGE
    decided: tuple[str, ...] = ()
    """Calls that the run waited for after its last turn, and that were decided since."""

    @property
    def updated_at(self) -> datetime:
        return datetime.fromtimestamp(self.updated_us / 1e6, UTC)


@dataclass(frozen=True)
class RunPage:
    """Runs without their snapshots; `cursor` is that of the next page, None on the last."""

    runs: list[RunRecord]
    cursor: str | None


@dataclass(frozen=True)
class Unsent:
    """Runs that need a message, without their snapshots, and when to look again.

    None: once a run is queued or cancelled.
    """

    runs: list[RunRecord]
    next_in_s: float | None


class PlannedCall(Checked, frozen=True):
    """A tool call that is about to start; with `retry` it may happen twice."""

    call_id: Text
    fingerprint: Text
    retry: bool = False


@dataclass(frozen=True)
class CallStart:
    """The ledger's answer for a call that is about to start."""

    call_id: str
    state: Literal["go", "finished", "uncertain"]
    output: bytes | None = None
    started_at: datetime | None = None
    """When it was started before, and did not finish; also of a call that goes ahead again."""


@dataclass(frozen=True)
class CallStarts:
    """The ledger's answers for calls that are about to start, and who cancelled the run."""

    calls: list[CallStart]
    cancelled_by: str | None


class Signal(msgspec.Struct, frozen=True):
    """An approval was requested or decided; the run has the details."""

    event: Literal["requested", "decided"]
    run: str
    call: str
    by: str = ""


def time_of(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def pending_approval(run_id: str, session_id: str, entry: dict[str, Any]) -> PendingApproval:
    expires = entry.get("expires")
    may = entry.get("may")
    return PendingApproval(
        run_id=run_id,
        session_id=session_id,
        call_id=entry["call"],
        tool=entry["tool"],
        agent=entry["agent"],
        arguments=entry.get("args", ""),
        fingerprint=entry["fingerprint"],
        asked_at=time_of(entry["at"]),
        expires_at=None if expires is None else time_of(expires),
        on_expiry=entry.get("on_expiry", "reject"),
        may_decide=None if may is None else tuple(may),
        kind=entry.get("kind", "approval"),
    )


def check_names(name: str, values: Any) -> None:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Collection):
        raise InvalidSetting(name, values, "several names, not one text")
    for value in values:
        check_value(name, value, Text)


def check_claim(claim: Any) -> None:
    """Refuse what is no claim; one that a caller has stored and loaded may have other types."""
    if not isinstance(claim, Claim):
        raise InvalidSetting("claim", type(claim).__name__, "the Claim that claim or commit gave")
    check_value("claim.token", claim.token, _Exact)
    check_value("claim.revision", claim.revision, _Exact)


def check_usage(usage: Any) -> None:
    if not isinstance(usage, RunUsage):
        raise InvalidSetting("usage", usage, "a RunUsage")


def check_bytes(what: str, value: Any, max_bytes: int) -> None:
    if not isinstance(value, bytes):
        raise InvalidSetting(what, type(value).__name__, "bytes")
    if len(value) > max_bytes:
        raise RunTooLarge(what, len(value), max_bytes)


def check_outputs(outputs: Any, max_bytes: int) -> None:
    if not isinstance(outputs, Mapping):
        raise InvalidSetting("outputs", type(outputs).__name__, "a mapping of call ids to bytes")
    _check_number("outputs", len(outputs))
    for call_id, output in outputs.items():
        escaped("call id", call_id)
        check_bytes(f"the output of call {call_id!r:.100}", output, max_bytes)


def check_replies(replies: Any, max_bytes: int) -> None:
    if not isinstance(replies, Mapping):
        raise InvalidSetting("replies", type(replies).__name__, "a mapping of keys to bytes")
    _check_number("replies", len(replies))
    for key, reply in replies.items():
        check_value("key", key, Text)
        check_bytes(f"the reply {key!r:.100}", reply, max_bytes)


def check_calls(name: str, calls: Any, kind: type[ApprovalRequest | PlannedCall]) -> None:
    """Refuse an iterator, as the calls are read more than once, and two calls with one id."""
    if isinstance(calls, (str, bytes)) or not isinstance(calls, Sequence):
        raise InvalidSetting(name, type(calls).__name__, "a list or a tuple")
    _check_number(name, len(calls))
    known = set[str]()
    for call in calls:
        if not isinstance(call, kind):
            raise InvalidSetting(name, call, f"several of {kind.__name__}")
        escaped("call id", call.call_id)
        if call.call_id in known:
            must = "calls of different ids; this one is there twice"
            raise InvalidSetting(name, call.call_id, must)
        known.add(call.call_id)


def _check_number(name: str, count: int) -> None:
    if count > MAX_CALLS:
        raise InvalidSetting(name, f"{count} {name}", f"at most {MAX_CALLS} at once")
