"""Which execution this is, and which Redis holds what it stores."""

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
"""A store for steps in the place of Redis, which `capsule_tasks.testing.eager` sets."""

_CELERYS = {
    **dict.fromkeys(("redis+socket", "socket", "unix"), "unix"),
    **{name: name for name in ("redis", "rediss")},
}
"""Celery's schemes, of brokers and result backends, and how this package spells them."""


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
    return app_of_task().conf.get(STORE_SETTING)


def app_of_task() -> Any:
    """The app whose task this is: a test's need not be the current one."""
    task = _task_stack.top
    return current_app if task is None else task.app


def redis_url(app: Any) -> str | None:
    """The one Redis of an app for all that this package stores; None if it names none.

    In this order: `capsule_redis_url` of the app, `CAPSULE_REDIS_URL` of the environment, the
    broker, the result backend, where these are a Redis.
    """
    stated = app.conf.get(REDIS_SETTING) or redis_url_of_environment()
    if stated:
        return str(stated)
    return redis_of_broker(app) or redis_of_backend(app)


def needed_redis_url() -> str:
    """The same of the app whose task this is; InvalidSetting if it names none."""
    app = app_of_task()
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
    """The Redis in which Celery stores results; None if that is none."""
    return _translate_url(_first(app.conf.result_backend), app.conf.redis_backend_use_ssl)


def redis_of_broker(app: Any) -> str | None:
    """The Redis that is Celery's broker; None if that is none, or behind Sentinels."""
    url, tls = _first(app.conf.broker_url), app.conf.broker_use_ssl
    if "ssl_" in url:
        tls = None  # of the two, kombu takes what the URL says
    elif not tls and url.startswith("rediss://"):
        tls = {"ssl_cert_reqs": ssl.CERT_NONE}
    return _translate_url(url, tls)


def _first(urls: Any) -> str:
    """Of several, as a list or in one text."""
    return str((urls[0] if isinstance(urls, (list, tuple)) else urls) or "").split(";")[0]


def _translate_url(url: str, tls: Any) -> str | None:
    """A URL of Celery's, with its settings for TLS, as this package spells it; None if no Redis."""
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
    """A setting as redis-py reads it in a URL; there None is as good as an empty text."""
    if name == "ssl_cert_reqs" and not isinstance(value, str):
        return ssl.VerifyMode(value or ssl.CERT_NONE).name.removeprefix("CERT_").lower()
    if isinstance(value, (list, tuple)):
        return ",".join(flag.name for flag in value)
    if isinstance(value, IntEnum):
        return str(int(value))
    return "" if value is None else str(value)
