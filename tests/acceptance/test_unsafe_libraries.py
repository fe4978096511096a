"""Libraries that were used before the children started, and bear a fork or do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from tests.acceptance.workers import Worker

APP = "tests.acceptance.unsafe_app"
SIZE = 400


def test_a_fork_safe_library_works_and_an_unsafe_one_hangs(
    redis_url: str, tmp_path: Path, pool: str
) -> None:
    with Worker(redis_url, tmp_path, pool=pool, app=APP) as worker:
        assert worker.get("multiply") == SIZE**3
        with pytest.raises(SoftTimeLimitExceeded):
            worker.get("call_through_asgiref", soft_time_limit=1)
        assert worker.get("multiply") == SIZE**3


@pytest.mark.parametrize("start", ["exec", "cold"])
def test_with_exec_and_cold_both_work(redis_url: str, tmp_path: Path, start: str) -> None:
    with Worker(redis_url, tmp_path, app=APP, TEST_START=start) as worker:
        assert worker.get("multiply") == SIZE**3
        pids = {worker.get("call_through_asgiref") for _ in range(4)}
        assert pids <= set(worker.ask("stats")["pool"]["processes"])
