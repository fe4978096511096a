"""Runs that a test drives by hand, in place of a worker."""

from __future__ import annotations

from typing import Any

import msgspec

from capsule_tasks import Capsule
from capsule_tasks.client.runs.handle import RunHandle
from capsule_tasks.settings import LeaseSettings
from capsule_tasks.storage import ApprovalRequest, RunStore
from capsule_tasks.storage.runs.types import Status

WORKER = "w1"
LEASE = LeaseSettings(lease_s=600)
"""That no test outlives."""


def asks(call_id: str, tool: str = "bare:refund", **limits: Any) -> ApprovalRequest:
    return ApprovalRequest(
        call_id=call_id,
        tool=tool,
        agent="helper",
        fingerprint=f"{tool} 9",
        arguments='{"euros": 9}',
        **limits,
    )


async def parked(
    capsule: Capsule, store: RunStore, *requests: ApprovalRequest, **options: Any
) -> RunHandle:
    """A run of the agent `support` that waits for decisions, as a worker leaves it."""
    run = await capsule.runs.astart("support", "refund order 42", **options)
    claim = await store.claim(run.id, WORKER)
    await store.commit(claim, b"{}", turn=1, status="interrupted", approval_requests=requests)
    return run


async def ended(
    capsule: Capsule, store: RunStore, status: Status = "completed", **end: Any
) -> RunHandle:
    run = await capsule.runs.astart("support", "refund order 42")
    claim = await store.claim(run.id, WORKER)
    kept = {name: msgspec.json.encode(value) for name, value in end.items()}
    await store.commit(claim, b"{}", turn=1, status=status, **kept)
    return run
