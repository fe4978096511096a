"""Groups whose counter does not tell all: other pools, broken chains, counters that are gone."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import chain, group
from celery.result import GroupResult

from capsule_tasks.client import GroupExecution, GroupState
from capsule_tasks.storage.connections.pipelined import PipelinedConnection
from capsule_tasks.storage.executions.store import ExecutionStore
from capsule_tasks.testing.servers import PrivateServer
from tests.acceptance.workers import HANG_S, ROOT, Worker, close, producer, unique

stores = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")
"""Celery's Redis backend does, in the test's own process."""


@pytest.fixture(scope="module")
def worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(redis_url, tmp_path_factory.mktemp("worker")) as worker:
        yield worker


@pytest.fixture(scope="module")
def prefork(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(redis_url, tmp_path_factory.mktemp("prefork"), pool="prefork") as worker:
        yield worker


def sent(members: list[Any], worker: Worker) -> GroupResult:
    result: GroupResult = group(members, app=worker.app).apply_async()
    return result


def checked(states: list[GroupState]) -> GroupState:
    """The last of them; on the way there it never went back."""
    done = [state.done for state in states]
    assert done == sorted(done)
    assert states[-1].is_over
    return states[-1]


def test_a_group_on_another_pool_ends_by_its_results(prefork: Worker) -> None:
    members = [prefork.sig("add", n, 1) for n in range(20)] + [prefork.sig("fail", "why")]
    running = GroupExecution.of(sent(members, prefork))
    states = list(running.watch())
    assert checked(states).counts == {"succeeded": 20, "failed": 1}
    (failure,) = [failure for state in states for failure in state.failures]
    assert failure.execution_id == running.member(20).id
    assert "ValueError" in failure.reason
    assert running.snapshot() == GroupState(21, states[-1].counts, (failure,))


async def test_members_on_both_pools_count_once_each(worker: Worker, prefork: Worker) -> None:
    key = unique()
    members = [where.sig("add", n, 1) for n in range(10) for where in (worker, prefork)]
    members += [worker.sig("hold", key), prefork.sig("hold", key)]
    running = GroupExecution.of(sent(members, worker))
    states = []
    async for state in running.awatch():
        states.append(state)
        if state.done == 20:
            worker.go(key)
            worker.go(key)
    assert checked(states).counts == {"succeeded": 22}


def test_a_member_whose_chain_broke_is_counted_by_its_result(worker: Worker) -> None:
    """Its last task is never sent, so that no worker can count it."""
    members = [worker.sig("add", 1, 1), chain(worker.sig("fail", "why"), worker.sig("add", 1))]
    states = list(GroupExecution.of(sent(members, worker)).watch())
    assert checked(states).counts == {"succeeded": 1, "failed": 1}


def test_a_counter_that_is_gone_when_a_watcher_comes(worker: Worker) -> None:
    members = [worker.sig("add", n, 1) for n in range(5)]
    result = sent(members, worker)
    running = GroupExecution.of(result)
    checked(list(running.watch()))
    client = worker.app.backend.client
    assert client.delete(*client.keys(f"capsule:{{G:{result.id}}}:*")) >= 2
    assert running.snapshot().counts == {"succeeded": 5}
    assert checked(list(running.watch())).counts == {"succeeded": 5}


@pytest.mark.parametrize("lost", ["*", "counts"])
def test_a_counter_that_is_lost_on_the_way(worker: Worker, lost: str) -> None:
    """All of the counter, or a part; ends before and after the loss count once each."""
    key = unique()
    members = [worker.sig("add", n, 1) for n in range(5)]
    members += [worker.sig("fail", "why"), worker.sig("hold", key)]
    result = sent(members, worker)
    states = []
    for state in GroupExecution.of(result).watch():
        states.append(state)
        if state.done == 6:
            client = worker.app.backend.client
            assert client.delete(*client.keys(f"capsule:{{G:{result.id}}}:{lost}"))
            worker.go(key)
    assert checked(states).counts == {"succeeded": 6, "failed": 1}
    assert len([failure for state in states for failure in state.failures]) == 1


@stores
def test_the_command_line_ends_too_for_a_group_that_was_saved(
    prefork: Worker, redis_url: str
) -> None:
    result = sent([prefork.sig("add", n, 1) for n in range(3)], prefork)
    result.save()
    for words in ([], ["--group", "3"]):
        lines = tail(redis_url, result.id, *words)
        assert lines[-1] == {
            "done": 3,
            "total": 3,
            "counts": {"succeeded": 3},
            "failures": [],
        }


def tail(redis_url: str, *words: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "celery", "-A", "tests.acceptance.app", "capsule", "tail"]
    done = subprocess.run(
        [*command, *words, "--json"],
        cwd=ROOT,
        env={**os.environ, "REDIS_URL": redis_url},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@stores
async def test_50_000_members_cost_no_read_for_each(tmp_path: Path) -> None:
    """Counted members are never queried; the others are, in a few calls."""
    total, uncounted = 50_000, 1000
    group_id = unique()
    with PrivateServer(tmp_path / "redis") as server:
        app = producer(server.url, "nobody")
        members = tuple(f"{group_id}-{place}" for place in range(total))
        connection = PipelinedConnection(server.url)
        store = ExecutionStore(connection)
        for first in range(uncounted, total, 200):
            ends = [(n, "succeeded", members[n], "") for n in range(first, first + 200)]
            await store.record_group_ends(group_id, ends)
        await connection.close()
        for name in members[:uncounted]:
            app.backend.store_result(name, 1, "SUCCESS")
        with redis.Redis.from_url(server.url) as client:
            client.config_resetstat()
            async for state in GroupExecution(group_id, total, app, members).awatch():
                last = state
            calls = {name: said["calls"] for name, said in client.info("commandstats").items()}
        close(app)
    assert last.counts == {"succeeded": total}
    assert calls["cmdstat_mget"] == uncounted / 200
    assert calls.get("cmdstat_get", 0) < 10
    assert calls["cmdstat_evalsha"] < 10


def test_a_result_backend_that_cannot_be_asked_ends_no_watcher(
    worker: Worker, redis_url: str
) -> None:
    """The backend is asked while the group is silent, and disconnects; the counter goes on."""
    key = unique()
    result = sent([worker.sig("hold", key)], worker)
    with socket.create_server(("127.0.0.1", 0)) as rude:
        port = rude.getsockname()[1]
        app = producer(redis_url, worker.queue)
        app.conf.result_backend = f"redis://127.0.0.1:{port}/0"
        states = GroupExecution(result.id, 1, app, (result.results[0].id,)).watch()
        assert not next(states).is_over
        rude.settimeout(HANG_S)
        rude.accept()[0].close()
        threading.Thread(target=hang_up, args=(rude,), daemon=True).start()
        worker.go(key)
        assert list(states)[-1].counts == {"succeeded": 1}
        close(app)


def hang_up(rude: socket.socket) -> None:
    """Accept every connection until the socket is closed."""
    with contextlib.suppress(OSError):
        while True:
            rude.accept()[0].close()
