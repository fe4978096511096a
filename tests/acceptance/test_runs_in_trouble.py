"""Durable runs whose worker dies, stands still, cannot read them, or loses their Redis."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from billiard.exceptions import TimeLimitExceeded
from celery import group
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from capsule_tasks import Capsule
from capsule_tasks.client.runs.handle import RunHandle
from capsule_tasks.client.runs.messages import RUN_TASK
from capsule_tasks.client.runs.stores import sync_run_store
from capsule_tasks.durable import INPUT_SCHEMA
from capsule_tasks.errors import RunCancelled, RunFailed
from capsule_tasks.protocol.events import AttemptClaimed
from capsule_tasks.testing.servers import PrivateServer, free_port
from tests.acceptance.test_runs import AGENT, APP, attempts, effects, events_of, parked
from tests.acceptance.workers import HANG_S, Worker, eventually, unique


@pytest.fixture
def worker(redis_url: str, tmp_path: Path) -> Iterator[Worker]:
    """A worker whose leases are short."""
    with Worker(redis_url, tmp_path, app=APP, TEST_LEASE="2") as worker:
        yield worker


def a_member_of(worker: Worker, tmp_path: Path, **environment: str) -> Worker:
    """Another worker on the same queue."""
    url, environment = worker.environment["REDIS_URL"], {"TEST_LEASE": "2", **environment}
    return Worker(url, tmp_path, app=APP, queue=worker.queue, **environment)


def owners(worker: Worker) -> set[str]:
    """The incarnations that have claimed runs."""
    members = worker.app.backend.client.zrange("capsule:{runs}:owners", 0, -1)
    return {owner.decode() for owner in members}


def outcome(run: RunHandle) -> Any:
    return run.execution.get(timeout=HANG_S)


def test_a_run_whose_child_is_killed_goes_on_after_its_last_turn(worker: Worker) -> None:
    key = unique()
    run = Capsule(worker.app).runs.start(AGENT, f"tool look | mark {key}; hold {key}; say done")
    os.kill(int(worker.heard(key)), signal.SIGKILL)
    worker.heard(key)  # the second time
    worker.go(key)
    assert outcome(run) == "done"
    assert attempts(events_of(run))[-2:] == ["claimed", "succeeded"]
    assert effects(worker, run) == [b"look"]


def test_a_run_whose_worker_is_killed_goes_on_in_another(worker: Worker, tmp_path: Path) -> None:
    key = unique()
    run = Capsule(worker.app).runs.start(AGENT, f"tool look | mark {key}; hold {key}; say done")
    worker.heard(key)
    worker.kill()
    with a_member_of(worker, tmp_path) as other:
        other.heard(key)
        other.go(key)
        assert outcome(run) == "done"
        assert attempts(events_of(run)) == ["claimed", "lost", "claimed", "succeeded"]
        assert effects(other, run) == [b"look"]


def test_a_worker_that_stands_still_loses_its_run_and_disturbs_nobody(
    worker: Worker, tmp_path: Path
) -> None:
    key = unique()
    run = Capsule(worker.app).runs.start(AGENT, f"tool look | mark {key}; hold {key}; say done")
    child = int(worker.heard(key))
    for pid in (worker.pid, child):
        os.kill(pid, signal.SIGSTOP)
    with a_member_of(worker, tmp_path) as other:
        assert int(other.heard(key)) != child, "a keeper has sent the run on"
        for pid in (worker.pid, child):
            os.kill(pid, signal.SIGCONT)
        lost = "the lease under which this process drives 1 runs was lost"
        eventually(lambda: lost in worker.log, "that it has lost its lease")
        other.go(key)
        other.go(key)
        assert outcome(run) == "done"
        assert attempts(events_of(run))[-2:] == ["claimed", "succeeded"]
        assert effects(worker, run) == [b"look"]


def test_a_parked_run_resumes_in_another_worker_than_the_first(
    worker: Worker, tmp_path: Path
) -> None:
    before = owners(worker)
    run = parked(Capsule(worker.app).runs.start(AGENT, "tool look | ask go; say done"))
    worker.stop()
    (owner,) = owners(worker) - before
    with sync_run_store(worker.app) as store:
        assert not store.lease(owner).remaining_s(), "a worker that stops gives its lease up"
    with a_member_of(worker, tmp_path) as other:
        run.approve("go")
        assert outcome(run) == "done"
        messages = events_of(run)
        assert attempts(messages) == ["claimed", "parked", "claimed", "succeeded"]
        names = [each.worker for each in messages if isinstance(each, AttemptClaimed)]
        assert names == [worker.name, other.name]


def test_a_run_that_is_cancelled_before_any_worker_has_it_is_ended_by_one(worker: Worker) -> None:
    """A worker ends its task, as no other process can tell Celery."""
    worker.stop()
    runs = Capsule(worker.app).runs
    run = runs.start(AGENT, "say done")
    assert run.cancel(by="ann") == "cancelled"
    worker.start()
    assert attempts(events_of(run)) == ["claimed", "cancelled"]
    eventually(lambda: AsyncResult(run.id, app=worker.app).state == "REVOKED", "REVOKED")


def test_a_hard_time_limit_ends_the_run_too(worker: Worker) -> None:
    run = Capsule(worker.app).runs.start(AGENT, "say hello | sleep 3600", time_limit=1)
    with pytest.raises(TimeLimitExceeded):
        outcome(run)
    eventually(lambda: run.state().status == "cancelled", "the end of the run")
    assert attempts(events_of(run)) == ["claimed", "failed"]


def test_a_revoked_run_is_cancelled_when_its_message_comes(worker: Worker) -> None:
    run = parked(Capsule(worker.app).runs.start(AGENT, "ask go; say done"))
    worker.tell("revoke", run.id)
    run.approve("go")
    assert attempts(events_of(run)) == ["claimed", "parked", "claimed", "cancelled"]
    eventually(lambda: run.state().status == "cancelled", "the end of the run")


def test_a_run_whose_message_has_expired_is_cancelled(worker: Worker) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    run = Capsule(worker.app).runs.start(AGENT, "say done", expires=before)
    with pytest.raises(TaskRevokedError):
        outcome(run)
    with pytest.raises(RunCancelled, match="expired"):
        run.result(timeout_s=HANG_S)
    assert attempts(events_of(run))[-1] == "cancelled"


def test_a_run_without_a_usable_input_fails_its_task(worker: Worker) -> None:
    result = worker.app.signature(RUN_TASK, ([],), {"agent": AGENT}).apply_async()
    with pytest.raises(Exception, match="a text or a list of items, not empty"):
        result.get(timeout=HANG_S)


def test_a_tool_that_blocks_for_longer_than_the_lease_loses_no_run(worker: Worker) -> None:
    runs = Capsule(worker.app).runs
    key = unique()
    neighbour = runs.start(AGENT, f"mark {key}; hold {key} | say done")
    worker.heard(key)
    run = runs.start(AGENT, "say hello | block 5 | say done")
    assert outcome(run) == "done"
    worker.go(key)
    assert outcome(neighbour) == "done"
    for each in (run, neighbour):
        assert attempts(events_of(each)) == ["claimed", "succeeded"]


def test_a_run_that_a_worker_cannot_read_goes_to_one_that_can(
    worker: Worker, tmp_path: Path
) -> None:
    run = parked(Capsule(worker.app).runs.start(AGENT, "say hello | ask go; say done"))
    worker.stop()
    with a_member_of(worker, tmp_path, TEST_SCHEMAS=INPUT_SCHEMA) as old:
        run.approve("go")
        eventually(lambda: f"run {run.id} goes to another worker" in old.log, "a handover")
        assert "'script/1'" in old.log
        worker.start()
        assert outcome(run) == "done"
    assert attempts(events_of(run)) == ["claimed", "parked", "claimed", "succeeded"]


@pytest.mark.full
def test_a_run_whose_agent_a_worker_does_not_have_goes_to_one_that_has(
    worker: Worker, tmp_path: Path
) -> None:
    worker.stop()
    with a_member_of(worker, tmp_path, TEST_NO_AGENT="1") as bare:
        run = Capsule(worker.app).runs.start(AGENT, "say done")
        eventually(lambda: "no agent is registered as 'script'" in bare.log, "a handover")
        worker.start()
        assert outcome(run) == "done"
    assert attempts(events_of(run)) == ["claimed", "succeeded"]


def test_a_run_that_comes_to_a_pool_of_celery_s_own_goes_to_another_worker(
    worker: Worker, tmp_path: Path
) -> None:
    worker.stop()
    url = worker.environment["REDIS_URL"]
    with Worker(url, tmp_path, "-P", "threads", app=APP, queue=worker.queue) as other:
        run = Capsule(worker.app).runs.start(AGENT, "say done")
        eventually(lambda: f"run {run.id} goes to another worker" in other.log, "a handover")
        worker.start()
        assert outcome(run) == "done"
    assert attempts(events_of(run)) == ["claimed", "succeeded"]


def test_a_cancelled_run_is_ended_by_a_worker_that_does_not_have_its_agent(
    worker: Worker, tmp_path: Path
) -> None:
    worker.stop()
    with a_member_of(worker, tmp_path, TEST_NO_AGENT="1") as bare:
        run = Capsule(worker.app).runs.start(AGENT, "say done")
        eventually(lambda: "no agent is registered as 'script'" in bare.log, "a handover")
        assert run.cancel() == "cancelled"
        with pytest.raises(TaskRevokedError):
            run.execution.get(timeout=HANG_S)


def test_a_soft_time_limit_fails_the_run(worker: Worker) -> None:
    run = Capsule(worker.app).runs.start(AGENT, "say hello | sleep 3600", soft_time_limit=1)
    with pytest.raises(RunFailed) as failed:
        outcome(run)
    assert (failed.value.kind, failed.value.type) == ("timeout", "SoftTimeLimitExceeded")
    state = run.state()
    assert (state.status, state.turn) == ("failed", 2)
    assert attempts(events_of(run)) == ["claimed", "failed"]


def test_two_hundred_runs_are_driven_at_once(worker: Worker) -> None:
    key, count = unique(), 200
    runs = Capsule(worker.app).runs
    members = [runs.s(AGENT, f"mark {key}; hold {key} | say {n}") for n in range(count)]
    result = group(members, app=worker.app).apply_async()
    pids = {worker.heard(key) for _ in range(count)}
    assert len(pids) == 1, "all in one child"
    for _ in range(count):
        worker.go(key)
    assert result.get(timeout=HANG_S) == [str(n) for n in range(count)]


def test_a_run_whose_redis_is_away_until_its_lease_is_lost_goes_on(
    redis_url: str, tmp_path: Path
) -> None:
    key = unique()
    with PrivateServer(tmp_path / "runs", port=free_port(), aof=True) as server:
        environment = {"TEST_LEASE": "2", "TEST_STREAMS_URL": server.url}
        with Worker(redis_url, tmp_path, app=APP, **environment) as worker:
            worker.app.conf.capsule_redis_url = server.url
            run = Capsule(worker.app).runs.start(
                AGENT, f"tool look | mark {key}; hold {key} | say done"
            )
            worker.heard(key)
            server.stop()
            worker.go(key)
            eventually(lambda: "the lease under which this process drives" in worker.log, "a loss")
            server.start()
            worker.heard(key)  # another attempt
            worker.go(key)
            assert outcome(run) == "done"
            assert effects(worker, run) == [b"look"]


def test_runs_live_in_a_cluster(redis_url: str, cluster_url: str, tmp_path: Path) -> None:
    """Where calls to several nodes keep no order: a run is recorded as held before its claim."""
    with Worker(redis_url, tmp_path, app=APP, TEST_STREAMS_URL=cluster_url) as worker:
        worker.app.conf.capsule_redis_url = cluster_url
        run = parked(Capsule(worker.app).runs.start(AGENT, "tool look | ask go; say done"))
        run.approve("go")
        assert outcome(run) == "done"
        assert attempts(events_of(run)) == ["claimed", "parked", "claimed", "succeeded"]
