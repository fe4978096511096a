"""The id of the current execution, and the Redis of an app."""

from __future__ import annotations

import ssl
from enum import IntEnum
from typing import Any
from urllib.parse import parse_qsl, urlencode

from celery import current_app
from celery._state import _task_stack

from capsule_tasks.errors import InvalidSetting
from capsule_tasks.settings import redis_url_of_environment

REDIS_SETTING = "capsule_redis_url"
STORE_SETTING = "capsule_store"
"""A store for steps instead of Redis, set by `capsule_tasks.testing.eager`."""

_CELERYS = {
    **dict.fromkeys(("redis+socket", "socket", "unix"), "unix"),
    **{name: name for name in ("redis", "rediss")},
}
"""URL schemes of Celery's brokers and result backends, and the schemes of this package."""


def current_execution_id() -> str | None:
    """The id of the Celery task that runs this code.

    A task that is called as a function is a part of its caller and has no id of its own.
    """
    for task in reversed(_task_stack.stack):
        for request in reversed(task.request_stack.stack):
            if not request.called_directly:
                execution_id: str | None = request.id
                return execution_id
    return None


def app_of_task() -> Any:
    """The app of the running task, which need not be Celery's current app."""
    task = _task_stack.top
    return current_app if task is None else task.app


def redis_url(app: Any) -> str | None:
    """The Redis of an app for everything that this package stores; None if the app names none.

    In this order: `capsule_redis_url` of the app, `CAPSULE_REDIS_URL` of the environment, the
    broker if it is a Redis, the result backend if it is a Redis.
    """
    stated = app.conf.get(REDIS_SETTING) or redis_url_of_environment()
    if stated:
        return str(stated)
    return redis_of_broker(app) or redis_of_backend(app)


def needed_redis_url(app: Any) -> str:
    """The Redis of an app; InvalidSetting if the app names none."""
    url = redis_url(app)
    if url is None:
        scheme = _first(app.conf.broker_url).partition(":")[0]
        must = (
            "a Redis: set it in the Celery app, or CAPSULE_REDIS_URL, or use one as broker "
            f"(which is {scheme}://…)"
        )
        raise InvalidSetting(REDIS_SETTING, None, must)
    return url


def redis_of_backend(app: Any) -> str | None:
    """The Redis of the result backend; None if the backend is not a Redis."""
    return _translate_url(_first(app.conf.result_backend), app.conf.redis_backend_use_ssl)


def redis_of_broker(app: Any) -> str | None:
    """The Redis of the broker; None if the broker is not a Redis or is behind Sentinels."""
    url, tls = _first(app.conf.broker_url), app.conf.broker_use_ssl
    if "ssl_" in url:
        tls = None  # kombu lets the URL win
    elif not tls and url.startswith("rediss://"):
        tls = {"ssl_cert_reqs": ssl.CERT_NONE}
    return _translate_url(url, tls)


def _first(urls: Any) -> str:
    """The first of several URLs, which are a list or one text with semicolons."""
    return str((urls[0] if isinstance(urls, (list, tuple)) else urls) or "").split(";")[0]


def _translate_url(url: str, tls: Any) -> str | None:
    """A URL of Celery's with its TLS settings, in this package's form; None if it is no Redis."""
    place, _, query = url.partition("?")
    scheme, _, rest = place.partition("://")
    scheme = _CELERYS.get(scheme, "")
    if not scheme:
        return None
    options = dict(parse_qsl(query, keep_blank_values=True))
    if "virtual_host" in options:
        options["db"] = options.pop("virtual_host")
    if scheme != "unix":
        settings = tls.items() if isinstance(tls, dict) else ()
        options = {name: _text(name, value) for name, value in settings} | options
        scheme = "rediss" if any(name.startswith("ssl_") for name in options) else scheme
    return f"{scheme}://{rest}" + (f"?{urlencode(options)}" if options else "")


def _text(name: str, value: Any) -> str:
    """A TLS setting as redis-py reads it in a URL, where None is an empty text."""
    if name == "ssl_cert_reqs" and not isinstance(value, str):
        return ssl.VerifyMode(value or ssl.CERT_NONE).name.removeprefix("CERT_").lower()
    if isinstance(value, (list, tuple)):
        return ",".join(flag.name for flag in value)
    if isinstance(value, IntEnum):
        return str(int(value))
    return "" if value is None else str(value)
