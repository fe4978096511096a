"""Replies of the scripts of runs as values and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    CallStart,
    Claim,
    Decisions,
    PlannedCall,
    Status,
    time_of,
)
from capsule_tasks.storage.scripts import Code

_decisions = msgspec.msgpack.Decoder(Decisions).decode


def refusal(run_id: str, reply: Reply, readable: tuple[str, ...] = ()) -> Exception:
    detail = reply[1].decode() if len(reply) > 1 and isinstance(reply[1], bytes) else ""
    match reply[0]:
        case Code.MISSING:
            return RunNotFound(run_id)
        case Code.WAITING if not detail:
            return RunParked(run_id, int(reply[1]))
        case Code.UNREADABLE:
            return UnreadableSchema(detail, readable)
        case Code.CONFLICT:
            return RunConflict(run_id, int(reply[1]))
    about_run, about_call = _ABOUT_RUN.get(reply[0]), _ABOUT_CALL.get(reply[0])
    if about_run is not None:
        return about_run(run_id, detail)
    return about_call(detail) if about_call else refused(reply, f"run {run_id!r:.100}")


_ABOUT_RUN: dict[int, Callable[[str, str], Exception]] = {
    Code.ENDED: RunEnded,
    Code.HELD: RunClaimed,
    Code.STALE: RunClaimLost,
}
_ABOUT_CALL: dict[int, Callable[[str], Exception]] = {
    Code.WAITING: CallNotApproved,
    Code.CHANGED: lambda call: CallChanged(call, "it had another tool or other arguments"),
    Code.FINISHED: lambda call: CallChanged(call, "it gave another output"),
    Code.UNKNOWN: lambda call: UnknownCall(call, "it was never started", "cannot be finished"),
}


def claim_of(run_id: str, session_id: str, reply: Reply) -> Claim:
    _, token, revision, turn, cancel, schema, agent, snapshot, decisions, updated = reply
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
    )


def call_start_of(call: PlannedCall, reply: Reply) -> CallStart:
    match reply[0]:
        case Code.FINISHED:
            return CallStart(call.call_id, "finished", output=reply[1])
        case Code.UNCERTAIN:
            return CallStart(call.call_id, "uncertain", started_at=time_of(int(reply[1])))
    return CallStart(call.call_id, "go")


def status_of(value: bytes) -> Status:
    status: Any = value.decode()
    return status  # type: ignore[no-any-return]  # the scripts write no other


def text_of(value: bytes) -> str | None:
    return value.decode() or None
