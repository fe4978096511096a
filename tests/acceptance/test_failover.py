"""A broker that fails over under its workers: they wait for it, and go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from capsule_tasks.testing.servers import PrivateServer, free_port
from tests.acceptance.workers import HANG_S, Worker, eventually

TRY = "next try in"
"""The log line of each back-off."""


class Failing:
    """A worker and its broker, which can be demoted and promoted again."""

    def __init__(self, server: PrivateServer, worker: Worker) -> None:
        self.client = redis.Redis.from_url(server.url)
        self.worker = worker

    def demote(self) -> None:
        """Returns once the worker has noticed, and has tried again in vain."""
        before = self.worker.log.count(TRY)
        self.client.replicaof("127.0.0.1", free_port())  # of a primary that is away: data stay
        eventually(lambda: self.worker.log.count(TRY) >= before + 2 or self.is_over, "two tries")
        assert not self.is_over, self.worker.log[-5000:]

    def promote(self) -> None:
        self.client.replicaof("NO", "ONE")

    @property
    def is_over(self) -> bool:
        assert self.worker.process is not None
        return self.worker.process.poll() is not None


@contextmanager
def failing(directory: Path, **environment: str) -> Iterator[Failing]:
    with (
        PrivateServer(directory / "redis") as server,
        Worker(server.url, directory, **environment) as worker,
    ):
        broker = Failing(server, worker)
        with broker.client:
            yield broker


def test_a_demoted_primary_ends_no_worker_idle_or_busy(tmp_path: Path) -> None:
    with failing(tmp_path) as broker:
        worker = broker.worker
        assert worker.get("add", 1, 1) == 2
        broker.demote()
        broker.promote()
        assert worker.get("add", 2, 2) == 4

        began, until = tmp_path / "began", tmp_path / "until"
        worker.send("write_late", str(began), str(until))
        eventually(began.exists, "the task")
        broker.demote()
        broker.promote()
        until.touch()
        eventually(lambda: not broker.client.exists("unacked"), "its acknowledgement")
        assert worker.get("add", 3, 3) == 6

        assert worker.stop() == 0
        assert "Unrecoverable" not in worker.log
        complaints = [line for line in worker.log.splitlines() if "consumer: C" in line]
        assert len(complaints) == worker.log.count(TRY)


def test_a_worker_that_waits_for_its_broker_can_be_told_to_stop(tmp_path: Path) -> None:
    """Without streams, whose last events are waited for as well."""
    with failing(tmp_path, TEST_CONF=json.dumps({"capsule_streams": False})) as broker:
        broker.demote()
        assert broker.worker.stop() == 0


def test_a_queue_that_is_no_list_ends_a_worker_as_it_does_under_celery(
    redis_url: str, tmp_path: Path
) -> None:
    with Worker(redis_url, tmp_path) as worker, redis.Redis.from_url(redis_url) as client:
        client.set(worker.queue, "no list")
        assert worker.process is not None
        assert worker.process.wait(HANG_S) != 0
        assert "WRONGTYPE" in worker.log
        assert TRY not in worker.log
