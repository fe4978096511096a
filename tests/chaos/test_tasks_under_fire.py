# ruff: noqa: T201 - the figures are for a person who runs it with -s
"""Thousands of tasks through canvas, while all that can die dies: none is lost, all are right."""

from __future__ import annotations

import os
import random
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult, GroupResult

from tests.acceptance.test_many_tasks import (
    MOST_GROWN_KIB,
    SCALE,
    TASKS_IN_A_ROUND,
    Fails,
    check,
    one_round,
    rss_kib,
)
from tests.acceptance.workers import close, eventually, producer
from tests.chaos.fleet import Fleet, all_acknowledged

SEED = os.environ.get("CAPSULE_CHAOS_SEED", "20261118")
ROUNDS = max(14, int(10_000 * SCALE) // TASKS_IN_A_ROUND)
AT_ONCE = 3
"""Rounds between two faults."""
MOST_WAITING = 40
ANSWER_S = 5
"""To read what is stored, when nothing runs any more."""

pytestmark = pytest.mark.chaos


class Caller:
    """What sends tasks, as the helpers of the acceptance tests know it: a worker has one too."""

    def __init__(self, url: str, queue: str) -> None:
        self.app = producer(url, queue)
        self.app.conf.task_publish_retry_policy = {"max_retries": 60, "interval_max": 0.5}
        self.queue = queue

    def sig(self, name: str, *args: Any, **options: Any) -> Any:
        return self.app.signature(name, args=args, queue=self.queue, **options)

    def send(self, name: str, *args: Any, **options: Any) -> Any:
        return self.sig(name, *args).apply_async(**options)


def forget(result: Any) -> Any:
    """Stand in for telling Celery that nothing waits for the result any more."""
    return result


def outcome(app: Any, result: Any) -> Any:
    """Ask again for its state: its sender may have lost the connection since."""
    if isinstance(result, GroupResult):
        return [outcome(app, child) for child in result.results]
    return AsyncResult(result.id, app=app).get(timeout=ANSWER_S)


def is_noted_late(app: Any, result: Any, logs: str) -> bool:
    """Whether it has succeeded, and RETRY was stored over that: Celery's own doing.

    A child sends the retry and then notes RETRY; if it is held up in between, the retry may have
    come to its end before.
    """
    if isinstance(result, GroupResult):
        return any(is_noted_late(app, child, logs) for child in result.results)
    state = AsyncResult(result.id, app=app).state
    return state == "RETRY" and f"[{result.id}] succeeded in" in logs


def is_claimed_by_the_dead(app: Any, result: Any, logs: str) -> bool:
    """Whether all parts of a chord have ended and its body was never sent: a limit of Celery.

    The worker that returns the last part claims the sending for some seconds. If it is killed
    just then, and the part is delivered again before the claim has lapsed, no worker sends.
    """
    parts = getattr(result.parent, "results", None)
    if parts is None or result.id in logs:
        return False
    return all(AsyncResult(part.id, app=app).ready() for part in parts)


def judge(app: Any, sent: list[tuple[Any, Any]], logs: str, fleet: Fleet) -> list[str]:
    """Every task whose end is missing or wrong; what Celery does itself is excused, up to a few."""
    wrong, stuck, late = [], [], []
    for result, expected in sent:
        try:
            got = outcome(app, result)
        except CeleryTimeoutError as error:
            if is_noted_late(app, result, logs):
                late.append(f"{result!r}: RETRY over its success")
            elif is_claimed_by_the_dead(app, result, logs):
                stuck.append(f"{result!r}: its chord is stuck")
            else:
                wrong.append(f"{result!r}: {error!r} instead of {expected!r}")
        except Exception as error:  # noqa: BLE001 - whatever a task can end with
            if not (
                isinstance(expected, Fails) and re.search(re.escape(expected.words), str(error))
            ):
                wrong.append(f"{result!r}: {error!r} instead of {expected!r}")
        else:
            if isinstance(expected, Fails) or (expected is not ... and got != expected):
                wrong.append(f"{result!r}: {got!r} instead of {expected!r}")
    print(f"chords that died with the sender of their body: {stuck}; noted late: {late}")
    for excused, most in ((stuck, fleet.kills // 2), (late, fleet.holds)):
        wrong += excused if len(excused) > most else []
    return wrong


def test_all_that_was_sent_comes_to_its_right_end(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    began = time.monotonic()
    sent: list[tuple[Any, Any]] = []
    with Fleet(tmp_path, rng, TEST_ALL_LATE="1") as fleet:
        caller: Any = Caller(fleet.url, fleet.queue)
        for number in range(3):
            check(caller, one_round(caller, number))
        before = rss_kib(fleet.processes())
        memory: defaultdict[int, list[int]] = defaultdict(list)
        for start in range(0, ROUNDS, AT_ONCE):
            for number in range(start, min(start + AT_ONCE, ROUNDS)):
                sent += one_round(caller, number)
            fault = fleet.storm()
            print(f"{time.monotonic() - began:.1f} s, {fleet.waiting()} waiting: {fault.__name__}")
            fault()
            eventually(lambda: fleet.waiting() < MOST_WAITING, f"progress\n{fleet.logs()}")
            for worker in fleet.workers:
                memory[worker.pid].append(rss_kib([worker.pid]))
        stormed = time.monotonic()
        print(f"{stormed - began:.1f} s, the last fault")
        asker = producer(fleet.url, fleet.queue)
        all_acknowledged(fleet)
        wrong = judge(asker, sent, fleet.logs(), fleet)
        assert not wrong, f"CAPSULE_CHAOS_SEED={SEED}\n" + "\n".join(wrong) + fleet.logs()
        after = rss_kib(fleet.processes())
        eldest = max(memory.values(), key=len)
        for app in (asker, caller.app):
            app.backend.remove_pending_result = forget  # the server leaves before the results do
            close(app)
        fleet.leave()
        print(
            f"{ROUNDS * TASKS_IN_A_ROUND} tasks, {sum(fleet.done.values())} faults, "
            f"{time.monotonic() - began:.1f} s; memory {before} KiB, {after} KiB at the end; "
            f"of the worker that lived longest {eldest} KiB"
        )
        assert eldest[-1] - eldest[0] < MOST_GROWN_KIB, eldest
        assert after < 1.5 * before, f"{after} KiB after {before} KiB"
