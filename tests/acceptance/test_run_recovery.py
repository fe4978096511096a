"""Durable runs whose processes die, or whose time limits pass, with real workers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from capsule_tasks import Capsule
from capsule_tasks.client.runs.messages import RUN_TASK, message_of
from capsule_tasks.client.runs.stores import sync_run_store
from capsule_tasks.durable import INPUT_SCHEMA, first_snapshot
from capsule_tasks.errors import RunCancelled
from capsule_tasks.protocol.events import Ended
from capsule_tasks.testing.servers import PrivateServer
from tests.acceptance.workers import HANG_S, Worker, close, eventually, producer, unique

APP = "tests.acceptance.others.words_app"


@pytest.fixture
def capsule(valkey_url: str) -> Iterator[Capsule]:
    app = producer(valkey_url, unique("q"), capsule_prefix=unique("prefix"))
    yield Capsule(app)
    close(app)


@pytest.fixture
def hire(capsule: Capsule, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def started(**env: str) -> Worker:
        conf = capsule.app.conf
        worker = Worker(
            conf.broker_url,
            tmp_path,
            queue=conf.task_default_queue,
            app=APP,
            TEST_PREFIX=conf.capsule_prefix,
            **env,
        )
        workers.append(worker)
        return worker.__enter__()

    yield started
    for worker in workers:
        worker.__exit__()


def ends_once(run: Any, value: Any) -> None:
    """Wait for the end of a run in all places where it is told."""
    assert run.execution.get(timeout=HANG_S) == value
    assert run.result(timeout_s=HANG_S) == value
    messages = [event.message for event in run.events()]
    assert [message for message in messages if isinstance(message, Ended)] == messages[-1:]


def test_a_run_whose_producer_died_before_it_sent_it_is_driven(
    capsule: Capsule, hire: Callable[..., Worker]
) -> None:
    message = message_of(capsule.app.signature(RUN_TASK, (), {"agent": "words"}))
    with sync_run_store(capsule.app) as store:
        snapshot = first_snapshot(["work"])
        store.create("r", "r", snapshot, schema=INPUT_SCHEMA, agent="words", message=message)
    for _ in range(3):
        hire()
    ends_once(capsule.runs.get("r"), ["work"])


@pytest.mark.parametrize("on_expiry", ["reject", "approve", "cancel"])
def test_workers_keep_the_time_limits_of_approvals(
    capsule: Capsule, hire: Callable[..., Worker], on_expiry: str
) -> None:
    hire(TEST_APPROVAL_S="0.5", TEST_ON_EXPIRY=on_expiry)
    run = capsule.runs.start("words", ["ask", "work"])
    if on_expiry == "cancel":
        with pytest.raises(RunCancelled):
            run.result(timeout_s=HANG_S)
        with pytest.raises(TaskRevokedError):
            run.execution.get(timeout=HANG_S)
    else:
        decided = "approved" if on_expiry == "approve" else "rejected"
        ends_once(run, [f"{decided} by expiry", "work"])


def test_runs_outlive_a_redis_that_restarts(tmp_path: Path) -> None:
    with PrivateServer(tmp_path / "redis", aof=True) as server:
        port, queue = server.port, unique("q")
        with Worker(server.url, tmp_path, queue=queue, app=APP) as worker:
            app = producer(server.url, queue)
            capsule = Capsule(app)
            parked = capsule.runs.start("words", ["ask", "work"])
            running = capsule.runs.start("words", ["work", "hang", "work"])
            eventually(lambda: parked.state().status == "interrupted", "the question")
            child = int(worker.heard(running.id))
            server.stop()
            os.kill(child, signal.SIGKILL)
            with PrivateServer(tmp_path / "redis", port=port, aof=True):
                (call,) = parked.state().waiting
                parked.approve(call.call_id, by="ann")
                ends_once(parked, ["approved by ann", "work"])
                ends_once(running, ["work", "hang", "work"])
                close(app)


def test_the_end_of_a_run_is_reported_although_its_worker_died_before_that(
    capsule: Capsule, hire: Callable[..., Worker]
) -> None:
    """The broker itself would deliver the message again in an hour."""
    conf = json.dumps({"broker_transport_options": {"visibility_timeout": 3600}})
    dying = hire(TEST_CONF=conf, TEST_DIES_BEFORE_RESULT="1")
    run = capsule.runs.start("words", ["work"])
    assert run.result(timeout_s=HANG_S) == ["work"]
    assert dying.process is not None
    dying.process.wait(HANG_S)
    assert not run.execution.ready()
    other = hire(TEST_CONF=conf)
    ends_once(run, ["work"])
    assert "and its worker did not report that" in other.log
