"""Workers of two versions share a queue of runs: each takes those that it can read."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from capsule_tasks import Capsule
from capsule_tasks.errors import RunFailed
from tests.acceptance.workers import HANG_S, Worker, close, eventually, producer, unique

APP = "tests.acceptance.others.words_app"
RUNS = 12


@pytest.fixture
def capsule(valkey_url: str) -> Iterator[Capsule]:
    app = producer(valkey_url, unique("q"), capsule_prefix=unique("prefix"))
    yield Capsule(app)
    close(app)


def worker_of(capsule: Capsule, folder: Path, version: int, **env: str) -> Worker:
    app = capsule.app
    return Worker(
        app.conf.broker_url,
        folder,
        queue=app.conf.task_default_queue,
        app=APP,
        TEST_VERSION=str(version),
        TEST_PREFIX=app.conf.capsule_prefix,
        **env,
    )


def all_parked(capsule: Capsule, run_ids: list[str]) -> None:
    """Wait until each run waits for an approval."""
    for run_id in run_ids:
        state = capsule.runs.get(run_id).state
        eventually(lambda one=state: one().status == "interrupted", f"{run_id} waits")


def decide_all(capsule: Capsule) -> None:
    for call in capsule.runs.pending():
        capsule.runs.get(call.run_id).approve(call.call_id, by="ann")


DONE = ["work", "approved by ann", "work", "approved by ann", "work"]
WORDS = ["work", "ask", "work", "ask", "work"]


def test_no_run_fails_while_workers_of_two_versions_take_turns(
    capsule: Capsule, tmp_path: Path
) -> None:
    run_ids = [f"run-{number}" for number in range(RUNS)]
    with worker_of(capsule, tmp_path, 1), worker_of(capsule, tmp_path, 2):
        for run_id in run_ids:
            capsule.runs.start("words", WORDS, run_id=run_id)
        for _ in range(2):
            all_parked(capsule, run_ids)
            decide_all(capsule)
        for run_id in run_ids:
            assert capsule.runs.get(run_id).result(timeout_s=HANG_S) == DONE
            assert capsule.runs.get(run_id).execution.get(timeout=HANG_S) == DONE


@pytest.mark.full
def test_a_run_that_only_newer_workers_read_waits_for_one(capsule: Capsule, tmp_path: Path) -> None:
    run_ids = [f"run-{number}" for number in range(RUNS)]
    with worker_of(capsule, tmp_path, 2) as new:
        for run_id in run_ids:
            capsule.runs.start("words", WORDS, run_id=run_id)
        all_parked(capsule, run_ids)
        assert new.stop() == 0, new.log
    with worker_of(capsule, tmp_path, 1) as old:
        began = time.monotonic()
        decide_all(capsule)
        unread = re.compile(r"run (run-\d+) goes to another worker: .*words/2.*words/1")

        def refused() -> Counter[str]:
            return Counter(unread.findall(old.log))

        eventually(lambda: all(refused()[run_id] >= 2 for run_id in run_ids), "two refusals each")
        # Between two deliveries of one message there is a pause of at least a second.
        most = 1 + (time.monotonic() - began)
        assert max(refused().values()) <= most, refused()
        assert {capsule.runs.get(run_id).state().status for run_id in run_ids} == {"queued"}
        with worker_of(capsule, tmp_path, 2):
            all_parked(capsule, run_ids)
            decide_all(capsule)
            for run_id in run_ids:
                assert capsule.runs.get(run_id).execution.get(timeout=HANG_S) == DONE


def test_a_run_that_crashes_each_child_fails_and_the_worker_goes_on(
    capsule: Capsule, tmp_path: Path
) -> None:
    with worker_of(capsule, tmp_path, 1, TEST_LOSS_LIMIT="2") as worker:
        crashing = capsule.runs.start("words", ["work", "crash"])
        with pytest.raises(RunFailed) as failed:
            crashing.execution.get(timeout=HANG_S)
        assert (failed.value.kind, failed.value.type) == ("lost", "TooManyLosses")
        assert crashing.state().status == "failed"
        assert "2 processes were lost, one after the other, in turn 2" in worker.log
        other = capsule.runs.start("words", ["work"])
        assert other.execution.get(timeout=HANG_S) == ["work"]
