"""The task of a run: what it returns and raises, and what is kept of its execution."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from celery import Celery
from celery.exceptions import Ignore, Retry

from capsule_tasks import Capsule
from capsule_tasks.client.runs.messages import RUN_TASK
from capsule_tasks.client.runs.task import RunTask, _outcome
from capsule_tasks.durable import RunFailure
from capsule_tasks.errors import CodeNotRun, RunFailed
from capsule_tasks.protocol.events import RUN_CANCELLED, RUN_PARKED
from capsule_tasks.taskpool.reporting.reporter import is_coroutine_task


@pytest.fixture
def app() -> Celery:
    app = Celery("shop", set_as_current=False, broker="memory://", backend="cache+memory://")
    Capsule(app)
    return app


def test_the_task_is_a_coroutine_that_is_delivered_again_if_its_worker_dies(app: Celery) -> None:
    task = app.tasks[RUN_TASK]
    assert isinstance(task, RunTask)
    assert is_coroutine_task(task)
    assert (task.acks_late, task.reject_on_worker_lost) == (True, True)


def test_the_events_of_a_run_are_kept_as_long_as_the_run(app: Celery) -> None:
    app.conf.capsule_runs = {"ttl_s": 1_000_000.0, "ended_ttl_s": 5000.0}
    app.conf.capsule_retention = {"control_ttl_s": 2_000_000.0}
    assert app.tasks[RUN_TASK].capsule_retention == {
        "unfinished_ttl_s": 1_000_000.0,
        "control_ttl_s": 2_000_000.0,
        "retention_s": 5000.0,
        "silent_retention_s": 5000.0,
    }


def test_an_eager_run_says_that_it_needs_a_worker(app: Celery) -> None:
    result = app.signature(RUN_TASK, ("hello",), {"agent": "support"}).apply()
    with pytest.raises(CodeNotRun, match="and not eagerly"):
        result.get()


def outcome(status: str, result: bytes = b"", failure: RunFailure | None = None) -> Any:
    return _outcome("run-1", status, result, failure)


def test_a_completed_run_is_the_value_of_its_task() -> None:
    assert outcome("completed", b'{"euros": 9}') == {"euros": 9}


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [("interrupted", Retry, RUN_PARKED), ("cancelled", Ignore, RUN_CANCELLED)],
)
def test_a_parked_and_a_cancelled_run_end_their_attempt_as_the_worker_expects(
    status: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as raised:
        outcome(status)
    assert str(raised.value) == text


def test_a_failed_run_raises_why() -> None:
    with pytest.raises(RunFailed) as raised:
        outcome("failed", failure=RunFailure("tool", "ValueError", "no money"))
    error = raised.value
    assert (error.run_id, error.kind, error.type, error.message) == (
        "run-1",
        "tool",
        "ValueError",
        "no money",
    )
    assert msgspec.json.encode(error.args)
