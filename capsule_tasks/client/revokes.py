"""Revokes are kept in Redis, so that a worker which was not there finds them."""

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
    """What was revoked, in the Redis of an app; blocks its caller, never longer than its limits."""

    def __init__(self, app: Any, connections: Any) -> None:
        self._core = RevokeCore(
            setting(app, "capsule_revoke_ttl_s"), retention_settings(app).prefix
        )
        self._connections = connections

    @property
    def channel(self) -> str:
        """On which new revokes are announced."""
        return self._core.channel

    def add(self, ids: Iterable[str] = (), stamps: Iterable[tuple[str, Any]] = ()) -> None:
        drive_blocking(self._core.add(ids, stamps), self._connections)

    def read(self, since_ms: int = 0) -> Revoked:
        return drive_blocking(self._core.read(since_ms), self._connections)

    def close(self) -> None:
        self._connections.close_blocking()


def revoke_store(app: Any) -> RevokeStore | None:
    """The store of an app; None if no Redis is known to it."""
    url = redis_url(app)
    return None if url is None else RevokeStore(app, SyncConnections(url))


def store_revokes(app: Any, *task_ids: str) -> None:
    """Note that tasks were revoked, before their workers are told; a failure is only logged."""
    store = revoke_store(app)
    if store is None:
        return
    try:
        store.add(task_ids)
    except CapsuleError as fault:
        log.warning("the revoke of %s is not kept in Redis: %s", ", ".join(task_ids), fault)
    finally:
        store.close()
