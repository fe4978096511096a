"""Thousands of tasks of twenty kinds, through canvas, on two workers: every result is right."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group

from tests.acceptance.workers import HANG_S, Worker, unique

SCALE = float(os.environ.get("CAPSULE_TEST_SCALE", "0.1"))
TASKS_IN_A_ROUND = 40
"""Tasks of 20 kinds; one that is retried, replaced or rejected counts once."""
ROUNDS = max(10, int(10_000 * SCALE) // TASKS_IN_A_ROUND)
AT_ONCE = 5
WARM_UP = 5
MOST_GROWN_KIB = 16 * 1024
"""Each process apart, of which the children have 66 MiB: what is loaded when it is first needed."""
IN_CODE = "by the worker"


def rss_kib(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                total += int(line.split()[1])
    return total


@dataclass(frozen=True)
class Fails:
    """The error that a task is expected to end with."""

    words: str


def one_round(worker: Worker, number: int) -> list[tuple[Any, Any]]:
    """Send the tasks; return each with its expected result."""
    s, app, key = worker.sig, worker.app, unique()
    request = s("request").set(task_id=key)
    return [
        # Chains.
        (chain(s("add", number, 1), s("add", 2), s("add", 3), app=app)(), number + 6),
        (chain(s("async_retry", 1), s("add", 1), s("replace"), app=app)(), 13),
        (chain(s("nap", 0).set(immutable=True), s("conf", immutable=True), app=app)(), IN_CODE),
        (chain(s("async_say", key), s("set_mark", key, immutable=True), app=app)(), "marked"),
        (chain(s("reject", f"{key}-r"), s("add", "!"), app=app)(), "done!"),
        # Groups.
        (group([s("add", number, n) for n in range(3)], app=app)(), [number + n for n in range(3)]),
        (group([s("retry", 1), s("autoretry", 1)], app=app)(), [1, 1]),
        (
            group([s("conf"), s("stamps"), s("set_mark", f"{key}-t")], app=app)(),
            [IN_CODE, {}, "marked"],
        ),
        # Chords, one whose header fails.
        (chord([s("add", number, n) for n in range(3)], s("total"), app=app)(), 3 * number + 3),
        (chord([s("async_retry", 0), s("async_autoretry", 1)], s("total"), app=app)(), 1),
        (
            chord([s("count", f"c-{worker.queue}", number), s("retry", 1)], s("total"), app=app)(),
            number + 1,
        ),
        (chord([s("add", 1, 1), s("fail", key)], s("total"), app=app)(), Fails(key)),
        # Failures of each sort, and tasks that send tasks.
        (worker.send("fail_own"), Fails("code 3")),
        (worker.send("fail_chained"), Fails("worse")),
        (worker.send("fail_local"), Fails("lock")),
        (worker.send("async_fail"), Fails("code 4")),
        (worker.send("async_parent", 0), ...),
        (request.apply_async(), ...),
        (worker.send("signalled"), ...),
    ]


def check(worker: Worker, sent: list[tuple[Any, Any]]) -> None:
    for result, expected in sent:
        if isinstance(expected, Fails):
            with pytest.raises(Exception, match=re.escape(expected.words)):
                result.get(timeout=HANG_S)
        elif expected is ...:
            assert result.get(timeout=HANG_S)
        else:
            assert result.get(timeout=HANG_S) == expected


@pytest.mark.soak
def test_every_result_is_right_and_memory_stays_flat(redis_url: str, tmp_path: Path) -> None:
    with (
        Worker(redis_url, tmp_path) as first,
        Worker(redis_url, tmp_path, queue=first.queue) as second,
    ):
        for number in range(WARM_UP):
            check(first, one_round(first, number))
        pids = [w.pid for w in (first, second)]
        for worker in (first, second):
            pids += worker.ask("stats")["pool"]["processes"]
        before, began = {pid: rss_kib([pid]) for pid in pids}, time.monotonic()
        for start in range(WARM_UP, ROUNDS, AT_ONCE):
            numbers = range(start, min(start + AT_ONCE, ROUNDS))
            check(first, [pair for number in numbers for pair in one_round(first, number)])
        seconds = time.monotonic() - began
        grown = {pid: rss_kib([pid]) - before[pid] for pid in pids}
        assert max(grown.values()) < MOST_GROWN_KIB, f"{grown} KiB more than {before} KiB"
        kinds = {name: n for w in (first, second) for name, n in w.ask("stats")["total"].items()}
        assert len(kinds) >= 20, kinds
        print(  # noqa: T201 - for a person who runs it with -s
            f"{ROUNDS * TASKS_IN_A_ROUND} tasks of {len(kinds)} kinds, {seconds:.1f} s for all but "
            f"the first {WARM_UP * TASKS_IN_A_ROUND}; grown by {sorted(grown.values())} KiB"
        )


def test_tasks_that_fail_leave_nothing_in_their_child(redis_url: str, tmp_path: Path) -> None:
    """Each leaves a cycle of its traceback, 90 KiB of it, for the collector."""
    with Worker(redis_url, tmp_path, concurrency=1) as worker:

        def fail(times: int) -> None:
            for result in [worker.send("fail", "x") for _ in range(times)]:
                with pytest.raises(ValueError, match="x"):
                    result.get(timeout=HANG_S)

        fail(50)
        pid = worker.get("signalled")
        before = rss_kib([pid])
        fail(400)
        assert worker.get("signalled") == pid
        assert rss_kib([pid]) - before < 12_000
