"""Revokes are stored in Redis, so that a worker finds those sent while it was not running."""

from __future__ import annotations

import logging
from typing import Any

from capsule_tasks.client.configuration import retention_settings, setting
from capsule_tasks.client.redis_location import redis_url
from capsule_tasks.errors import CapsuleError
from capsule_tasks.storage.facades import Method, SyncFacade
from capsule_tasks.storage.revokes import RevokeCore

log = logging.getLogger("capsule_tasks.client")


class RevokeStore(SyncFacade):
    """The stored revokes of an app. Blocks its caller, at most for the connection's limits."""

    def __init__(self, app: Any, url: str) -> None:
        super().__init__(url)
        ttl_s = setting(app, "capsule_revoke_ttl_s")
        self.core = RevokeCore(ttl_s, retention_settings(app).prefix)

    add = Method(RevokeCore.add)
    read = Method(RevokeCore.read)


def revoke_store(app: Any) -> RevokeStore | None:
    """The revoke store of an app; None if the app names no Redis."""
    url = redis_url(app)
    return None if url is None else RevokeStore(app, url)


def store_revokes(app: Any, *task_ids: str) -> None:
    """Store revokes before they are broadcast to workers; a failure is only logged."""
    store = revoke_store(app)
    if store is None:
        return
    try:
        with store:
            store.add(task_ids)
    except CapsuleError as fault:
        log.warning("the revoke of %s could not be stored in Redis: %s", ", ".join(task_ids), fault)
