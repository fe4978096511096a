"""Connections for callers that block: shared by the threads of a process, not with a fork."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from typing import Any

from capsule_tasks.errors import StorageUnavailable
from capsule_tasks.settings import ConnectionSettings
from capsule_tasks.storage.awaiting import without_waiting
from capsule_tasks.storage.connections import targets
from capsule_tasks.storage.connections.callers import ClusterCaller, EndpointCaller
from capsule_tasks.storage.connections.endpoints import SyncEndpoint, sync_cluster
from capsule_tasks.storage.connections.faults import FAULTS, storage_errors, to_storage_error
from capsule_tasks.storage.operations import Reply, closed
from capsule_tasks.storage.scripts import Call


class SyncConnections:
    """Connections to one URL, made when needed, for each process by itself.

    Threads may share them; a fork makes its own. `close` ends all further use. Share one between
    the histories of a process.
    """

    def __init__(self, url: str, settings: ConnectionSettings | None = None) -> None:
        self.target = targets.parsed(url, settings or ConnectionSettings())
        self.location = self.target.location
        self.is_closed = False
        self._lock = threading.Lock()
        self._caller: EndpointCaller | ClusterCaller | None = None
        self._pid = os.getpid()

    def run_blocking(self, call: Call) -> Reply:
        """The reply of a script; raises StorageError."""
        if self.is_closed:
            raise closed()
        return without_waiting(self._mine().run(call))

    def close_blocking(self) -> None:
        """Close what this process opened; safe before any use and twice."""
        self.is_closed = True
        caller, self._caller = self._caller, None
        if caller is not None and self._pid == os.getpid():
            without_waiting(caller.close())

    def _mine(self) -> EndpointCaller | ClusterCaller:
        if self._pid != os.getpid():
            # Another thread may have held the lock when this process was forked.
            self._lock = threading.Lock()
            self._pid, self._caller = os.getpid(), None
        with self._lock:
            if self._caller is None and self.target.kind == "cluster":
                with storage_errors(was_sent=False):  # the client asks for its nodes at once
                    self._caller = ClusterCaller(sync_cluster(self.target), nullcontext())
            elif self._caller is None:
                self._caller = EndpointCaller(SyncEndpoint(self.target), nullcontext())
            return self._caller


class InjectedSyncClient:
    """A client that belongs to the caller: used as it is, never closed."""

    is_closed = False
    target = None

    def __init__(self, client: Any) -> None:
        self._caller = ClusterCaller(client, nullcontext())
        self.location = targets.location_of_client(client)

    def run_blocking(self, call: Call) -> Reply:
        return without_waiting(self._caller.run(call))

    def close_blocking(self) -> None:
        """Do nothing: the client stays open."""


def is_reachable(url: str, timeout_s: float) -> bool:
    """Whether a server says anything in that time, and be it an error, on a new connection."""
    settings = ConnectionSettings(connect_timeout_s=timeout_s, reply_timeout_s=timeout_s)
    connection = SyncEndpoint(targets.parsed(url, settings)).connection()
    try:
        connection.connect()
        connection.send_command("PING", check_health=False)
        connection.read_response()
    except FAULTS as error:
        return not isinstance(to_storage_error(error, was_sent=True), StorageUnavailable)
    finally:
        connection.disconnect()
    return True
