"""`async def` tasks: hundreds beside each other in one session, with all that tasks can do."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import chain, chord
from celery.exceptions import TaskRevokedError, TimeLimitExceeded, WorkerLostError

from tests.acceptance.workers import HANG_S, Worker, eventually, is_running, unique


@pytest.fixture(scope="module")
def worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """One worker of this pool: prefork cannot run coroutines."""
    with Worker(redis_url, tmp_path_factory.mktemp("worker")) as worker:
        yield worker


def test_hundreds_run_beside_each_other_in_one_process(worker: Worker) -> None:
    key, size = unique(), 300
    results = [worker.send("gather", key, size) for _ in range(size)]
    assert len({result.get(timeout=HANG_S) for result in results}) == 1


def test_each_has_its_own_context_and_request(worker: Worker) -> None:
    results = [worker.send("nap", 0.05) for _ in range(100)]
    for result in results:
        own_id, colour, before, current = result.get(timeout=HANG_S)
        assert own_id == colour == current == result.id
        assert before == "none"


def test_a_blocking_task_never_waits_for_coroutines_nor_they_for_it(worker: Worker) -> None:
    naps, holds = [unique() for _ in range(50)], [unique() for _ in range(2)]
    sleeping = [worker.send("async_hold", key) for key in naps]
    for key in naps:
        worker.heard(key)
    assert worker.get("add", 1, 1) == 2
    for key in holds:
        worker.send("hold", key)
        worker.heard(key)
    assert worker.get("nap", 0)[0]
    for key in holds:
        worker.go(key)
    for result in sleeping:
        worker.app.control.revoke(result.id, terminate=True, destination=[worker.name])
    for result in sleeping:
        eventually(result.ready)
        assert result.state == "REVOKED"
    for key in naps:
        worker.heard(f"{key}:finally")


def test_a_coroutine_overtakes_blocking_tasks_that_wait_for_a_slot(worker: Worker) -> None:
    holds = [unique() for _ in range(2)]
    for key in holds:
        worker.send("hold", key)
        worker.heard(key)
    waiting = [worker.send("add", 1, number) for number in range(3)]
    assert worker.get("async_retry", 0) == 0
    assert not any(result.ready() for result in waiting)
    for key in holds:
        worker.go(key)
    assert [result.get(timeout=HANG_S) for result in waiting] == [1, 2, 3]


def test_a_coroutine_with_another_name_in_log_lines_takes_no_slot(worker: Worker) -> None:
    """Its `shadow` named no task, so it took a slot, which it never gave back."""
    for _ in range(3):
        assert worker.sig("nap", 0).apply_async(shadow="other name").get(timeout=HANG_S)
    assert worker.get("add", 1, 1) == 2


@pytest.mark.parametrize("name", ["async_retry", "async_autoretry"])
def test_retries(worker: Worker, name: str) -> None:
    assert worker.get(name, 2) == 2


def test_a_failure_shows_its_place_in_the_code(worker: Worker) -> None:
    result = worker.send("async_fail")
    with pytest.raises(Exception, match="code 4"):
        result.get(timeout=HANG_S)
    assert 'raise OwnError(4, hint="awaited")' in result.traceback


def test_in_chains_and_chords(worker: Worker) -> None:
    s = worker.sig
    assert chain(s("nap", 0), s("request"), app=worker.app)().get(HANG_S)["parent_id"]
    header = [s("async_retry", n) for n in range(3)]
    assert chord(header, s("total"), app=worker.app)().get(timeout=HANG_S) == 3


def test_a_task_sent_by_a_coroutine_names_its_parent(worker: Worker) -> None:
    results = [worker.send("async_parent", 0.05) for _ in range(30)]
    for result in results:
        own, child = result.get(timeout=HANG_S)
        request = worker.app.AsyncResult(child).get(timeout=HANG_S)
        assert (request["parent_id"], own) == (result.id, result.id)


def test_a_soft_limit_is_raised_in_the_coroutine(worker: Worker) -> None:
    key = unique()
    assert worker.get("async_hold", key, soft_time_limit=0.3) == "tidied"
    worker.heard(f"{key}:finally")


def test_a_hard_limit_ends_one_and_leaves_its_neighbours(worker: Worker) -> None:
    key, other = unique(), unique()
    neighbour = worker.send("async_hold", other, soft_time_limit=3)
    worker.heard(other)
    with pytest.raises(TimeLimitExceeded):
        worker.get("async_hold", key, time_limit=0.3)
    worker.heard(f"{key}:finally")
    assert neighbour.get(timeout=HANG_S) == "tidied"


def test_a_coroutine_that_ignores_its_cancel_stops_no_other(redis_url: str, tmp_path: Path) -> None:
    """Its child takes nothing new, and lives on while its neighbours may finish."""
    key, other = unique(), unique()
    with Worker(redis_url, tmp_path, TEST_ASYNC_GRACE_S="1") as worker:
        deaf = worker.send("async_deaf", key)
        worker.send("async_hold", other)
        worker.heard(key)
        worker.heard(other)
        worker.tell("revoke", deaf.id, terminate=True)
        eventually(
            lambda: "child takes nothing new and will be killed" in worker.log, "the verdict"
        )
        for result in [worker.send("nap", 0) for _ in range(3)]:
            assert result.get(timeout=HANG_S)
        with pytest.raises(TaskRevokedError):
            deaf.get(timeout=HANG_S)


def test_output_of_a_coroutine_reaches_the_log(worker: Worker) -> None:
    word = unique()
    worker.get("async_say", word)
    eventually(lambda: f"awaited {word}" in worker.log)


def test_many_that_end_at_once_share_a_few_connections(worker: Worker) -> None:
    client = worker.app.backend.client
    before = len(client.client_list())
    size = 200
    results = [worker.send("gather", unique(), 1) for _ in range(size)]
    key = unique()
    results += [worker.send("gather", key, size) for _ in range(size)]
    for result in results:
        result.get(timeout=HANG_S)
    assert len(client.client_list()) - before < size / 2


def test_the_prefetch_counter_comes_back_to_where_it_was(worker: Worker) -> None:
    eventually(lambda: not worker.ask("active"), "the end of what other tests began")
    before = worker.ask("stats")["prefetch_count"]
    for result in [worker.send("nap", 0.01) for _ in range(40)]:
        result.get(timeout=HANG_S)
    eventually(lambda: math.isclose(worker.ask("stats")["prefetch_count"], before))


def test_retired_children_that_finish_their_coroutines_delay_no_other(
    redis_url: str, tmp_path: Path
) -> None:
    keys = [unique() for _ in range(11)]
    with Worker(redis_url, tmp_path, "--max-tasks-per-child=1", concurrency=1) as worker:

        def reasons() -> str:
            return " ".join(worker.ask("_request", "capsule_health")["reasons"])

        first, *others = [worker.send("async_hold", key) for key in keys[:10]]
        assert len({worker.heard(key) for key in keys[:10]}) == 10
        assert reasons() == ""
        last = worker.send("async_hold", keys[10])
        eventually(lambda: "1 async tasks wait: each child takes nothing new" in reasons())
        worker.app.control.revoke(first.id, terminate=True, destination=[worker.name])
        worker.heard(keys[10])
        assert reasons() == ""
        for result in (*others, last):
            worker.app.control.revoke(result.id, terminate=True, destination=[worker.name])
        for result in (first, *others, last):
            eventually(result.ready)


def test_so_many_children_take_so_many_coroutines_each(redis_url: str, tmp_path: Path) -> None:
    keys = [unique() for _ in range(5)]
    limits = json.dumps({"capsule_async_children": 2, "capsule_async_limit": 2})
    with Worker(redis_url, tmp_path, concurrency=1, TEST_CONF=limits) as worker:
        results = [worker.send("async_hold", key) for key in keys]
        pids = [worker.heard(key) for key in keys[:4]]
        assert sorted(pids.count(pid) for pid in set(pids)) == [2, 2]
        eventually(lambda: worker.ask("stats")["pool"]["capsule"]["waiting"] == 1, "the fifth")
        worker.app.control.revoke(results[0].id, terminate=True, destination=[worker.name])
        assert worker.heard(keys[4]) == pids[0]


def test_blocking_functions_of_coroutines_have_so_many_threads(
    redis_url: str, tmp_path: Path
) -> None:
    threads = json.dumps({"capsule_async_threads": 20})  # asyncio would have 6 on two processors
    with Worker(redis_url, tmp_path, concurrency=1, TEST_CONF=threads) as worker:
        assert len(worker.get("thread_names", 20)) == 20


def test_children_are_replaced_after_so_many_and_lose_none(redis_url: str, tmp_path: Path) -> None:
    """Coroutines in a retired child finish there."""
    with Worker(redis_url, tmp_path, "--max-tasks-per-child=20") as worker:
        key, size = unique(), 10
        together = [worker.send("gather", key, size) for _ in range(size)]
        results = [worker.send("gather", unique(), 1) for _ in range(150)]
        pids = {result.get(timeout=HANG_S) for result in (*together, *results)}
        assert len(pids) >= 8
        eventually(lambda: sum(map(is_running, pids)) <= 1, "the end of those that have run enough")


def test_a_killed_child_is_reported_for_its_coroutines_and_the_worker_goes_on(
    redis_url: str, tmp_path: Path
) -> None:
    keys, other = [unique() for _ in range(5)], unique()
    with Worker(redis_url, tmp_path) as worker:
        results = [worker.send("async_hold", key) for key in keys]
        neighbour = worker.send("hold", other)
        worker.heard(other)
        (pid,) = {int(worker.heard(key)) for key in keys}
        os.kill(pid, signal.SIGKILL)
        for result in results:
            with pytest.raises(WorkerLostError, match="SIGKILL"):
                result.get(timeout=HANG_S)
        assert worker.get("gather", unique(), 1) != pid
        worker.go(other)
        assert neighbour.get(timeout=HANG_S) > 0


def test_late_acknowledged_tasks_of_a_killed_child_are_redelivered(worker: Worker) -> None:
    keys = [unique() for _ in range(3)]
    results = [worker.send("async_late", key) for key in keys]
    (pid,) = {int(worker.heard(key)) for key in keys}
    os.kill(pid, signal.SIGKILL)
    assert [result.get(timeout=HANG_S) for result in results] == [2, 2, 2]


def test_late_acknowledged_tasks_of_a_killed_worker_are_redelivered(
    redis_url: str, tmp_path: Path
) -> None:
    keys = [unique() for _ in range(3)]
    with Worker(redis_url, tmp_path, TEST_VISIBILITY="2") as worker:
        results = [worker.send("async_late", key) for key in keys]
        (pid,) = {int(worker.heard(key)) for key in keys}
        worker.kill()
        eventually(lambda: not is_running(pid), "the end of the child")
        with Worker(redis_url, tmp_path, queue=worker.queue, TEST_VISIBILITY="2"):
            assert [result.get(timeout=HANG_S) for result in results] == [2, 2, 2]
