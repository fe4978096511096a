"""Connections for callers that block: shared by the threads of a process, not with a fork."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

from redis.client import NEVER_DECODE
from redis.exceptions import NoScriptError

from capsule_tasks.errors import StorageUnavailable
from capsule_tasks.settings import ConnectionSettings
from capsule_tasks.storage.connections import targets
from capsule_tasks.storage.connections.endpoints import SyncEndpoint, sync_cluster
from capsule_tasks.storage.connections.faults import FAULTS, storage_errors, to_storage_error
from capsule_tasks.storage.connections.targets import Target
from capsule_tasks.storage.operations import Reply, closed, reply_of
from capsule_tasks.storage.scripts import Call


class SyncConnections:
    """Connections to one URL, made when needed, for each process by itself.

    Threads may share them; a fork makes its own. `close` ends all further use. Share one between
    the histories of a process.
    """

    def __init__(self, url: str, settings: ConnectionSettings | None = None) -> None:
        self._target = targets.parsed(url, settings or ConnectionSettings())
        self.location = self._target.location
        self.is_closed = False
        self._lock = threading.Lock()
        self._caller: _EndpointCaller | _ClusterCaller | None = None
        self._pid = os.getpid()

    def run_blocking(self, call: Call) -> Reply:
        """The reply of a script; raises StorageError."""
        if self.is_closed:
            raise closed()
        return self._mine().run_blocking(call)

    def close_blocking(self) -> None:
        """Close what this process opened; safe before any use and twice."""
        self.is_closed = True
        caller, self._caller = self._caller, None
        if caller is not None and self._pid == os.getpid():
            caller.close_blocking()

    def _mine(self) -> _EndpointCaller | _ClusterCaller:
        if self._pid != os.getpid():
            # Another thread may have held the lock when this process was forked.
            self._lock = threading.Lock()
            self._pid, self._caller = os.getpid(), None
        with self._lock:
            if self._caller is None and self._target.kind == "cluster":
                with storage_errors(was_sent=False):  # the client asks for its nodes at once
                    self._caller = _ClusterCaller(sync_cluster(self._target))
            elif self._caller is None:
                self._caller = _EndpointCaller(self._target)
            return self._caller


class _EndpointCaller:
    """Calls over connections of its own, so that it knows whether a command was sent."""

    def __init__(self, target: Target) -> None:
        self._endpoint = SyncEndpoint(target)
        self._free: list[Any] = []

    def run_blocking(self, call: Call) -> Reply:
        try:
            connection = self._free.pop()
        except IndexError:
            connection = self._endpoint.connection()
        was_sent = False
        is_sound = False
        try:
            connection.connect()
            was_sent = True
            reply = _called(connection, call)
            is_sound = True
            return reply
        except FAULTS as error:
            raise to_storage_error(error, was_sent=was_sent) from error
        finally:
            # Also after an interrupt, whose reply would be read by the next call.
            if not is_sound:
                connection.disconnect()
            self._free.append(connection)

    def close_blocking(self) -> None:
        while self._free:
            self._free.pop().disconnect()
        self._endpoint.close()


def _called(connection: Any, call: Call) -> Reply:
    packed = call.packed(b"EVALSHA", call.script.sha)
    connection.send_packed_command([packed], check_health=False)
    try:
        return reply_of(connection.read_response(disable_decoding=True))
    except NoScriptError:
        # The server was restarted, flushed or failed over. EVAL makes it remember the script.
        packed = call.packed(b"EVAL", call.script.source)
        connection.send_packed_command([packed], check_health=False)
        return reply_of(connection.read_response(disable_decoding=True))


class _ClusterCaller:
    """Calls through a client's own `execute_command`, which finds the node and follows it.

    It may repeat a command by itself, so whether one was sent is not known: it is assumed.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def run_blocking(self, call: Call) -> Reply:
        tail = (len(call.keys), *call.keys, *call.args)
        execute = partial(self._client.execute_command, **{NEVER_DECODE: True})
        with storage_errors(was_sent=True):
            try:
                return reply_of(execute("EVALSHA", call.script.sha, *tail))
            except NoScriptError:
                return reply_of(execute("EVAL", call.script.source, *tail))

    def close_blocking(self) -> None:
        self._client.close()


class InjectedSyncClient(_ClusterCaller):
    """A client that belongs to the caller: used as it is, never closed."""

    is_closed = False

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self.location = targets.location_of_client(client)

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
