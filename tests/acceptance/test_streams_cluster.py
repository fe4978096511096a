"""Streams in a cluster of three, with a real worker whose broker is a plain Redis."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import group
from celery.exceptions import TaskRevokedError, WorkerLostError

from capsule_tasks.client import Event, Execution, GroupExecution
from capsule_tasks.protocol.events import Ended, Outcome
from capsule_tasks.protocol.messages import InputRequest, Output, Progress
from tests.acceptance.workers import HANG_S, ROOT, Worker, eventually, unique
from tests.servers import cluster_with_tls
from tests.tls import Certificates

CLI = [sys.executable, "-m", "celery", "-A", "tests.acceptance.app", "capsule"]


@pytest.fixture(scope="module")
def worker(
    redis_url: str, cluster_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    with clustered(redis_url, cluster_url, tmp_path_factory.mktemp("worker")) as worker:
        yield worker


def clustered(url: str, cluster_url: str, directory: Path, **environment: str) -> Worker:
    worker = Worker(url, directory, TEST_STREAMS_URL=cluster_url, **environment)
    worker.app.conf.capsule_redis_url = cluster_url
    return worker


def command(worker: Worker, *words: str, **options: Any) -> Any:
    """Another process, which knows what the worker knows."""
    env = worker.environment
    return subprocess.Popen(
        [*CLI, *words], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, **options
    )


def said_by(worker: Worker, *words: str, status: int = 0) -> str:
    with command(worker, *words) as process:
        text: str = process.communicate(timeout=HANG_S)[0]
        assert process.returncode == status, text
    return text


def end_of(execution: Execution) -> Ended:
    *_, last = execution.events()
    assert isinstance(last.message, Ended)
    return last.message


def test_output_of_a_task_is_seen_as_it_runs_and_later(worker: Worker) -> None:
    key = unique()
    execution = Execution.of(worker.send("steps", key, 3))
    heard: list[Event] = []
    for event in execution.events():
        heard.append(event)
        if isinstance(event.message, Progress) and event.message.done == 3:
            assert execution.snapshot().state == "running"
            worker.go(key)
    text = "".join(event.message.data for event in heard if isinstance(event.message, Output))
    assert text == "step 0\nstep 1\nstep 2\n"
    assert end_of(execution).outcome == Outcome.SUCCEEDED
    ids = [event.id for event in heard]
    assert len(set(ids)) == len(ids)
    for place in range(len(ids)):
        assert [event.id for event in execution.events(ids[place])] == ids[place + 1 :]
    late = said_by(worker, "tail", execution.id, "--json")
    assert [json.loads(line)["event"] for line in late.splitlines()] == ids


def test_streams_over_tls_are_there_and_delay_no_task(redis_url: str, tmp_path: Path) -> None:
    """A task of a cluster begins when it is claimed, which the lease and its bells come before."""
    conf = json.dumps({"capsule_publish": {"claim_wait_s": 10 * HANG_S}})
    with (
        cluster_with_tls(tmp_path / "cluster", Certificates(tmp_path)) as url,
        clustered(redis_url, url, tmp_path, TEST_CONF=conf) as worker,
    ):
        execution = Execution.of(worker.send("speak", "over TLS"))
        assert end_of(execution).outcome == Outcome.SUCCEEDED
        assert "over TLS" in str(execution.tail())
        stopped = unique()
        running = Execution.of(worker.send("busy", stopped))
        worker.heard(stopped)
        assert running.cancel() == "requested"
        assert end_of(running).outcome == Outcome.CANCELLED


def test_the_streams_are_on_every_node_and_not_with_the_broker(
    worker: Worker, cluster_url: str, redis_url: str
) -> None:
    executions = [Execution.of(worker.send("add", n, 1)) for n in range(60)]
    for execution in executions:
        assert end_of(execution).outcome == Outcome.SUCCEEDED
    keys = {f"capsule:{{E:{execution.id}}}:meta" for execution in executions}
    found = []
    for node in cluster_url.partition("//")[2].split(","):
        with redis.Redis.from_url(f"redis://{node}", decode_responses=True) as client:
            found.append(keys.intersection(client.scan_iter("capsule:*", count=1000)))
    assert all(found)
    assert set.union(*found) == keys
    with redis.Redis.from_url(redis_url) as broker:
        assert not broker.exists(*keys)


def test_a_cancel_before_the_start_waits_for_it(worker: Worker) -> None:
    key = unique()
    execution = Execution(unique(), app=worker.app)
    assert execution.cancel() == "pending"
    worker.send("hold", key, task_id=execution.id)
    assert end_of(execution).outcome == Outcome.CANCELLED
    assert not worker.app.backend.client.exists(f"mark:{key}")


def test_one_process_watches_and_another_cancels(worker: Worker) -> None:
    key = unique()
    result = worker.send("busy", key)
    execution = Execution.of(result)
    with command(worker, "tail", result.id, "--json") as watcher:
        worker.heard(key)
        eventually(lambda: execution.snapshot().state == "running", "its claim")
        assert execution.cancel() == "requested"
        assert execution.cancel() in ("requested", "over")
        lines = [json.loads(line) for line in watcher.stdout]
        assert watcher.wait(HANG_S) == 1
    assert [line["t"] for line in lines][-1] == "ended"
    assert end_of(execution).outcome == Outcome.CANCELLED
    with pytest.raises(TaskRevokedError):
        result.get(timeout=HANG_S)
    assert execution.cancel() == "over"
    assert said_by(worker, "cancel", result.id) == f"{result.id}: over\n"


def test_a_question_is_answered_from_another_process(worker: Worker) -> None:
    execution = Execution.of(worker.send("ask", "name? "))
    for event in execution.events():
        if isinstance(event.message, InputRequest):
            said_by(worker, "respond", execution.id, "Ada")
    assert execution.get(HANG_S) == "heard Ada"


def test_a_group_is_counted_and_cancelled(worker: Worker) -> None:
    members = [worker.sig("add", n, 1) for n in range(20)] + [worker.sig("fail", "why")]
    running = GroupExecution.of(group(members, app=worker.app).apply_async())
    states = list(running.watch())
    assert states[-1].counts == {"succeeded": 20, "failed": 1}
    (failure,) = [failure for state in states for failure in state.failures]
    assert failure.execution_id == running.member(20).id
    last = json.loads(
        said_by(worker, "tail", running.id, "--group", "21", "--json", status=1).splitlines()[-1]
    )
    assert (last["done"], last["counts"]) == (21, {"succeeded": 20, "failed": 1})
    endless = [worker.sig("busy", unique()) for _ in range(6)]
    running = GroupExecution.of(group(endless, app=worker.app).apply_async())
    assert sum(running.cancel().values()) == 6
    assert list(running.watch())[-1].counts == {"cancelled": 6}


async def test_many_are_watched_at_once(worker: Worker) -> None:
    async def last(execution: Execution) -> Event:
        return [event async for event in execution.aevents()][-1]

    executions = [Execution.of(worker.send("add", n, 1)) for n in range(100)]
    async with asyncio.timeout(HANG_S):
        ends = await asyncio.gather(*map(last, executions))
    assert [end.message.result_text for end in ends] == [str(n + 1) for n in range(100)]


def test_recent_executions_are_listed(worker: Worker) -> None:
    execution = Execution.of(worker.send("add", 1, 1))
    assert end_of(execution).outcome == Outcome.SUCCEEDED

    def is_listed() -> bool:
        lines = said_by(worker, "ps", "--task", "add", "--json").splitlines()
        return execution.id in [json.loads(line)["id"] for line in lines]

    eventually(is_listed, "its entry")


def test_tasks_of_a_killed_worker_are_ended_by_another(
    worker: Worker, redis_url: str, cluster_url: str, tmp_path: Path
) -> None:
    key = unique()
    with clustered(redis_url, cluster_url, tmp_path, TEST_LEASE="1") as dying:
        execution = Execution.of(dying.send("steps", key, 2))
        dying.heard(key)
        eventually(lambda: len(execution.tail()) >= 6, "the output in the stream")
        os.kill(dying.pid, 9)
        assert end_of(execution).outcome == Outcome.LOST
        with pytest.raises(WorkerLostError):
            execution.get(timeout=HANG_S)
    assert worker.get("add", 1, 1) == 2
