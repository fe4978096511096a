"""Which execution this is, and which Redis holds what it stores."""

from __future__ import annotations

from typing import Any

from celery import current_app
from celery._state import _task_stack

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.settings import redis_url_of_environment
from capsule_tasks.storage.targets import SCHEMES

REDIS_SETTING = "capsule_redis_url"
STORE_SETTING = "capsule_store"
"""A store in the place of Redis, such as `MemoryStore`, for tests."""
_SCHEMES = tuple(f"{scheme}://" for scheme in SCHEMES)


def current_execution_id() -> str | None:
    """The id of the Celery task that this code is run by.

    A task that is called as a function is a part of the one that calls it, and has no id.
    """
    for task in reversed(_task_stack.stack):
        for request in reversed(task.request_stack.stack):
            if not request.called_directly:
                execution_id: str | None = request.id
                return execution_id
    return None


def given_store() -> Any:
    """The store that the app was given in the place of Redis, if any."""
    return _conf().get(STORE_SETTING)


def _conf() -> Any:
    """The settings of the app whose task this is: a test's need not be the current one."""
    task = _task_stack.top
    return (current_app if task is None else task.app).conf


def redis_url(app: Any = None) -> str:
    """The Redis for what this package stores; of the current app, unless it is given.

    In this order: `capsule_redis_url` of the app, `CAPSULE_REDIS_URL` of the environment, the
    result backend, the broker, where these are a Redis.
    """
    conf = _conf() if app is None else app.conf
    brokers = conf.broker_url or ""
    broker = str(brokers[0] if isinstance(brokers, (list, tuple)) else brokers).split(";")[0]
    if stated := conf.get(REDIS_SETTING) or redis_url_of_environment():
        return str(stated)
    for url in (str(conf.result_backend or ""), broker):
        if url.startswith(_SCHEMES):
            return url
    must = (
        "a Redis: set it in the Celery app, or CAPSULE_REDIS_URL, or use one as broker "
        f"(which is {broker.partition(':')[0]}://…)"
    )
    raise InvalidSetting(REDIS_SETTING, None, must)
