"""The suite that a user of pytest-celery would write, over its own setup, nodes and clusters.

Only the fixtures that make nodes are replaced, as its guide provides for, so that they are native
processes instead of containers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_celery import (
    CeleryBackendCluster,
    CeleryBrokerCluster,
    CeleryTestSetup,
    CeleryWorkerCluster,
)

from capsule_tasks.testing.servers import PrivateServer, free_port
from tests.acceptance.conftest import BOTH
from tests.acceptance.native_nodes import (
    NativeBackend,
    NativeBroker,
    NativeServer,
    NativeWorker,
    NativeWorkerProcess,
)
from tests.acceptance.workers import HANG_S, Worker, close, eventually, producer, unique


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PrivateServer]:
    with PrivateServer(tmp_path / "redis", port=free_port(), aof=True) as server:
        yield server


@pytest.fixture
def celery_broker_cluster(server: PrivateServer) -> CeleryBrokerCluster:
    return CeleryBrokerCluster(NativeBroker(NativeServer(server)))


@pytest.fixture
def celery_backend_cluster(server: PrivateServer) -> CeleryBackendCluster:
    return CeleryBackendCluster(NativeBackend(NativeServer(server)))


@pytest.fixture(params=BOTH)
def celery_worker_cluster(
    request: pytest.FixtureRequest, celery_worker_cluster_config: dict[str, Any], tmp_path: Path
) -> Iterator[CeleryWorkerCluster]:
    """Two workers of one queue."""
    (url,) = celery_worker_cluster_config["celery_broker_cluster_config"]["host_urls"]
    queue = unique("q")
    options = {"pool": request.param, "queue": queue, "TEST_VISIBILITY": "2"}
    with Worker(url, tmp_path, **options) as first, Worker(url, tmp_path, **options) as second:
        nodes = [
            NativeWorker(NativeWorkerProcess(worker), worker.app) for worker in (first, second)
        ]
        yield CeleryWorkerCluster(*nodes)


@pytest.fixture
def celery_setup_app(
    celery_setup_config: dict[str, Any], celery_worker_cluster: CeleryWorkerCluster
) -> Iterator[Any]:
    app = producer(celery_setup_config["broker_url"], celery_worker_cluster[0].worker_queue)
    yield app
    close(app)


def test_a_setup_is_ready_and_its_tasks_run(celery_setup: CeleryTestSetup) -> None:
    assert celery_setup.ready(ping=False, control=True, docker=True)
    app = celery_setup.app
    assert app.send_task("add", (1, 2)).get(timeout=HANG_S) == 3
    with pytest.raises(ValueError, match="why"):
        app.send_task("fail", ("why",)).get(timeout=HANG_S)
    word = unique()
    app.send_task("speak", (word,)).get(timeout=HANG_S)
    workers = list(celery_setup.worker_cluster)
    eventually(lambda: any(f"printed {word}" in worker.logs() for worker in workers))


def test_tasks_of_a_killed_worker_are_done_by_the_other(celery_setup: CeleryTestSetup) -> None:
    app, key = celery_setup.app, unique()
    result = app.send_task("hold_late", (key,))
    assert app.backend.client.blpop(f"mark:{key}", HANG_S)
    (holder,) = [w for w in celery_setup.worker_cluster if result.id in w.logs()]
    holder.kill()
    assert holder.container.status == "exited"
    assert app.backend.client.blpop(f"mark:{key}", HANG_S)  # it is delivered again
    for _ in range(10):  # and again, while it runs: the visibility is short
        app.backend.client.rpush(f"go:{key}", "")
    assert result.get(timeout=HANG_S)
    holder.restart()
    holder.assert_log_exists("ready.")
    assert celery_setup.ready(control=True)


def test_workers_restarted_under_load_lose_nothing_nor_does_their_broker(
    celery_setup: CeleryTestSetup,
) -> None:
    app, key = celery_setup.app, unique()
    for number in range(100):
        app.send_task("count", (key, number))
    for worker in celery_setup.worker_cluster:
        worker.restart(force=True)  # SIGTERM: what runs is finished
    eventually(lambda: app.backend.client.scard(key) == 100, "every task")
    celery_setup.broker.restart()  # not before: kombu takes a message in two steps
    assert app.send_task("add", (1, 1)).get(timeout=HANG_S) == 2
