"""A task that is stopped has one end: its last event, its stored state, and what it did agree."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError, TimeLimitExceeded, WorkerLostError

from capsule_tasks.errors import TaskNotCarried
from tests.acceptance.workers import HANG_S, Events, Worker, eventually, listening, unique

ENDS = {
    "task-succeeded": "SUCCESS",
    "task-failed": "FAILURE",
    "task-revoked": "REVOKED",
    "task-retried": "RETRY",
}


@pytest.fixture(scope="module")
def events(worker: Worker) -> Iterator[Events]:
    with listening(worker) as events:
        yield events


def skip_prefork(worker: Worker) -> None:
    """Prefork reports a revoke before it happens, and a hard limit twice."""
    if worker.is_prefork:
        pytest.skip("prefork tells more than one end of it")


def end_of(events: Events, result: Any) -> str:
    """The one end that was reported; it is also the stored end."""
    reported = [e["type"] for e in events.of(result.id, until=ENDS) if e["type"] in ENDS]
    assert len(reported) == 1, reported
    assert ENDS[reported[0]] == result.state
    return reported[0]


def all_acknowledged(worker: Worker, result: Any) -> bool:
    unacked = worker.app.backend.client.hvals("unacked")
    return not any(result.id.encode() in message for message in unacked)


def test_a_task_that_refuses_to_stop_has_succeeded(worker: Worker, events: Events) -> None:
    skip_prefork(worker)
    key = unique()
    result = worker.send("refuse", key)
    worker.heard(key)
    worker.tell("revoke", result.id, terminate=True, signal="SIGTERM")
    worker.heard(f"{key}:asked")
    assert result.state == "PENDING"
    worker.go(key)
    assert result.get(timeout=HANG_S) == "done"
    assert end_of(events, result) == "task-succeeded"


def test_a_message_that_cannot_be_sent_to_a_child_fails_and_is_acknowledged(worker: Worker) -> None:
    if worker.is_prefork:
        pytest.skip("prefork sends it")
    result = worker.sig("add", 1, 1).apply_async(headers={"large": 1 << 70})
    with pytest.raises(TaskNotCarried, match="is not delivered again"):
        result.get(timeout=HANG_S)
    eventually(lambda: all_acknowledged(worker, result), "its acknowledgement")


def test_the_signal_that_ended_a_task_is_reported(worker: Worker, events: Events) -> None:
    key = unique()
    result = worker.send("busy", key)
    worker.heard(key)
    worker.tell("revoke", result.id, terminate=True, signal="SIGTERM")
    (reported,) = [e for e in events.of(result.id, until=ENDS) if e["type"] == "task-revoked"]
    assert (reported["signum"], reported["terminated"], reported["expired"]) == (
        signal.SIGTERM,
        True,
        False,
    )


def test_a_stronger_signal_may_follow(worker: Worker, events: Events) -> None:
    key = unique()
    result = worker.send("refuse", key)
    worker.heard(key)
    worker.tell("revoke", result.id, terminate=True, signal="SIGTERM")
    worker.heard(f"{key}:asked")
    worker.tell("revoke", result.id, terminate=True, signal="SIGKILL")
    with pytest.raises(TaskRevokedError):
        result.get(timeout=HANG_S)
    assert end_of(events, result) == "task-revoked"


def test_a_task_that_refuses_a_signal_ends_at_its_hard_limit(
    worker: Worker, events: Events
) -> None:
    skip_prefork(worker)
    key = unique()
    # Or the limit may pass before the worker receives the revoke, which ends the task then.
    worker.listen()
    result = worker.send("refuse", key, time_limit=8)
    worker.heard(key)
    worker.tell("revoke", result.id, terminate=True, signal="SIGTERM")
    worker.heard(f"{key}:asked")
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=HANG_S)
    assert end_of(events, result) == "task-failed"


@pytest.mark.parametrize("fails", [False, True], ids=["success", "failure"])
@pytest.mark.parametrize("how", ["terminate", "killed", "time limit"])
def test_a_result_stored_before_its_child_died_is_the_end(
    worker: Worker, events: Events, fails: bool, how: str
) -> None:
    """The child has stored the result, and dies before the worker receives the end."""
    if how != "killed":
        skip_prefork(worker)
    limit = {"time_limit": 2} if how == "time limit" else {}
    result = worker.send("linger", fails, **limit)
    pid = int(worker.heard(f"stored:{result.id}"))
    assert result.state == ("FAILURE" if fails else "SUCCESS")
    if how == "terminate":
        worker.tell("revoke", result.id, terminate=True, signal="SIGKILL")
    elif how == "killed":
        os.kill(pid, signal.SIGKILL)
    assert end_of(events, result) == ("task-failed" if fails else "task-succeeded")
    eventually(lambda: all_acknowledged(worker, result), "the acknowledgement")


def test_a_revoked_message_that_has_failed_stays_failed(worker: Worker, events: Events) -> None:
    """The task is delivered a second time, after it failed and was revoked."""
    skip_prefork(worker)
    first = worker.send("fail", "first")
    with pytest.raises(ValueError, match="first"):
        first.get(timeout=HANG_S)
    worker.tell("revoke", first.id)
    again = worker.send("fail", "again", task_id=first.id)
    reported = events.of(again.id, until=["task-failed"])
    assert "task-revoked" not in [event["type"] for event in reported]
    assert worker.get("add", 1, 1) == 2
    assert again.state == "FAILURE"


def test_a_hard_limit_is_one_failure(worker: Worker, events: Events) -> None:
    skip_prefork(worker)
    key, on_error = unique(), unique()
    result = worker.send(
        "sleep", 60, time_limit=0.5, link_error=worker.sig("set_mark", on_error).set(immutable=True)
    )
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=HANG_S)
    assert end_of(events, result) == "task-failed"
    worker.heard(on_error)
    assert worker.get("set_mark", key) == "marked"
    worker.heard(key)
    assert worker.app.backend.client.llen(f"mark:{on_error}") == 0


def test_a_lost_child_is_one_failure(worker: Worker, events: Events) -> None:
    result = worker.send("die", "kill")
    with pytest.raises(WorkerLostError):
        result.get(timeout=HANG_S)
    assert end_of(events, result) == "task-failed"
