"""Fixtures of the acceptance tests: a Redis server, and workers on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from capsule_tasks.testing.servers import PrivateServer
from tests.acceptance.workers import Worker

BOTH = ["capsule", pytest.param("prefork", marks=pytest.mark.full)]
"""With `--full`, each of these tests runs under prefork too: both must behave the same."""


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server for tests that do not hurt it; each worker has a queue of its own there."""
    with PrivateServer(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(params=BOTH)
def pool(request: pytest.FixtureRequest) -> str:
    """For tests that start workers of their own."""
    return str(request.param)


@pytest.fixture(scope="module", params=BOTH)
def worker(
    request: pytest.FixtureRequest, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    """A worker for tests that leave it as it was."""
    directory = tmp_path_factory.mktemp("worker")
    with Worker(redis_url, directory, pool=request.param) as worker:
        yield worker
