"""How many messages a worker takes: as under prefork, and coroutines beside that."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery.utils.nodenames import worker_direct

from tests.acceptance.workers import HANG_S, Worker, eventually, unique

LATE = {"task_acks_late": True}

Make = Callable[..., Worker]


@pytest.fixture
def make(redis_url: str, tmp_path: Path) -> Make:
    def make(*options: str, pool: str = "capsule", concurrency: int = 2, **conf: Any) -> Worker:
        return Worker(
            redis_url,
            tmp_path,
            *options,
            pool=pool,
            concurrency=concurrency,
            TEST_CONF=json.dumps(conf),
        )

    return make


def queued(worker: Worker) -> int:
    return int(worker.app.backend.client.llen(worker.queue))


def takes_all_but(worker: Worker, left: int) -> None:
    """So many messages stay in the queue, also when the worker has had another turn."""
    eventually(lambda: queued(worker) == left, f"{left} messages in the queue")
    for _ in range(3):
        worker.ask("active")
        assert queued(worker) == left


def hold(worker: Worker, name: str, times: int) -> list[str]:
    keys = [unique() for _ in range(times)]
    for key in keys:
        worker.send(name, key)
        worker.heard(key)
    return keys


def test_countdowns_are_held_up_to_their_limit(make: Make, pool: str) -> None:
    conf = {"worker_eta_task_limit": 3, "worker_prefetch_multiplier": 1}
    with make(pool=pool, concurrency=1, **conf) as worker:
        for _ in range(8):
            worker.send("add", 1, 1, countdown=3600)
        takes_all_but(worker, 5)
        assert len(worker.ask("scheduled")) == 3


def test_more_countdowns_than_their_limit_leave_the_prefetching_as_it_was(make: Make) -> None:
    """Under prefork one message at a time is left, until the worker is restarted."""
    conf = {"worker_eta_task_limit": 6, "worker_prefetch_multiplier": 2}
    with make(**conf) as worker:
        assert worker.ask("stats")["prefetch_count"] == 4
        for result in [worker.send("add", 1, n, countdown=0.5) for n in range(12)]:
            result.get(timeout=HANG_S)
        eventually(lambda: worker.ask("stats")["prefetch_count"] == 4, "the counter as it was")


@pytest.mark.parametrize(
    "conf",
    [
        {"worker_eta_task_limit": 3, "worker_prefetch_multiplier": 1},
        {"worker_disable_prefetch": True},
        {"worker_prefetch_multiplier": 1},
    ],
    ids=["few countdowns", "no prefetching", "little prefetching"],
)
def test_coroutines_count_in_addition_to_the_prefetch_limit(
    make: Make, conf: dict[str, Any]
) -> None:
    size, key = 50, unique()
    with make(**LATE, **conf) as worker:
        results = [worker.send("gather", key, size) for _ in range(size)]
        assert len({result.get(timeout=HANG_S) for result in results}) == 1
        hold(worker, "async_hold", 10)
        hold(worker, "hold", 1)
        assert worker.get("add", 1, 1) == 2


def test_without_prefetching_a_worker_takes_as_many_tasks_as_slots(make: Make, pool: str) -> None:
    with make(pool=pool, worker_disable_prefetch=True) as worker:
        keys = hold(worker, "hold", 2)
        results = [worker.send("add", 1, n) for n in range(5)]
        takes_all_but(worker, 5)
        assert not worker.ask("reserved")
        for key in keys:
            worker.go(key)
        assert [result.get(timeout=HANG_S) for result in results] == [1, 2, 3, 4, 5]


def test_coroutines_that_run_have_no_more_messages_prefetched(make: Make) -> None:
    """Theirs are acknowledged: others need not wait in this worker because of them."""
    with make(worker_prefetch_multiplier=2) as worker:
        hold(worker, "async_hold", 20)
        hold(worker, "hold", 2)
        for n in range(20):
            worker.send("add", 1, n)
        takes_all_but(worker, 16)


def test_coroutines_need_no_more_children(make: Make) -> None:
    with make("--autoscale=3,1") as worker:
        hold(worker, "async_hold", 5)
        assert worker.ask("stats")["pool"]["max-concurrency"] == 1
        hold(worker, "hold", 3)
        assert worker.ask("stats")["pool"]["max-concurrency"] == 3


def test_a_worker_has_a_queue_of_its_own(make: Make, pool: str) -> None:
    with (
        make(pool=pool, worker_direct=True) as worker,
        make(pool=pool, worker_direct=True) as other,
    ):
        for one in (worker, other):
            direct = worker_direct(one.name)
            result = worker.app.send_task("request", queue=direct)
            assert result.get(timeout=HANG_S)["hostname"] == one.name
            assert one.get("add", 1, 1) == 2
