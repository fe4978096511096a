"""The stores of an app's durable runs, for whoever has no watcher."""

from __future__ import annotations

from typing import Any

from capsule_tasks.client.configuration import run_settings, settings_of
from capsule_tasks.client.redis_location import needed_redis_url
from capsule_tasks.settings import ConnectionSettings, PublishSettings
from capsule_tasks.storage import RunStore, SyncRunStore


def run_store(app: Any) -> RunStore:
    """A store of the app's runs, with connections of its own: the caller closes it.

    Writes wait for as many replicas as the events of the app do.
    """
    publish = settings_of(PublishSettings, app, "capsule_publish")
    connection = ConnectionSettings(
        replicas=publish.replicas, replica_wait_s=publish.replica_wait_s
    )
    return RunStore(needed_redis_url(app), settings=run_settings(app), connection=connection)


def sync_run_store(app: Any) -> SyncRunStore:
    """A blocking store of the app's runs, whose writes wait for no replica."""
    return SyncRunStore(needed_redis_url(app), settings=run_settings(app))
