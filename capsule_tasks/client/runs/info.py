"""A run as people see it: its state, the calls that it waits for, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from capsule_tasks.durable import RunFailure
from capsule_tasks.durable.settling import SETTLE, settled_call
from capsule_tasks.errors import RunCancelled, RunFailed
from capsule_tasks.storage import PendingApproval, RunRecord, RunUsage
from capsule_tasks.storage.runs.types import ENDED, OnExpiry, RequestKind, Status


@dataclass(frozen=True)
class WaitingCall:
    """A tool call that a run waits for."""

    run_id: str
    session_id: str
    call_id: str
    """For `approve` and `reject`, or for `settle`."""
    kind: RequestKind
    """`settle`: the call was started, and nobody knows whether it was made."""
    tool: str
    agent: str
    arguments: str
    asked_at: datetime
    expires_at: datetime | None
    on_expiry: OnExpiry
    may_decide: tuple[str, ...] | None

    @classmethod
    def of(cls, pending: PendingApproval) -> WaitingCall:
        is_uncertain = pending.kind == "settle"
        return cls(
            run_id=pending.run_id,
            session_id=pending.session_id,
            call_id=settled_call(pending.call_id) if is_uncertain else pending.call_id,
            kind=pending.kind,
            tool=pending.tool.removeprefix(SETTLE),
            agent=pending.agent,
            arguments=pending.arguments,
            asked_at=pending.asked_at,
            expires_at=pending.expires_at,
            on_expiry=pending.on_expiry,
            may_decide=pending.may_decide,
        )


@dataclass(frozen=True)
class RunInfo:
    """The state of a run at one moment."""

    run_id: str
    agent: str
    """The name under which the agent is registered."""
    session_id: str
    status: Status
    turn: int
    """Turns that are complete."""
    current_agent: str
    """The agent whose turn is next, after handoffs."""
    owner: str | None
    created_at: datetime
    updated_at: datetime
    cancelled_by: str | None
    waiting: tuple[WaitingCall, ...]
    """The calls that a person has to decide about, or to settle."""
    output: Any
    """The output of a run that has completed."""
    failure: RunFailure | None
    usage: RunUsage
    """Tokens, requests and time of all committed turns."""

    @property
    def is_ended(self) -> bool:
        return self.status in ENDED

    @classmethod
    def of(cls, record: RunRecord) -> RunInfo:
        return cls(
            run_id=record.run_id,
            agent=record.start_agent,
            session_id=record.session_id,
            status=record.status,
            turn=record.turn,
            current_agent=record.agent,
            owner=record.owner,
            created_at=record.created_at,
            updated_at=record.updated_at,
            cancelled_by=record.cancelled_by,
            waiting=tuple(map(WaitingCall.of, record.pending)),
            output=msgspec.json.decode(record.result) if record.result else None,
            failure=_failure_of(record.error) if record.error else None,
            usage=record.usage,
        )


def output_of(record: RunRecord) -> Any:
    """The output of a run that has ended; raises RunFailed or RunCancelled."""
    if record.status == "completed":
        return RunInfo.of(record).output
    if record.status == "cancelled":
        raise RunCancelled(record.run_id, record.cancelled_by or "somebody")
    failure = _failure_of(record.error)
    raise RunFailed(record.run_id, failure.kind, failure.type, failure.message)


def _failure_of(error: bytes) -> RunFailure:
    try:
        return msgspec.json.decode(error, type=RunFailure)
    except msgspec.MsgspecError:  # of an engine of another release, or of a loop of one's own
        return RunFailure("error", "", error.decode(errors="replace"))
