"""Claims and appends as whole calls; a worker sends both over its pipelined connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capsule_tasks.protocol.events import AttemptClaimed, encode_event
from capsule_tasks.storage.executions.store import ExecutionStore, attempt_details
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
    call = store.claim_call(keys, claim, details, owner, events, held_by=held_by)
    return store.claimed(execution_id, await store.call(call))


async def append(
    store: ExecutionStore,
    execution_id: str,
    attempt: int,
    first_seq: int,
    events: Sequence[bytes],
    **options: Any,
) -> int:
    """Append events of an attempt; the last number that is stored."""
    call = store.append_call(store.keys_of(execution_id), attempt, first_seq, events, **options)
    return store.appended(execution_id, call, await store.call(call))
