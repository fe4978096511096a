"""A message that costs every process it is given to is given up, whichever worker it comes to."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from celery.exceptions import WorkerLostError

from capsule_tasks.storage import SyncConnections
from capsule_tasks.storage.drivers import drive_blocking
from capsule_tasks.storage.losses import LossCore
from tests.acceptance.workers import HANG_S, Worker, eventually, unique


def heard_times(worker: Worker, key: str) -> int:
    return int(worker.app.backend.client.llen(f"mark:{key}"))


def test_losses_on_other_workers_count(redis_url: str, tmp_path: Path) -> None:
    key, task_id = unique(), unique()
    connections = SyncConnections(redis_url)
    for number in range(3):
        drive_blocking(LossCore(task_id, "0").add(f"elsewhere-{number}"), connections)
    connections.close_blocking()
    with Worker(redis_url, tmp_path) as worker:
        result = worker.send("kill_each", key, task_id=task_id)
        with pytest.raises(Exception, match=r"5 child processes died while they ran it, .*SIGKILL"):
            result.get(timeout=HANG_S)
        assert heard_times(worker, key) == 2


def test_a_task_that_kills_its_worker_is_given_up(redis_url: str, tmp_path: Path) -> None:
    key, queue = unique(), unique("q")
    settings = {"TEST_VISIBILITY": "2", "TEST_LOSS_LIMIT": "1"}
    with Worker(redis_url, tmp_path, queue=queue, **settings) as first:
        result = first.send("kill_worker", key)
        assert first.process is not None
        first.process.wait(HANG_S)
        with Worker(redis_url, tmp_path, queue=queue, **settings) as second:
            assert second.process is not None
            second.process.wait(HANG_S)
        with Worker(redis_url, tmp_path, queue=queue, **settings):
            with pytest.raises(
                Exception, match="1 child processes died while they ran it, the last with its whole"
            ):
                result.get(timeout=HANG_S)
            assert heard_times(first, key) == 2


def test_a_message_that_is_never_redelivered_counts_no_loss(
    redis_url: str, tmp_path: Path, pool: str
) -> None:
    with Worker(redis_url, tmp_path, pool=pool, TEST_LOSS_LIMIT="1") as worker:
        result = worker.send("die", "kill")
        with pytest.raises(WorkerLostError):
            result.get(timeout=HANG_S)
        assert not worker.app.backend.client.exists(f"capsule:{{E:{result.id}}}:losses:0")


def test_a_redelivered_message_that_ends_well_counts_no_loss(
    redis_url: str, tmp_path: Path, pool: str
) -> None:
    """Workers may be killed as often as it takes: only a delivery that never ended counts."""
    key = unique()
    with Worker(redis_url, tmp_path, pool=pool, TEST_LOSS_LIMIT="1") as worker:
        client = worker.app.backend.client
        result = worker.send("reject", key)
        assert result.get(timeout=HANG_S) == "done"
        assert int(client.get(key)) == 3
        left = f"capsule:{{E:{result.id}}}:losses:0"
        eventually(lambda: not client.exists(left), "the end of the count")


def test_a_worker_that_is_told_to_stop_counts_no_loss(
    redis_url: str, tmp_path: Path, pool: str
) -> None:
    """Its children are killed, and their messages given back: that may happen any number of times.

    From the second delivery on each is counted when it begins.
    """
    key, queue = unique(), unique("q")
    settings = {"TEST_VISIBILITY": "2", "TEST_LOSS_LIMIT": "1"}
    for number in range(3):
        with Worker(redis_url, tmp_path, pool=pool, queue=queue, **settings) as worker:
            client = worker.app.backend.client
            if not number:
                result = worker.send("hold_late", key)
            worker.heard(key)
            worker.stop(signal.SIGQUIT)
            assert not client.exists(f"capsule:{{E:{result.id}}}:losses:0")
    with Worker(redis_url, tmp_path, pool=pool, queue=queue, **settings) as worker:
        worker.heard(key)
        worker.go(key)
        eventually(lambda: worker.app.AsyncResult(result.id).ready(), "the end")
        assert worker.app.AsyncResult(result.id).get() > 0
