"""Replies of the scripts of runs, as values and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec

from capsule_tasks.errors import (
    CallChanged,
    CallNotApproved,
    RunClaimed,
    RunClaimLost,
    RunConflict,
    RunEnded,
    RunNotFound,
    RunParked,
    UnknownCall,
    UnreadableSchema,
)
from capsule_tasks.storage.operations import Reply, refused
from capsule_tasks.storage.runs.types import (
    NO_USAGE,
    CallStart,
    Claim,
    Decisions,
    PlannedCall,
    RunUsage,
    Status,
    time_of,
)
from capsule_tasks.storage.scripts import Code

DELETED = "deleted"
"""In place of the status of a run whose id cannot be used yet."""
GONE = "gone"
"""In place of the status of a run that was deleted, or has expired."""

pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder().decode
_usage = msgspec.msgpack.Decoder(RunUsage).decode
_decisions = msgspec.msgpack.Decoder(Decisions).decode


def refusal(run_id: str, reply: Reply, readable: tuple[str, ...] = ()) -> Exception:
    detail = reply[1] if len(reply) > 1 else ""
    if isinstance(detail, bytes):
        detail = detail.decode()
    if reply[0] == Code.UNREADABLE:
        return UnreadableSchema(detail, readable)
    if reply[0] == Code.ENDED:
        return RunEnded(run_id, detail, *reply[2:])
    if reply[0] == Code.WAITING and isinstance(detail, int):
        return RunParked(run_id, detail)
    error = _REFUSALS.get(reply[0])
    return error(run_id, detail) if error else refused(reply, f"run {run_id!r:.100}")


def refusal_of_owner(run_id: str, reply: Reply) -> Exception:
    """As `refusal`, for whoever has claimed the run: one that is gone is claimed no more."""
    return RunClaimLost(run_id, GONE) if reply[0] == Code.MISSING else refusal(run_id, reply)


_REFUSALS: dict[int, Callable[[str, Any], Exception]] = {
    Code.MISSING: lambda run, _: RunNotFound(run),
    Code.CONFLICT: RunConflict,
    Code.HELD: RunClaimed,
    Code.STALE: RunClaimLost,
    Code.WAITING: lambda _, call: CallNotApproved(call),
    Code.CHANGED: lambda _, call: CallChanged(call, "it had another tool or other arguments"),
    Code.FINISHED: lambda _, call: CallChanged(call, "it gave another output"),
    Code.UNKNOWN: lambda _, call: UnknownCall(call, "it was never started", "cannot be finished"),
}
"""The error that each code means, for a run or for one of its calls."""


def claim_of(run_id: str, session_id: str, owner: str, hold: bytes, reply: Reply) -> Claim:
    _, token, revision, turn, cancel, schema, agent, snapshot, decisions, updated = reply[:10]
    message, journal, losses, usage = reply[10:]
    return Claim(
        run_id=run_id,
        session_id=session_id,
        token=int(token),
        revision=int(revision),
        turn=int(turn),
        schema=schema.decode(),
        agent=agent.decode(),
        snapshot=snapshot,
        decisions=_decisions(decisions),
        cancelled_by=text_of(cancel),
        updated_us=int(updated),
        message=message,
        owner=owner,
        hold=hold,
        journal={
            key.decode(): value for key, value in zip(journal[::2], journal[1::2], strict=True)
        },
        losses=int(losses),
        usage=usage_of(usage),
    )


def usage_of(packed: bytes) -> RunUsage:
    return _usage(packed) if packed else NO_USAGE


def call_start_of(call: PlannedCall, reply: Reply) -> CallStart:
    match reply[0]:
        case Code.FINISHED:
            return CallStart(call.call_id, "finished", output=reply[1])
        case Code.UNCERTAIN:
            return CallStart(call.call_id, "uncertain", started_at=time_of(int(reply[1])))
    started_at = time_of(int(reply[1])) if len(reply) > 1 else None
    return CallStart(call.call_id, "go", started_at=started_at)


def status_of(value: bytes) -> Status:
    return cast("Status", value.decode())  # the scripts write no other


def text_of(value: bytes) -> str | None:
    return value.decode() or None
