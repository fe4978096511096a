"""Time limits, terminate, lost children: each hits the task that is meant, and no other."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from billiard.exceptions import Terminated
from celery.exceptions import TaskRevokedError, TimeLimitExceeded, WorkerLostError

from tests.acceptance.workers import HANG_S, Worker, eventually, is_running, unique


def test_a_soft_limit_is_raised_in_the_task(worker: Worker) -> None:
    key = unique()
    assert worker.get("tidy", key, soft_time_limit=0.5) == "tidied"
    worker.heard(f"{key}:finally")


def test_a_hard_limit_ends_the_task_and_what_it_started(worker: Worker) -> None:
    if worker.is_prefork:
        pytest.skip("prefork leaves what the task started")
    key = unique()
    result = worker.send("stubborn", key, soft_time_limit=0.5, time_limit=1.5)
    pids = [int(pid) for pid in worker.heard(key).split()]
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=HANG_S)
    for pid in pids:
        eventually(lambda pid=pid: not is_running(pid), f"the end of {pid}")
    assert worker.get("add", 1, 1) == 2


def test_limits_set_by_remote_control_hold(worker: Worker) -> None:
    if worker.is_prefork:
        pytest.skip("prefork answers ok and does nothing")
    worker.tell("time_limit", "tidy", soft=0.5, hard=30)
    try:
        assert worker.get("tidy", unique()) == "tidied"
    finally:
        worker.tell("time_limit", "tidy", soft=None, hard=None)


def test_a_revoked_task_does_not_run(worker: Worker) -> None:
    holds = [unique() for _ in range(2)]
    for key in holds:
        worker.send("hold", key)
        worker.heard(key)
    result = worker.send("add", 1, 1)
    worker.tell("revoke", result.id)
    for key in holds:
        worker.go(key)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=HANG_S)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGQUIT", "SIGHUP", "SIGKILL"])
def test_terminate_ends_the_task_that_is_meant(worker: Worker, name: str) -> None:
    key, other = unique(), unique()
    result = worker.send("tidy", key)
    neighbour = worker.send("hold", other)
    worker.heard(key)
    worker.heard(other)
    worker.tell("revoke", result.id, terminate=True, signal=name)
    with pytest.raises((TaskRevokedError, Terminated)):
        result.get(timeout=HANG_S)
    if name != "SIGKILL":
        worker.heard(f"{key}:finally")
    worker.go(other)
    assert neighbour.get(timeout=HANG_S) > 0
    assert result.state == "REVOKED"
    assert worker.get("add", 1, 1) == 2


def test_terminate_with_the_signal_of_the_soft_limit_is_one(worker: Worker) -> None:
    key = unique()
    result = worker.send("tidy", key)
    worker.heard(key)
    # Celery's command stores REVOKED for a task that it has not heard to be accepted yet.
    eventually(lambda: result.id in str(worker.ask("active")), "the start")
    worker.tell("revoke", result.id, terminate=True, signal="SIGUSR1")
    worker.heard(f"{key}:finally")
    if not worker.is_prefork:  # it stores REVOKED meanwhile, before or after what the task returns
        assert result.get(timeout=HANG_S) == "tidied"
    assert worker.get("add", 1, 1) == 2


def test_terminate_with_sigint_is_ignored_as_children_ignore_it(worker: Worker) -> None:
    key = unique()
    result = worker.send("hold", key)
    pid = int(worker.heard(key))
    worker.tell("revoke", result.id, terminate=True, signal="SIGINT")
    worker.go(key)
    # Prefork reports the revocation before that.
    eventually(lambda: worker.app.AsyncResult(result.id).result == pid, "its end")
    assert worker.get("add", 1, 1) == 2


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("kill", r"signal 9 \(SIGKILL\)"),
        ("segfault", r"signal 11 \(SIGSEGV\)"),
        ("exit", "exitcode 3"),
    ],
)
def test_a_lost_child_is_reported_for_its_task_alone(worker: Worker, how: str, why: str) -> None:
    key = unique()
    neighbour = worker.send("hold", key)
    worker.heard(key)
    with pytest.raises(WorkerLostError, match=why):
        worker.get("die", how)
    worker.go(key)
    assert neighbour.get(timeout=HANG_S) > 0
    assert worker.get("add", 1, 1) == 2


@pytest.mark.parametrize(
    ("name", "why"),
    [("SIGHUP", r"signal 1 \("), ("SIGTERM", r"signal 15 \("), ("SIGQUIT", "exitcode 131")],
)
def test_a_task_that_signals_its_process_may_tidy_up_and_the_signal_is_reported(
    worker: Worker, name: str, why: str
) -> None:
    key = unique()
    result = worker.send("signal_itself", name, key)
    worker.heard(key)
    if worker.is_prefork:  # it may take that for the terminate of the task before
        with pytest.raises((WorkerLostError, TaskRevokedError)):
            result.get(timeout=HANG_S)
        return
    with pytest.raises(WorkerLostError, match=why):
        result.get(timeout=HANG_S)
    assert worker.get("add", 1, 1) == 2


@pytest.mark.parametrize("name", ["run_out_of_memory", "async_run_out_of_memory"])
def test_a_task_that_runs_out_of_memory_fails_alone_and_is_acknowledged(
    worker: Worker, name: str
) -> None:
    """Under prefork the error is raised again in the worker's own process, which it ends."""
    if worker.is_prefork:
        pytest.skip("it would end the worker")
    key = unique()
    neighbour = worker.send("async_hold", key, soft_time_limit=2)
    worker.heard(key)
    result = worker.send(name)
    with pytest.raises(MemoryError, match="too much"):
        result.get(timeout=HANG_S)
    assert result.state == "FAILURE"
    client = worker.app.backend.client
    eventually(
        lambda: not any(result.id.encode() in held for held in client.hvals("unacked")),
        "the acknowledgement",
    )
    assert neighbour.get(timeout=HANG_S) == "tidied"
    assert worker.get("add", 1, 1) == 2


def test_a_task_that_ends_its_process_at_once_is_not_delivered_again(worker: Worker) -> None:
    """The message is acknowledged early, although the child had no time to report the start."""
    results = [worker.send("die", "exit") for _ in range(3)]
    for result in results:
        with pytest.raises(WorkerLostError):
            result.get(timeout=HANG_S)
    ids = [result.id.encode() for result in results]
    client = worker.app.backend.client
    eventually(
        lambda: not any(id_ in held for held in client.hvals("unacked") for id_ in ids),
        "the acknowledgements",
    )


def test_a_late_acknowledged_task_whose_child_was_killed_runs_again(worker: Worker) -> None:
    key = unique()
    result = worker.send("hold_late", key)
    first = int(worker.heard(key))
    os.kill(first, signal.SIGKILL)
    second = int(worker.heard(key))
    assert second != first
    worker.go(key)
    assert result.get(timeout=HANG_S) == second


def test_a_message_that_kills_each_child_is_given_up(redis_url: str, tmp_path: Path) -> None:
    """Under prefork it would be delivered for ever."""
    with Worker(redis_url, tmp_path) as worker:
        key = unique()
        result = worker.send("kill_each", key)
        with pytest.raises(Exception, match=r"5 child processes died while they ran it, .*SIGKILL"):
            result.get(timeout=HANG_S)
        assert worker.app.backend.client.llen(f"mark:{key}") == 5
        assert worker.get("add", 1, 1) == 2
