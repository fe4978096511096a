"""`reap`: the end of what a dead worker held."""

from __future__ import annotations

import pytest

from capsule_tasks.storage.scripts import Code
from tests.lua.executions.bench import Bench


@pytest.mark.parametrize("loud", [0, 1])
def test_the_reaper_writes_the_ends_of_a_dead_workers_executions(bench: Bench, loud: int) -> None:
    attempt = bench.claim()[1]
    bench.append(attempt, 2, "A", loud=loud)
    reaped = bench.reap("w1", attempt, "lost")
    assert int(reaped[1]) > int(attempt)
    assert bench.said() == ["BEGUN", "A", "REAPED"]
    assert bench.meta()["outcome"] == "lost"
    assert bench.append(attempt, 3, "LATE") == [Code.STALE, reaped[1], b"c1"]
    assert bench.reap("w1", attempt, "lost") == [Code.ENDED, b"lost"]
    assert bench.said() == ["BEGUN", "A", "REAPED"]


def test_the_reaper_leaves_executions_of_another_worker_alone(bench: Bench) -> None:
    first = bench.claim()[1]
    second = bench.claim("c2", "w2")[1]
    before = bench.meta()
    assert bench.reap("w1", first, "lost") == [Code.STALE, second]
    assert bench.meta() == before


def test_a_redelivered_execution_waits_after_the_reaper(bench: Bench) -> None:
    attempt = bench.claim()[1]
    bench.reap("w1", attempt, "")
    assert bench.meta()["state"] == "waiting"
    assert bench.claim("c2", "w2")[0] == Code.DONE
