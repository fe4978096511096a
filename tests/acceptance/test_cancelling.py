"""Many executions cancelled in one call: those that wait, are held for later, run, or are over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from capsule_tasks import Capsule
from capsule_tasks.client import Execution
from capsule_tasks.errors import InvalidId
from tests.acceptance.workers import HANG_S, Worker, ended, eventually, unique


@pytest.fixture(scope="module")
def worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(redis_url, tmp_path_factory.mktemp("worker")) as worker:
        yield worker


def test_a_thousand_waiting_tasks_are_cancelled_with_one_wait(
    redis_url: str, tmp_path: Path
) -> None:
    """Each alone would wait a quarter of a second for a worker that may just have begun it."""
    late = Worker(redis_url, tmp_path)
    ids = [late.send("hold", unique()).id for _ in range(1000)]
    began = time.monotonic()
    assert Capsule(late.app).cancel(ids) == dict.fromkeys(ids, "pending")
    assert time.monotonic() - began < HANG_S
    with late:
        ends = [Execution(one, app=late.app) for one in (ids[0], ids[500], ids[-1])]
        assert [list(one.events())[-1].message.outcome for one in ends] == ["cancelled"] * 3


async def test_each_id_has_its_own_answer(worker: Worker) -> None:
    key = unique()
    over, running = worker.send("add", 1, 1), worker.send("busy", key)
    ended(over)
    worker.heard(key)
    eventually(lambda: Execution.of(running).snapshot().state == "running", "its claim")
    held = worker.send("hold", unique(), countdown=1)
    ids = [over.id, running.id, held.id, "nobody-knows"]
    answers = await Capsule(worker.app).acancel([*ids, over.id])
    assert answers == dict(zip(ids, ["over", "requested", "pending", "pending"], strict=True))
    for stopped in (running, held):
        assert list(Execution.of(stopped).events())[-1].message.outcome == "cancelled"


def test_one_id_needs_no_list(worker: Worker) -> None:
    done = worker.send("add", 1, 1)
    ended(done)
    assert Capsule(worker.app).cancel(done.id) == {done.id: "over"}
    assert Capsule(worker.app).cancel([]) == {}


def test_nothing_is_cancelled_if_one_id_is_invalid(worker: Worker) -> None:
    key = unique()
    held = worker.send("hold", key)
    worker.heard(key)
    with pytest.raises(InvalidId):
        Capsule(worker.app).cancel([held.id, "x" * 600])
    with pytest.raises(TypeError, match="7"):
        Capsule(worker.app).cancel([held.id, 7])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="grace_s"):
        Capsule(worker.app).cancel([held.id], -1)
    with pytest.raises(TypeError, match="grace_s = '3': must be a number of seconds"):
        Capsule(worker.app).cancel([held.id], "3")  # type: ignore[arg-type]
    worker.go(key)
    assert list(Execution.of(held).events())[-1].message.outcome == "succeeded"
