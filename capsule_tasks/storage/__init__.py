"""Everything in Redis: histories, runs, executions, leases; keys, scripts and connections.

Redis is authoritative. A store object has no state but its connections, so any number of processes
may read and write the same history. Every transition is one Lua script, which happens whole or not
at all. Every write carries the id of its operation, so it can be repeated when a reply is lost.
Scripts do not interpret records: the reader decides whether a record is corrupt.
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
    RunUsage,
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
    "RunUsage",
    "Snapshot",
    "SyncConnections",
    "SyncHistory",
    "SyncLease",
    "SyncRunStore",
    "Version",
]
