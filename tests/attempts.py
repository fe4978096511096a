"""Claims and appends as whole calls; a worker sends both over its pipelined connection."""

from __future__ import annotations

from collections.abc import Sequence

from capsule_tasks.protocol.events import AttemptClaimed, encode_event
from capsule_tasks.settings import ExecutionSettings
from capsule_tasks.storage.executions.store import (
    ExecutionStore,
    attempt_details,
    end_of_previous,
    execution_append,
    execution_claim,
    limits_of,
)
from capsule_tasks.storage.executions.types import Claimed


async def claim(
    store: ExecutionStore,
    execution_id: str,
    *,
    owner: str,
    claim: str,
    held_by: str = "",
    ack: str = "late",
    task: str = "",
    worker: str = "",
    group: str = "",
    index: int = -1,
) -> Claimed:
    """Claim the next attempt, whose only event so far is the claim."""
    details = attempt_details(ack, task, worker, group, index, store.settings)
    events = [encode_event(AttemptClaimed(worker=worker, task=task))]
    keys = store.keys_of(execution_id)
    call = execution_claim.call(
        keys,
        claim=claim,
        owner=owner,
        held_by=held_by,
        details=details,
        state="",
        outcome="",
        has_stream_content=0,
        lost=end_of_previous(held_by),
        events=events,
    )
    return store.claimed(execution_id, await store.call(call))


async def append(
    store: ExecutionStore,
    execution_id: str,
    attempt: int,
    first_seq: int,
    events: Sequence[bytes],
    *,
    state: str = "",
    outcome: str = "",
    has_stream_content: bool = False,
    retention: ExecutionSettings | None = None,
) -> int:
    """Append events of an attempt; the last number that is stored."""
    call = execution_append.call(
        store.keys_of(execution_id),
        attempt=attempt,
        first_seq=first_seq,
        state=state,
        outcome=outcome,
        has_stream_content=int(has_stream_content),
        limits=limits_of(retention or store.settings),
        events=events,
    )
    return store.appended(execution_id, call, await store.call(call))
