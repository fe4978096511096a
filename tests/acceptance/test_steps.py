"""Steps of tasks on a real worker: kill -9 of the process, and the task is delivered again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from capsule_tasks.errors import EffectUncertain
from tests.acceptance.conftest import BOTH
from tests.acceptance.workers import HANG_S, Worker, unique

APP = "tests.acceptance.steps_app"


@pytest.fixture(scope="module", params=BOTH)
def worker(
    request: pytest.FixtureRequest, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    directory = tmp_path_factory.mktemp("worker")
    with Worker(redis_url, directory, pool=request.param, app=APP) as worker:
        yield worker


def effects(worker: Worker, key: str) -> int:
    return int(worker.app.backend.client.get(f"effects:{key}") or 0)


@pytest.fixture(params=["pay", "async_pay"])
def name(request: pytest.FixtureRequest, worker: Worker) -> str:
    if worker.is_prefork and request.param == "async_pay":
        pytest.skip("prefork cannot run coroutines")
    return str(request.param)


@pytest.mark.parametrize("moment", ["before", "behind"])
def test_a_step_is_made_once_though_its_task_is_delivered_twice(
    worker: Worker, name: str, moment: str
) -> None:
    key = unique()
    assert worker.send(name, key, moment).get(timeout=HANG_S) == 1
    assert effects(worker, key) == 1
    assert worker.app.backend.client.exists(f"lost:{key}:{moment}"), "nothing was killed"


def test_a_step_that_was_killed_midway_is_not_made_again(worker: Worker, name: str) -> None:
    key = unique()
    with pytest.raises(EffectUncertain, match="its process was lost"):
        worker.send(name, key, "within").get(timeout=HANG_S)
    assert effects(worker, key) == 1


def test_a_step_that_may_be_repeated_is(worker: Worker, name: str) -> None:
    key = unique()
    result = worker.app.send_task(
        name, args=(key, "within"), kwargs={"retry": True}, queue=worker.queue
    )
    assert result.get(timeout=HANG_S) == 2
    assert effects(worker, key) == 2
