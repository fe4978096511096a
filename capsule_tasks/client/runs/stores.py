"""The stores of an app's durable runs, for whoever has no watcher."""

from __future__ import annotations

from typing import Any

from capsule_tasks.client.configuration import run_settings
from capsule_tasks.client.redis_location import needed_redis_url
from capsule_tasks.storage import RunStore, SyncRunStore


def run_store(app: Any) -> RunStore:
    """A store of the app's runs, with connections of its own: the caller closes it."""
    return RunStore(needed_redis_url(app), settings=run_settings(app))


def sync_run_store(app: Any) -> SyncRunStore:
    """As `run_store`, for callers that block."""
    return SyncRunStore(needed_redis_url(app), settings=run_settings(app))
