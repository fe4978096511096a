"""A revoke is known to workers that were not there when it was sent."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from capsule_tasks import Capsule
from capsule_tasks.client.revokes import revoke_store, store_revokes
from capsule_tasks.storage.keys import RevokeKeys
from tests.acceptance.test_delivery import stamped
from tests.acceptance.workers import HANG_S, Worker, close, eventually, producer, unique


def kept(worker: Worker, member: str) -> bool:
    return worker.app.backend.client.zscore("capsule:{revokes}", member) is not None


def never_began(worker: Worker, key: str) -> bool:
    """Whether a revoked task was skipped, asked once a later task of the only slot has run."""
    last = unique()
    worker.send("set_mark", last)
    worker.heard(last)
    return not worker.app.backend.client.exists(f"mark:{key}")


@pytest.fixture
def sent(redis_url: str) -> Iterator[Any]:
    """Calls a task as an app does that has the line `Capsule(app)`."""
    app: Celery = producer(redis_url, unique("q"))
    Capsule(app)

    @app.task(name="set_mark")
    def set_mark(_key: str) -> None: ...

    yield set_mark
    close(app)


def test_after_a_worker_was_killed(redis_url: str, tmp_path: Path) -> None:
    queue, key = unique("q"), unique()
    with Worker(redis_url, tmp_path, concurrency=1) as worker:
        result = worker.send("set_mark", key, queue=queue)
        worker.tell("revoke", result.id)
        eventually(lambda: kept(worker, f"t{result.id}"), "the note in Redis")
        worker.kill()
        with Worker(redis_url, tmp_path, queue=queue, concurrency=1) as second:
            assert result.id in second.ask("revoked")
            assert never_began(second, key)
            with pytest.raises(TaskRevokedError):
                result.get(timeout=HANG_S)


def test_by_stamp_after_a_worker_was_killed(redis_url: str, tmp_path: Path) -> None:
    """By a stamp that is a text, and by one that is a number."""
    queue, batches = unique("q"), {unique(): unique(), unique(): secrets.randbits(30)}
    with Worker(redis_url, tmp_path, concurrency=1) as worker:
        results = [stamped(worker, batches[key], "set_mark", key, queue=queue) for key in batches]
        for batch in batches.values():
            worker.tell("revoke_by_stamped_headers", {"batch": [batch]})
            note = f"s{json.dumps(['batch', batch])}"
            eventually(lambda note=note: kept(worker, note), "the note in Redis")
        worker.kill()
        with Worker(redis_url, tmp_path, queue=queue, concurrency=1) as second:
            for key, result in zip(batches, results, strict=True):
                assert never_began(second, key)
                with pytest.raises(TaskRevokedError):
                    result.get(timeout=HANG_S)


def test_a_revoke_sent_while_no_worker_runs_is_kept(
    redis_url: str, tmp_path: Path, sent: Any
) -> None:
    key = unique()
    execution = sent.delay(key)
    execution.revoke()
    with Worker(
        redis_url, tmp_path, queue=sent.app.conf.task_default_queue, concurrency=1
    ) as worker:
        assert never_began(worker, key)
        with pytest.raises(TaskRevokedError):
            execution.get(timeout=HANG_S)


def test_a_missed_revoke_is_found_by_a_running_worker(worker: Worker) -> None:
    if worker.is_prefork:
        pytest.skip("prefork never finds what it has not heard")
    missed = unique()
    store_revokes(worker.app, missed)
    eventually(lambda: missed in worker.ask("revoked"), "the revoke")


def test_a_worker_listens_for_kept_revokes(worker: Worker) -> None:
    if worker.is_prefork:
        pytest.skip("prefork never finds what it has not heard")
    client = worker.app.backend.client
    eventually(lambda: client.pubsub_numsub(RevokeKeys().channel)[0][1], "a listener")


def test_without_streams_a_worker_polls_kept_revokes(redis_url: str, tmp_path: Path) -> None:
    unstreamed = json.dumps({"capsule_streams": False})
    missed = unique()
    with Worker(redis_url, tmp_path, concurrency=1, TEST_CONF=unstreamed) as worker:
        store_revokes(worker.app, missed)
        eventually(lambda: missed in worker.ask("revoked"), "the revoke")


def test_kept_revokes_expire_and_are_bounded(redis_url: str, worker: Worker) -> None:
    store_revokes(worker.app, unique())
    assert 0 < worker.app.backend.client.ttl("capsule:{revokes}") <= 86_400


def test_without_a_redis_nothing_is_kept() -> None:
    app = Celery("none", broker="amqp://localhost", backend="rpc://", set_as_current=False)
    assert revoke_store(app) is None
    store_revokes(app, unique())
