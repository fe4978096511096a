"""Time limits of a task, of a worker, and of a call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from celery.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded

from tests.acceptance.workers import HANG_S, Worker, unique

LONG_S = 30.0
SOFT, HARD = 0.5, 1.0


def test_limits_of_a_task_hold_for_its_calls(worker: Worker) -> None:
    assert worker.get("sleep_within", 0) == 0
    with pytest.raises(SoftTimeLimitExceeded):
        worker.get("sleep_within", LONG_S)
    with pytest.raises(TimeLimitExceeded):
        worker.get("deaf_within", LONG_S)
    if not worker.is_prefork:
        with pytest.raises(SoftTimeLimitExceeded):
            worker.get("async_sleep_within", LONG_S)


def test_a_call_may_have_other_limits_than_its_task(worker: Worker) -> None:
    assert worker.get("sleep_within", 0.6, soft_time_limit=20) == 0.6
    with pytest.raises(TimeLimitExceeded):
        worker.get("sleep", LONG_S, time_limit=0.3)


@pytest.mark.parametrize("name", ["sleep", "nap"], ids=["blocking", "coroutine"])
@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ({"soft": 0.4, "hard": 30}, SoftTimeLimitExceeded),
        ({"soft": None, "hard": 0.4}, TimeLimitExceeded),
    ],
    ids=["soft", "hard"],
)
def test_limits_set_by_remote_control_end_the_next_call(
    worker: Worker, name: str, limits: dict[str, float], error: type[Exception]
) -> None:
    if worker.is_prefork:
        pytest.skip("prefork answers ok and does nothing")
    answer = worker.tell("time_limit", name, **limits)
    try:
        assert "ok" in answer
        with pytest.raises(error):
            worker.get(name, LONG_S)
    finally:
        worker.tell("time_limit", name, soft=None, hard=None)
    worker.get(name, 0.6)  # the limits are gone again


def test_a_task_that_is_stopped_has_a_moment_to_tidy_up(
    redis_url: str, tmp_path: Path, pool: str
) -> None:
    shutdown = unique()
    with Worker(redis_url, tmp_path, pool=pool, TEST_MARK_SHUTDOWNS=shutdown) as worker:
        limited, terminated = unique(), unique()
        worker.send("tidy", limited, time_limit=1)
        worker.heard(limited)
        worker.heard(f"{limited}:finally")
        worker.heard(shutdown)
        result = worker.send("tidy", terminated)
        worker.heard(terminated)
        worker.tell("revoke", result.id, terminate=True)
        worker.heard(f"{terminated}:finally")
        worker.heard(shutdown)


@pytest.mark.parametrize("how", ["interpreter", "process"])
def test_a_task_that_cannot_report_its_start_has_its_limit(worker: Worker, how: str) -> None:
    for number in range(4):  # its child is warm: it has begun before another thread has a turn
        worker.get("add", number, 1)
    with pytest.raises(TimeLimitExceeded):
        worker.get("grip", how, time_limit=1)
    assert worker.get("add", 1, 1) == 2


@pytest.mark.parametrize("is_option", [True, False], ids=["options", "settings"])
def test_limits_of_a_worker_hold_for_tasks_that_have_none(
    redis_url: str, tmp_path: Path, pool: str, is_option: bool
) -> None:
    options = (f"--soft-time-limit={SOFT}", f"--time-limit={HARD}") if is_option else ()
    conf = {} if is_option else {"task_soft_time_limit": SOFT, "task_time_limit": HARD}
    with Worker(redis_url, tmp_path, *options, pool=pool, TEST_CONF=json.dumps(conf)) as worker:
        soft, hard = worker.send("sleep", LONG_S), worker.send("deaf", LONG_S)
        with pytest.raises(SoftTimeLimitExceeded):
            soft.get(timeout=HANG_S)
        with pytest.raises(TimeLimitExceeded):
            hard.get(timeout=HANG_S)
        # A call's own go before.
        assert worker.get("sleep", 0.7, soft_time_limit=20, time_limit=30) == 0.7
        if pool == "capsule":
            with pytest.raises(SoftTimeLimitExceeded):
                worker.get("async_blip", 1, LONG_S)
        assert worker.ask("stats")["pool"]["timeouts"] == [SOFT, HARD]
