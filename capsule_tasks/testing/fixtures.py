"""Pytest fixtures: `pytest_plugins = ["capsule_tasks.testing.fixtures"]` in your `conftest.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from capsule_tasks.testing.eager import eager
from capsule_tasks.testing.servers import PrivateServer


@pytest.fixture
def eager_tasks() -> Iterator[Callable[..., Any]]:
    """Call this with your Celery app: until the test ends, its tasks run in the test's process."""
    with contextlib.ExitStack() as undo:
        yield lambda app, **options: undo.enter_context(eager(app, **options))


@pytest.fixture(scope="session")
def _capsule_redis() -> Iterator[PrivateServer]:
    with PrivateServer() as server:
        yield server


@pytest.fixture
def capsule_redis_url(_capsule_redis: PrivateServer) -> str:
    """URL of a Redis server of this pytest process, empty at the beginning of each test."""
    _capsule_redis.clear()
    return _capsule_redis.url
