"""The publisher of a worker, set up from its app's configuration."""

from __future__ import annotations

import logging
from typing import Any

from billiard.exceptions import WorkerLostError

from capsule_tasks.client.configuration import retention_settings, setting, settings_of
from capsule_tasks.client.redis_location import redis_url
from capsule_tasks.client.watching.results import end_from_result
from capsule_tasks.executions.ends import LastEvent
from capsule_tasks.executions.publishing.publisher import Publisher
from capsule_tasks.settings import LeaseSettings, PublishSettings

log = logging.getLogger("capsule_tasks.taskpool")


def make_publisher(app: Any, worker: str) -> Publisher | None:
    """None where streams are switched off, or there is no Redis to put them in."""
    if not setting(app, "capsule_streams"):
        return None
    url = redis_url(app)
    if url is None:
        log.warning("tasks have no streams: set capsule_redis_url to the Redis they should be in")
        return None

    def ended_elsewhere(execution_id: str) -> LastEvent | None:
        return end_from_result(app, execution_id)

    def fail_result(execution_id: str, reason: str) -> None:
        try:
            app.backend.mark_as_failure(execution_id, WorkerLostError(reason))
        except Exception:
            log.exception("the result of lost task %s cannot be stored", execution_id)

    def task_retention(name: str) -> Any:
        return getattr(app.tasks.get(name), "capsule_retention", None)

    return Publisher(
        url,
        worker=worker,
        settings=settings_of(PublishSettings, app, "capsule_publish"),
        retention=retention_settings(app),
        lease=LeaseSettings(lease_s=setting(app, "capsule_lease_s")),
        may_drop=setting(app, "capsule_output") == "drop_oldest",
        ended_elsewhere=ended_elsewhere,
        fail_result=fail_result,
        task_retention=task_retention,
    )
