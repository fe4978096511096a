"""The streams of a worker, set up from its app's configuration."""

from __future__ import annotations

import logging
from typing import Any

from billiard.exceptions import WorkerLostError

from capsule_tasks.client.configuration import kept_settings, settings_of
from capsule_tasks.client.results import ended_of
from capsule_tasks.client.where import redis_url
from capsule_tasks.settings import LeaseSettings, PublishSettings
from capsule_tasks.taskpool.endings import Ending
from capsule_tasks.taskpool.options import setting
from capsule_tasks.taskpool.streams.orders import Crew
from capsule_tasks.taskpool.streams.worker import Streams

log = logging.getLogger("capsule_tasks.taskpool")


def make_streams(app: Any, worker: str, crew: Crew) -> Streams | None:
    """None where they are switched off, or there is no Redis to put them in."""
    if not setting(app, "capsule_streams"):
        return None
    url = redis_url(app)
    if url is None:
        log.warning("tasks have no streams: set capsule_redis_url to the Redis they should be in")
        return None

    def ended_elsewhere(execution_id: str) -> Ending | None:
        event = ended_of(app, execution_id)
        return Ending(event) if event is not None else None

    def fail_result(execution_id: str, why: str) -> None:
        try:
            app.backend.mark_as_failure(execution_id, WorkerLostError(why))
        except Exception:
            log.exception("the result of lost task %s cannot be stored", execution_id)

    def own_kept(name: str) -> Any:
        return getattr(app.tasks.get(name), "capsule_kept", None)

    return Streams(
        url,
        crew,
        worker=worker,
        settings=settings_of(PublishSettings, "capsule_publish", setting(app, "capsule_publish")),
        kept=kept_settings(app),
        lease=LeaseSettings(lease_s=setting(app, "capsule_lease_s")),
        drops=setting(app, "capsule_output") == "drop_oldest",
        ended_elsewhere=ended_elsewhere,
        fail_result=fail_result,
        own_kept=own_kept,
    )
