"""Which execution this is, and which Redis holds what it stores."""

from __future__ import annotations

from typing import Any

from celery import current_app
from celery._state import get_current_task

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.settings import redis_url_of_environment
from capsule_tasks.storage.targets import SCHEMES

REDIS_SETTING = "capsule_redis_url"
_SCHEMES = tuple(f"{scheme}://" for scheme in SCHEMES)


def current_execution_id() -> str | None:
    """The id of the Celery task that this code is run by."""
    task: Any = get_current_task()
    execution_id: str | None = task.request.id if task is not None else None
    return execution_id


def redis_url(app: Any = None) -> str:
    """The Redis for what this package stores; of the current app, unless it is given.

    In this order: `capsule_redis_url` of the app, `CAPSULE_REDIS_URL` of the environment, the
    result backend, the broker, where these are a Redis.
    """
    conf: Any = (app or current_app).conf
    broker = str(conf.broker_url or "").split(";")[0]
    if stated := conf.get(REDIS_SETTING) or redis_url_of_environment():
        return str(stated)
    for url in (str(conf.result_backend or ""), broker):
        if url.startswith(_SCHEMES):
            return url
    must = (
        f"a Redis: set it in the Celery app, or CAPSULE_REDIS_URL, or use one as broker ({broker})"
    )
    raise InvalidSetting(REDIS_SETTING, None, must)
