"""A thousand short tasks, of which some are stopped: none of the others is."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded

from tests.acceptance.workers import HANG_S, Worker, eventually, unique

EVERY = 20
"""One of so many is meant."""
TASKS = 50 * EVERY
MEANT = range(0, TASKS, EVERY)
KINDS = pytest.mark.parametrize("name", ["blip", "async_blip"], ids=["def", "async"])


def run_all(worker: Worker, results: dict[int, Any], meant: range) -> Counter[str]:
    """Check that tasks that were not targets have their own results; return the targets' ends."""
    for number, result in results.items():
        if number not in meant:
            assert result.get(timeout=HANG_S) == number
    for number in meant:
        eventually(results[number].ready, f"the end of {number}\n{worker.log[-3000:]}")
    assert worker.get("add", 1, 1) == 2
    return Counter(results[number].state for number in meant)


def terminate_each(worker: Worker, key: str) -> None:
    """Each that is meant, as soon as it has begun."""
    for _ in MEANT:
        begun = f"{key}-{worker.heard(key)}"
        worker.app.control.revoke(
            begun, terminate=True, signal="SIGTERM", destination=[worker.name]
        )


@KINDS
def test_terminate_hits_the_running_task_and_no_other(worker: Worker, name: str) -> None:
    """Each comes when its task runs or has just ended: then its child has another one."""
    if worker.is_prefork:
        pytest.skip("it hits whatever the child has moved on to, and knows no coroutines")
    chance, key, results = random.Random(1), unique(), {}
    with ThreadPoolExecutor(1) as other:
        stopping = other.submit(terminate_each, worker, key)
        for number in range(TASKS):
            more = (chance.choice([0.0, 0.003, 0.3]), key) if number in MEANT else ()
            results[number] = worker.send(name, number, *more, task_id=f"{key}-{number}")
        stopping.result()
    ends = run_all(worker, results, MEANT)
    assert set(ends) <= {"REVOKED", "SUCCESS"}
    assert ends["REVOKED"] >= len(MEANT) // 5, f"it hit hardly any: {ends}"


@KINDS
@pytest.mark.parametrize("limit", ["soft_time_limit", "time_limit"])
def test_a_time_limit_hits_only_the_task_that_exceeds_it(
    worker: Worker, name: str, limit: str
) -> None:
    """Every task has a limit; that of some ends when they do, and that of others long before."""
    if worker.is_prefork and name == "async_blip":
        pytest.skip("prefork knows no coroutines")
    error = SoftTimeLimitExceeded if limit == "soft_time_limit" else TimeLimitExceeded
    late = range(0, TASKS, 4 * EVERY)
    # Prefork looks up a task when its limit comes, and then hits its process.
    near = range(0) if worker.is_prefork else range(EVERY, TASKS, 4 * EVERY)
    results = {}
    for number in range(TASKS):
        seconds = 30 if number in late else 0.1 if number in near else 0
        allowed_s = 0.2 if number in late else 0.1 if number in near else 20
        results[number] = worker.send(name, number, seconds, **{limit: allowed_s})
    for number in near:
        eventually(results[number].ready)
        if results[number].state == "FAILURE":
            assert isinstance(results.pop(number).result, error)
    run_all(worker, results, late)
    for number in late:
        assert isinstance(results[number].result, error)
