"""Revokes are stored in Redis, so that a worker finds those sent while it was not running."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from capsule_tasks.client.configuration import retention_settings, setting
from capsule_tasks.client.redis_location import redis_url
from capsule_tasks.errors import CapsuleError
from capsule_tasks.storage import SyncConnections
from capsule_tasks.storage.drivers import drive_blocking
from capsule_tasks.storage.revokes import RevokeCore, Revoked

log = logging.getLogger("capsule_tasks.client")


class RevokeStore:
    """The stored revokes of an app. Blocks its caller, at most for the connection's limits."""

    def __init__(self, app: Any, connections: Any) -> None:
        self._core = RevokeCore(
            setting(app, "capsule_revoke_ttl_s"), retention_settings(app).prefix
        )
        self._connections = connections

    @property
    def channel(self) -> str:
        """The channel that announces new revokes."""
        return self._core.channel

    def add(self, ids: Iterable[str] = (), stamps: Iterable[tuple[str, Any]] = ()) -> None:
        drive_blocking(self._core.add(ids, stamps), self._connections)

    def read(self, since_ms: int = 0) -> Revoked:
        return drive_blocking(self._core.read(since_ms), self._connections)

    def close(self) -> None:
        self._connections.close_blocking()


def revoke_store(app: Any) -> RevokeStore | None:
    """The revoke store of an app; None if the app names no Redis."""
    url = redis_url(app)
    return None if url is None else RevokeStore(app, SyncConnections(url))


def store_revokes(app: Any, *task_ids: str) -> None:
    """Store revokes before they are broadcast to workers; a failure is only logged."""
    store = revoke_store(app)
    if store is None:
        return
    try:
        store.add(task_ids)
    except CapsuleError as fault:
        log.warning("the revoke of %s could not be stored in Redis: %s", ", ".join(task_ids), fault)
    finally:
        store.close()
