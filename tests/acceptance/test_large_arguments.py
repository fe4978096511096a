"""Large messages pass through a worker's own process, and leave nothing in it."""

from __future__ import annotations

from pathlib import Path

from capsule_tasks.system.usage import resident_bytes
from tests.acceptance.workers import Worker, eventually

MIB = 1024 * 1024
SIZE = 15_000_000
TASKS = 6
MOST_GROWN = 80 * MIB
"""Messages of this size, kept one after the other, grow it by far more."""


def test_memory_that_large_arguments_took_is_given_back(redis_url: str, tmp_path: Path) -> None:
    with Worker(redis_url, tmp_path, concurrency=1, app="tests.acceptance.large_app") as worker:
        task = "tests.acceptance.large_app.size"
        assert worker.get(task, "x") == 1
        before = resident_bytes(worker.pid)
        for _ in range(TASKS):
            assert worker.get(task, "x" * SIZE) == SIZE
        eventually(
            lambda: resident_bytes(worker.pid) < before + MOST_GROWN,
            "the memory of the messages given back",
        )
