"""Uncertain calls that people settle: a request, the decision about it, and what it means.

A request to settle is a call that waits for a decision, like any other, so that it is listed, has
one answer, and wakes the run. Its id contains the time at which the uncertain call was started: a
call that is made again and becomes uncertain again is asked about again. Its tool has a name of
its own, so that no standing decision about the tool answers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from capsule_tasks.durable.engine import ToolCall
from capsule_tasks.errors import UnknownCall
from capsule_tasks.runs.approvals import DEFAULT_REJECTION
from capsule_tasks.storage import ApprovalRequest, RunStore, SyncRunStore
from capsule_tasks.storage.awaiting import result_of
from capsule_tasks.storage.runs.types import Decisions, Resolved

SETTLE = "settle:"
"""The ids and the tools of requests to settle begin with this."""


class Settlement(msgspec.Struct, frozen=True):
    """The answer about an uncertain call: it was made, may be made again, or must not be made."""

    verdict: Literal["made", "again", "never"]
    output: Any = None
    """The output of the call if it was made, else a text for the model."""


def request_to_settle(call: ToolCall, started_ms: int) -> ApprovalRequest:
    return ApprovalRequest(
        call_id=f"{SETTLE}{started_ms}:{call.key}",
        tool=f"{SETTLE}{call.tool}",
        agent=call.agent,
        fingerprint=call.fingerprint,
        arguments=call.arguments,
        kind="settle",
    )


def settled_call(request_id: str) -> str:
    """The id of the call that a request is about."""
    return request_id.removeprefix(SETTLE).partition(":")[2]


def settlement(request: ApprovalRequest, decisions: Decisions) -> Settlement | None:
    """The decision that people have taken about a request; None if there is none."""
    of_tool = [
        each
        for each in decisions.standing
        if (each.tool, each.agent) == (request.tool, request.agent)
    ]
    exact = [each for each in decisions.exact if each.call == request.call_id]
    decided = (exact or of_tool)[-1:]
    if not decided:
        return None
    if decided[0].approved:
        return Settlement("again")
    if decided[0].output is not None:
        return Settlement("made", msgspec.json.decode(decided[0].output))
    return Settlement("never", decided[0].message or DEFAULT_REJECTION)


async def settle(
    store: RunStore | SyncRunStore,
    run_id: str,
    call_id: str,
    *,
    made: bool,
    output: Any = None,
    by: str | None = None,
    roles: Sequence[str] = (),
) -> Resolved:
    """Say of an uncertain call whether it was made, and then what its output was, as JSON.

    A call that was not made is made by the run. `call_id` is the id of the call or of the request
    to settle it. As with an approval, the first answer counts, and the caller that is answered
    `resume` sends the run on. Over a blocking store nothing is waited for.
    """
    approvals: Any = store.approvals
    request_id = await _request_id(store, run_id, call_id)
    who: dict[str, Any] = {"by": by, "roles": roles}
    if made:
        given = msgspec.json.encode(output).decode()
        done = approvals.settle(run_id, request_id, output=given, **who)
    else:
        done = approvals.approve(run_id, request_id, **who)
    resolved: Resolved = await result_of(done)
    return resolved


async def _request_id(store: RunStore | SyncRunStore, run_id: str, call_id: str) -> str:
    if call_id.startswith(SETTLE):
        return call_id
    record = await result_of(store.read(run_id, with_snapshot=False))
    # Among those that were settled a moment ago, so that the caller is told of the first answer.
    for asked in (*(each.call_id for each in record.pending), *record.decided):
        if asked.startswith(SETTLE) and settled_call(asked) == call_id:
            return str(asked)
    raise UnknownCall(call_id, f"run {run_id!r} does not wait for it to be settled")
