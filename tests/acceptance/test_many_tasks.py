"""Thousands of tasks of twenty kinds, through canvas, on two workers: every result is right."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group

from tests.acceptance.workers import HANG_S, Worker

SCALE = float(os.environ.get("CAPSULE_TEST_SCALE", "0.1"))
ROUNDS = max(5, int(500 * SCALE))
"""Each is 21 tasks."""


def rss_kib(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                total += int(line.split()[1])
    return total


def one_round(worker: Worker, number: int) -> list[tuple[Any, Any]]:
    """What was sent, each with the value that it must have."""
    s, app = worker.sig, worker.app
    return [
        (chain(s("add", number, 1), s("add", 2), s("add", 3), app=app)(), number + 6),
        (
            group([s("add", number, n) for n in range(3)], app=app)(),
            [number, number + 1, number + 2],
        ),
        (chord([s("add", number, n) for n in range(3)], s("total"), app=app)(), 3 * number + 3),
        (chord([s("async_retry", 0), s("add", 1, 1)], s("total"), app=app)(), 2),
        (worker.send("retry", 1), 1),
        (worker.send("autoretry", 1), 1),
        (worker.send("async_autoretry", 1), 1),
        (worker.send("replace", number), number + 11),
        (worker.send("count", f"counted-{worker.queue}", number), number),
        (worker.send("conf"), "by the worker"),
    ]


@pytest.mark.soak
def test_every_result_is_right_and_memory_stays_flat(redis_url: str, tmp_path: Path) -> None:
    with (
        Worker(redis_url, tmp_path) as first,
        Worker(redis_url, tmp_path, queue=first.queue) as second,
    ):
        for number in range(5):
            for result, expected in one_round(first, number):
                assert result.get(timeout=HANG_S) == expected
        pids = [w.pid for w in (first, second)]
        for worker in (first, second):
            pids += worker.ask("stats")["pool"]["processes"]
        before = rss_kib(pids)
        for start in range(5, ROUNDS, 10):
            sent = [
                pair for number in range(start, start + 10) for pair in one_round(first, number)
            ]
            for result, expected in sent:
                assert result.get(timeout=HANG_S) == expected
        grown = rss_kib(pids) - before
        assert grown < 0.25 * before, f"{grown} KiB more than {before} KiB"
