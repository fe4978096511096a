"""From prefork to this pool and back, one queue at a time: the steps of the guide work."""

from __future__ import annotations

from pathlib import Path

import pytest
from celery import chain

from capsule_tasks.taskpool import TaskPool
from tests.acceptance.workers import HANG_S, Worker, eventually, unique

CUSTOM = f"{TaskPool.__module__.rpartition('.')[0]}:{TaskPool.__name__}"


def implementation(worker: Worker) -> str:
    return str(worker.ask("stats")["pool"]["implementation"])


def test_one_app_serves_one_queue_in_sessions_and_another_under_prefork(
    redis_url: str, tmp_path: Path
) -> None:
    moved = Worker(
        redis_url, tmp_path, "-P", "custom", pool="prefork", CELERY_CUSTOM_WORKER_POOL=CUSTOM
    )
    with Worker(redis_url, tmp_path, pool="prefork") as stays, moved:
        assert "prefork" in implementation(stays)
        assert "capsule_tasks" in implementation(moved)
        across = chain(
            stays.sig("add", 1, 1), moved.sig("async_retry", 1).set(immutable=True),
            stays.sig("add", 5), moved.sig("add", 5), app=stays.app,
        )  # fmt: skip
        assert across().get(timeout=HANG_S) == 11


def test_prefork_redelivers_messages_of_a_dead_worker_of_ours(
    redis_url: str, tmp_path: Path
) -> None:
    """The way back: nothing is kept where only this pool would look for it."""
    key = unique()
    with Worker(redis_url, tmp_path, TEST_VISIBILITY="2") as ours:
        result = ours.send("hold_late", key)
        ours.heard(key)
        ours.kill()
        with Worker(
            redis_url, tmp_path, pool="prefork", queue=ours.queue, TEST_VISIBILITY="2"
        ) as stock:
            stock.heard(key)
            stock.go(key)
            assert result.get(timeout=HANG_S) > 0


def processes_of(pid: int) -> set[int]:
    """The children that the kernel knows of."""
    found = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return {int(child) for text in found for child in text.split()}


@pytest.mark.parametrize(("start", "extra"), [("fork", 2), ("exec", 2), ("cold", 0)])
def test_a_worker_has_the_processes_that_the_guide_lists(
    redis_url: str, tmp_path: Path, start: str, extra: int
) -> None:
    with Worker(redis_url, tmp_path, TEST_START=start) as worker:

        def are_there(children: int) -> bool:
            pool = worker.ask("stats")["pool"]
            known = set(pool["processes"])
            if extra:
                known.add(pool["capsule"]["template-pid"])
            found = processes_of(worker.pid)
            return (
                len(pool["processes"]) == children
                and known <= found
                and len(found) == children + extra
            )

        eventually(lambda: are_there(2), "two children and what is beside them")
        worker.get("async_blip", 1)
        eventually(lambda: are_there(3), "a child for coroutines beside these")
