"""Celery's signals of tasks that are revoked, retried or unknown: where they are sent, and once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from billiard.exceptions import Terminated
from celery.exceptions import TaskRevokedError

from tests.acceptance.conftest import BOTH
from tests.acceptance.workers import HANG_S, Worker, unique


@pytest.fixture(scope="module", params=BOTH)
def worker(
    request: pytest.FixtureRequest, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    directory = tmp_path_factory.mktemp("worker")
    app = "tests.acceptance.signals_app"
    with Worker(redis_url, directory, pool=request.param, app=app) as worker:
        yield worker


def was_sent_once(worker: Worker, mark: str) -> None:
    assert worker.get("add", 1, 1) == 2
    assert not worker.app.backend.client.llen(f"mark:{mark}")


def test_revoked_is_sent_in_the_worker_for_a_task_that_does_not_run(worker: Worker) -> None:
    holds = [unique() for _ in range(2)]
    for key in holds:
        worker.send("hold", key)
        worker.heard(key)
    revoked = worker.send("add", 1, 1)
    worker.tell("revoke", revoked.id)
    for key in holds:
        worker.go(key)
    assert worker.heard(f"revoked:{revoked.id}") == f"{worker.pid} False False"
    was_sent_once(worker, f"revoked:{revoked.id}")
    late = worker.send("add", 1, 1, expires=datetime.now(UTC) - timedelta(hours=1))
    assert worker.heard(f"revoked:{late.id}") == f"{worker.pid} False True"
    with pytest.raises(TaskRevokedError):
        late.get(timeout=HANG_S)
    was_sent_once(worker, f"revoked:{late.id}")


def test_revoked_is_sent_in_the_worker_for_a_terminated_task(worker: Worker) -> None:
    key = unique()
    result = worker.send("tidy", key)
    worker.heard(key)
    worker.tell("revoke", result.id, terminate=True, signal="SIGTERM")
    assert worker.heard(f"revoked:{result.id}") == f"{worker.pid} True False"
    with pytest.raises((TaskRevokedError, Terminated)):
        result.get(timeout=HANG_S)
    was_sent_once(worker, f"revoked:{result.id}")


def test_retry_is_sent_in_the_child_that_runs_it(worker: Worker) -> None:
    result = worker.send("retry", 1)
    pid, _, reason = worker.heard(f"retry:{result.id}").partition(" ")
    assert int(pid) in worker.ask("stats")["pool"]["processes"]
    assert "Retry" in reason
    result.get(timeout=HANG_S)
    was_sent_once(worker, f"retry:{result.id}")


def test_retry_of_a_coroutine_is_sent_in_its_child(worker: Worker) -> None:
    if worker.is_prefork:
        pytest.skip("prefork runs no coroutines")
    result = worker.send("async_retry", 1)
    pid = int(worker.heard(f"retry:{result.id}").split()[0])
    assert pid in worker.ask("stats")["pool"]["processes"]
    result.get(timeout=HANG_S)
    was_sent_once(worker, f"retry:{result.id}")


def test_unknown_is_sent_in_the_worker(worker: Worker) -> None:
    result = worker.send("no_such_task")
    assert worker.heard(f"unknown:{result.id}") == f"{worker.pid} no_such_task"
    was_sent_once(worker, f"unknown:{result.id}")
