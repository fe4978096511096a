"""Reports about a task that its worker has given to the pool and no child has begun."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery.exceptions import TaskRevokedError

from tests.acceptance.workers import HANG_S, Worker, eventually, unique

PATIENT = json.dumps({"worker_proc_alive_timeout": HANG_S})
"""How long prefork waits for a child to begin."""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


@pytest.fixture
def worker(redis_url: str, tmp_path: Path, pool: str, gate: Path) -> Iterator[Worker]:
    """Its only child is not ready, and becomes so when the gate is gone."""
    with Worker(
        redis_url, tmp_path, pool=pool, concurrency=1, TEST_GATE=str(gate), TEST_CONF=PATIENT
    ) as worker:
        pid = worker.get("signalled")
        gate.touch()
        os.kill(pid, signal.SIGKILL)
        eventually(
            lambda: pid not in worker.ask("stats")["pool"]["processes"], "the news of its end"
        )
        yield worker


@pytest.mark.parametrize("signame", ["SIGTERM", "SIGKILL", "SIGUSR1"])
def test_a_terminated_task_does_not_run(worker: Worker, gate: Path, signame: str) -> None:
    key = unique()
    result = worker.send("tidy", key)
    eventually(lambda: worker.ask("query_task", result.id), "the task in its worker")
    worker.tell("revoke", result.id, terminate=True, signal=signame)
    gate.unlink()
    assert worker.get("add", 1, 1) == 2
    with pytest.raises(TaskRevokedError):
        result.get(timeout=HANG_S)
    assert result.state == "REVOKED"
    if not worker.is_prefork:  # it terminates the task once that has begun
        assert not worker.app.backend.client.exists(f"mark:{key}")


def test_a_revoke_without_terminate_is_too_late_once_the_pool_has_the_task(
    worker: Worker, gate: Path
) -> None:
    """Celery checks for a revoke when it gives a task to its pool; later only terminate helps."""
    key = unique()
    result = worker.send("set_mark", key)
    eventually(lambda: worker.ask("query_task", result.id), "the task in its worker")
    worker.tell("revoke", result.id)
    gate.unlink()
    worker.heard(key)
    eventually(lambda: worker.app.AsyncResult(result.id).state == "SUCCESS", "its end")
