"""What Redis holds: histories, runs, leases, and the keys, scripts and connections under them.

Redis is the truth. Whoever holds a history object holds no state of it but connections: any number
of processes may read and write the same one. Every transition is one Lua script, so it happens
whole or not at all, and every write carries the id of its operation, so it can be repeated when a
reply is lost. What a script cannot know, whether a record can be read, its reader decides.
"""

from capsule_tasks.storage.connections.asynchronous import AsyncConnections
from capsule_tasks.storage.connections.blocking import SyncConnections
from capsule_tasks.storage.history.history import History, SyncHistory
from capsule_tasks.storage.history.types import HistoryInfo, PoppedSuffix, Snapshot, Version
from capsule_tasks.storage.runs.store import Lease, RunStore, SyncLease, SyncRunStore
from capsule_tasks.storage.runs.types import (
    ApprovalRequest,
    Claim,
    Committed,
    PendingApproval,
    PlannedCall,
    RunRecord,
)

__all__ = [
    "ApprovalRequest",
    "AsyncConnections",
    "Claim",
    "Committed",
    "History",
    "HistoryInfo",
    "Lease",
    "PendingApproval",
    "PlannedCall",
    "PoppedSuffix",
    "RunRecord",
    "RunStore",
    "Snapshot",
    "SyncConnections",
    "SyncHistory",
    "SyncLease",
    "SyncRunStore",
    "Version",
]
