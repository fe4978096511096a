"""Erase executions from Redis: all of them, or all but the end that their watchers wait for."""

from __future__ import annotations

from collections.abc import Sequence

from capsule_tasks.errors import ExecutionEnded
from capsule_tasks.protocol.events import Ended, Outcome, encode_event
from capsule_tasks.storage.executions.store import PAGE, ExecutionStore
from capsule_tasks.storage.keys import ExecutionKeys
from capsule_tasks.storage.scripts import Code, script

_END_TTL_MS = 600_000
"""How long the end of an execution is left of which there is nothing else."""


@script("executions/forget")
def execution_forget(keys: ExecutionKeys) -> None: ...


@script("executions/forget_unfinished")
def execution_forget_unfinished(
    keys: ExecutionKeys,
    *,
    ttl_ms: int,
    unclaimed_outcome: str,
    unclaimed: bytes,
    claimed_outcome: str,
    claimed: bytes,
) -> None: ...


async def forget(store: ExecutionStore, execution_ids: Sequence[str]) -> None:
    """Erase executions: events, commands, and entries of the index."""
    for execution_id in execution_ids:
        await store.call(execution_forget.call(store.keys_of(execution_id)))
    for first in range(0, len(execution_ids), PAGE):
        await store.drop_recent(execution_ids[first : first + PAGE])


async def forget_unfinished(
    store: ExecutionStore, execution_id: str, *, unclaimed: Ended, claimed: Ended
) -> Outcome:
    """End an execution and erase all of it but its end, which is left for ten minutes.

    Watchers read one of two ends: that of an execution which no worker has claimed, or which one
    has. A worker that runs it is refused its next write. Safe to repeat. Raises ExecutionEnded
    for an execution that has ended by itself.
    """
    call = execution_forget_unfinished.call(
        store.keys_of(execution_id),
        ttl_ms=_END_TTL_MS,
        unclaimed_outcome=str(unclaimed.outcome),
        unclaimed=encode_event(unclaimed),
        claimed_outcome=str(claimed.outcome),
        claimed=encode_event(claimed),
    )
    reply = await store.call(call)
    outcome = reply[1].decode()
    if reply[0] == Code.ENDED:
        raise ExecutionEnded(execution_id, outcome)
    return Outcome(outcome)
