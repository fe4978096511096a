"""What Redis holds: histories, and the keys, scripts, connections and errors under them.

Redis is the truth. Whoever holds a history object holds no state of it but connections: any number
of processes may read and write the same one. Every transition is one Lua script, so it happens
whole or not at all, and every write carries the id of its operation, so it can be repeated when a
reply is lost. What a script cannot know, whether a record can be read, its reader decides.
"""

from capsule_tasks.storage.async_connections import AsyncConnections
from capsule_tasks.storage.history import History, SyncHistory
from capsule_tasks.storage.history_types import HistoryInfo, PoppedSuffix, Snapshot, Version
from capsule_tasks.storage.sync_connections import SyncConnections

__all__ = [
    "AsyncConnections",
    "History",
    "HistoryInfo",
    "PoppedSuffix",
    "Snapshot",
    "SyncConnections",
    "SyncHistory",
    "Version",
]
