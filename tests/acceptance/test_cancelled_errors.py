"""A CancelledError without a cancel is a failure of its task, of asyncio's own type."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from celery import Celery

from capsule_tasks import Capsule
from capsule_tasks.client import Execution
from capsule_tasks.testing.eager import eager
from tests.acceptance.workers import HANG_S, Worker


@pytest.fixture(scope="module")
def worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    app = "tests.acceptance.cancelled_app"
    with Worker(redis_url, tmp_path_factory.mktemp("worker"), app=app) as worker:
        yield worker


@pytest.mark.parametrize("name", ["cancel_itself", "await_cancelled", "fail_cancelled"])
def test_a_cancelled_error_arrives_as_asyncios(worker: Worker, name: str) -> None:
    result = worker.send(name)
    with pytest.raises(asyncio.CancelledError):
        result.get(timeout=HANG_S)
    assert result.state == "FAILURE"
    stored = worker.app.backend.get_task_meta(result.id)["result"]
    assert type(stored) is asyncio.CancelledError
    ended = list(Execution.of(result).events())[-1].message
    assert (ended.outcome, ended.type) == ("failed", "CancelledError")
    assert worker.get("add", 1, 1) == 2


def test_a_cancelled_error_keeps_its_arguments(worker: Worker) -> None:
    error = worker.send("cancel_itself").get(timeout=HANG_S, propagate=False)
    assert error.args == ("by itself",)


def test_the_traceback_shows_where_it_was_raised(worker: Worker) -> None:
    result = worker.send("cancel_itself")
    result.get(timeout=HANG_S, propagate=False)
    assert "in cancel_itself" in result.traceback
    assert result.traceback.endswith("asyncio.exceptions.CancelledError: by itself\n")


def test_a_task_retries_for_it_and_its_handlers_see_it(worker: Worker) -> None:
    retrying = worker.send("retry_cancelled")
    assert retrying.get(timeout=3 * HANG_S) == 1
    watched = worker.send("watch_cancelled")
    assert worker.heard(f"failed:{watched.id}") == "True"


def test_eager_tasks_fail_with_it_too() -> None:
    app = Celery("eager", set_as_current=False)
    Capsule(app)

    @app.task(shared=False, name="cancelled")
    async def cancelled() -> None:
        raise asyncio.CancelledError("here")

    with eager(app):
        result = cancelled.delay()
        assert result.state == "FAILURE"
        with pytest.raises(asyncio.CancelledError, match="here"):
            result.get()
