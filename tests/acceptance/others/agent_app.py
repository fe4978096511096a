"""An app with agents of our own engine, whose tools are Celery tasks and code in named sessions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import redis
from celery import Celery

import capsule_tasks
from capsule_tasks import Capsule
from tests.acceptance.others.code_app import REDIS_URL, app

_marks = redis.Redis.from_url(REDIS_URL, decode_responses=True)


def declare_tasks(app: Celery) -> SimpleNamespace:
    """The tasks of the tools, on the app of a worker or of a test."""

    @app.task(name="tools.multiply")
    def multiply(a: int, b: int = 2) -> int:
        """Multiply two numbers.

        Args:
            a: The first of them.
        """
        print(f"{a} times {b}")  # noqa: T201  its output is passed on
        capsule_tasks.progress(1, 2, "half")
        return a * b

    @app.task(name="tools.hold")
    def hold(key: str) -> str:
        """Tell the test, and wait for it."""
        _marks.rpush(f"effects:{key}", "held")
        _marks.rpush(f"mark:{key}", "")
        _marks.blpop([f"go:{key}"])
        return f"held {key}"

    @app.task(name="tools.explode")
    def explode(why: str) -> None:
        raise ValueError(why)

    @app.task(name="tools.forget", ignore_result=True)
    def forget(key: str) -> str:
        return f"forgot {key}"

    return SimpleNamespace(multiply=multiply, hold=hold, explode=explode, forget=forget)


tasks: Any = declare_tasks(app)
capsule = Capsule(app)
