"""What the store of runs takes and answers with. Snapshots, tools and agents are opaque to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

Status = Literal["queued", "running", "interrupted", "completed", "failed", "cancelled"]
OnExpiry = Literal["reject", "approve", "cancel"]

ENDED: frozenset[Status] = frozenset({"completed", "failed", "cancelled"})

TRANSITIONS: dict[Status, frozenset[Status]] = {
    "queued": frozenset({"running", "cancelled"}),
    "running": frozenset({"running", "queued", "interrupted", *ENDED}),
    "interrupted": frozenset({"queued", "cancelled"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}
"""running → running is a turn, or a claim after a lapsed lease; a decision queues what waits."""


class ApprovalRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call that has to wait for a decision."""

    call_id: str
    tool: str
    agent: str
    fingerprint: str
    """Of the tool and the arguments: a call that comes again must be the same."""
    arguments: str = ""
    """For whoever decides."""
    expires_in_s: float | None = None
    on_expiry: OnExpiry = "reject"
    may_decide: tuple[str, ...] | None = None
    """People and roles, one of which whoever decides must be; None lets everybody."""


class StoredDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision as the ledger has it; in a standing one, `call` is the one it was taken on."""

    call: str
    tool: str
    agent: str
    approved: bool
    at: int
    fingerprint: str = ""
    message: str | None = None
    by: str | None = None

    def __str__(self) -> str:
        word = "approved" if self.approved else "rejected"
        return f"{word} by {self.by}" if self.by else word


class Decisions(msgspec.Struct, frozen=True):
    """What was decided about a run: on calls that waited, and on all calls of a tool."""

    exact: tuple[StoredDecision, ...] = ()
    standing: tuple[StoredDecision, ...] = ()


@dataclass(frozen=True)
class Claim:
    """A run in the hands of one owner: what to go on with, and the proof of being the owner."""

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
    """Who asked for the run's end; its owner should commit it as `cancelled`."""
    updated_us: int


@dataclass(frozen=True)
class Committed:
    """A turn that was stored; `claim` is the one to commit the next turn with."""

    claim: Claim
    status: Status
    """`queued` or `cancelled` in the place of `interrupted`, if the decision came first."""


@dataclass(frozen=True)
class Resolved:
    """The outcome of a decision; whoever is told `resume` sends the run on, and nobody else."""

    run_id: str
    call_id: str
    status: Status
    resume: bool
    updated_us: int


@dataclass(frozen=True)
class Expired:
    """Decisions that time took."""

    run_id: str
    calls: tuple[str, ...]
    status: Status
    resume: bool
    updated_us: int


@dataclass(frozen=True)
class Sweep:
    """What `expire_due` did, and when it should be called again; None: when something is asked."""

    expired: list[Expired]
    next_in_s: float | None


@dataclass(frozen=True)
class Cancelled:
    """What came of a cancel; a running run ends when its owner, who has to be told, commits it."""

    run_id: str
    status: Status
    owner: str | None
    updated_us: int


@dataclass(frozen=True)
class PendingApproval:
    """A call that waits for a decision."""

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


@dataclass(frozen=True)
class PendingApprovalPage:
    """Some calls that wait, oldest first; `cursor` leads to the next page, None ends them."""

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

    @property
    def updated_at(self) -> datetime:
        return datetime.fromtimestamp(self.updated_us / 1e6, UTC)


@dataclass(frozen=True)
class PlannedCall:
    """A tool call about to be made; `retry` says that making it twice does no harm."""

    call_id: str
    fingerprint: str
    retry: bool = False


@dataclass(frozen=True)
class CallStart:
    """What is known of a call that is about to be made."""

    call_id: str
    state: Literal["go", "finished", "uncertain"]
    output: bytes | None = None
    started_at: datetime | None = None


@dataclass(frozen=True)
class CallStarts:
    """What is known of calls that are about to be made, and whether a cancel has come meanwhile."""

    calls: list[CallStart]
    cancelled_by: str | None


class Signal(msgspec.Struct, frozen=True):
    """Something was asked or decided; look at the run for more."""

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
    )
