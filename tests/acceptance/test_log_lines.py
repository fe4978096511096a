"""Log lines of a worker about tasks that are stopped, lost, or run again."""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from billiard.exceptions import Terminated
from celery import chord
from celery.exceptions import TaskRevokedError, TimeLimitExceeded, WorkerLostError

from capsule_tasks import Execution
from tests.acceptance.workers import HANG_S, Worker, eventually, unique

LOST = "billiard.exceptions.WorkerLostError"
SELF = f"{getpass.getuser()}@{socket.gethostname()}, process {os.getpid()}"


@pytest.fixture(scope="module")
def worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    directory = tmp_path_factory.mktemp("worker")
    with Worker(redis_url, directory, app="tests.acceptance.log_app") as worker:
        yield worker


@pytest.fixture(scope="module")
def other(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A second worker, with a queue of its own, so that a test decides which worker runs a task."""
    with Worker(redis_url, tmp_path_factory.mktemp("other"), concurrency=1) as other:
        yield other


def lines_with(worker: Worker, *words: str) -> list[str]:
    return [line for line in worker.log.splitlines() if all(word in line for word in words)]


def line_with(worker: Worker, *words: str) -> str:
    """The only such line, which may yet have to be written."""
    eventually(lambda: lines_with(worker, *words), f"a line with {words}")
    (line,) = lines_with(worker, *words)
    return line


def warnings_of(worker: Worker, before: int) -> list[str]:
    return [line for line in worker.log[before:].splitlines() if "WARNING" in line]


def traceback_of(log: str) -> list[str]:
    """The lines between the quotes in which Celery logs it, if they are all there."""
    parts = log.split('"""\n')
    return parts[1].splitlines() if len(parts) == 3 else []


def without_stream(worker: Worker, task_id: str, before: int, level: str = "INFO") -> None:
    """Wait for this log line about the task; there is no warning unless that is the level."""
    owned = f"another attempt owns the stream of task {task_id}:"
    ended_before = f"task {task_id} was delivered again after its end: no stream"
    found = re.compile(rf"{level}/MainProcess\] ({owned}|{ended_before})")
    eventually(lambda: found.search(worker.log[before:]), f"a line of {task_id}")
    assert len(warnings_of(worker, before)) == (level == "WARNING")


def ended(worker: Worker, name: str, task_id: str, before: int, times: int) -> None:
    """Wait until this task has succeeded so often."""
    said = f"Task {name}[{task_id}] succeeded"
    eventually(lambda: worker.log[before:].count(said) == times, f"{times} ends of {name}")


@pytest.mark.parametrize("name", ["hold", "async_hold"])
def test_the_log_line_of_a_cancel_names_the_requester(worker: Worker, name: str) -> None:
    key = unique()
    result = worker.send(name, key)
    worker.heard(key)
    Execution(result.id, app=worker.app).cancel()
    line = line_with(worker, f"Cancelling {name}[{result.id}]")
    assert "INFO/MainProcess" in line
    assert line.endswith(f"asked by '{SELF}' (Execution.cancel)")
    with pytest.raises((TaskRevokedError, Terminated)):
        result.get(timeout=HANG_S)
    assert not lines_with(worker, "WARNING", result.id)


@pytest.mark.parametrize("name", ["tidy", "async_hold"])
def test_a_terminate_is_reported_as_a_remote_command(worker: Worker, name: str) -> None:
    key = unique()
    result = worker.send(name, key)
    worker.heard(key)
    worker.tell("revoke", result.id, terminate=True)
    line = line_with(worker, f"Cancelling {name}[{result.id}]")
    assert "INFO/MainProcess" in line
    assert line.endswith("asked by a remote control command (revoke)")
    with pytest.raises((TaskRevokedError, Terminated)):
        result.get(timeout=HANG_S)
    assert not lines_with(worker, "WARNING", result.id)


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_lost_child_is_a_warning_that_names_its_task_and_one_traceback(
    worker: Worker, how: str
) -> None:
    before = len(worker.log)
    result = worker.send("die", how)
    with pytest.raises(WorkerLostError) as lost:
        result.get(timeout=HANG_S)
    line = line_with(worker, f"lost its child, which ran die[{result.id}]: the child ")
    assert "WARNING/MainProcess" in line
    lines = eventually(lambda: traceback_of(worker.log[before:]), "the traceback")
    assert lines == ["Traceback (most recent call last):", f"{LOST}: {lost.value}"]


@pytest.mark.parametrize("name", ["sleep", "stubborn"])
def test_a_child_that_is_ended_at_a_limit_is_no_warning(worker: Worker, name: str) -> None:
    before = len(worker.log)
    key = unique()
    result = worker.send(name, *([key] if name == "stubborn" else [60]), time_limit=0.5)
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=HANG_S)
    eventually(lambda: result.id in worker.log[before:].partition("Hard time")[2], "its failure")
    assert not warnings_of(worker, before)


def test_a_child_that_is_terminated_or_too_many_is_no_warning(worker: Worker) -> None:
    before = len(worker.log)
    key = unique()
    result = worker.send("tidy", key)
    worker.heard(key)
    worker.tell("revoke", result.id, terminate=True, signal="SIGTERM")
    line = line_with(worker, f"ended its child as asked, which ran tidy[{result.id}]: the child")
    assert "INFO/MainProcess" in line
    worker.tell("pool_grow", 1)
    worker.tell("pool_shrink", 1)
    assert worker.get("add", 1, 1) == 2
    assert not warnings_of(worker, before)


@pytest.mark.parametrize("signum", [signal.SIGSEGV, signal.SIGKILL])
def test_a_child_that_crashes_although_it_was_asked_to_leave_is_a_warning(
    worker: Worker, signum: signal.Signals
) -> None:
    """SIGKILL is what the kernel sends to a process that has no memory left."""
    key = unique()
    result = worker.send("crash_when_terminated", key, int(signum))
    worker.heard(key)
    worker.tell("revoke", result.id, terminate=True, signal="SIGTERM")
    line = line_with(worker, f"lost its child, which ran crash_when_terminated[{result.id}]")
    assert "WARNING/MainProcess" in line
    assert signum.name in line


def test_an_errback_called_twice_under_one_id_is_no_warning(worker: Worker) -> None:
    before = len(worker.log)
    key = unique()
    errback = worker.sig("hold", key, immutable=True)
    result = errback.freeze()
    for _ in range(2):  # both run at once: the second takes the stream over from the first
        worker.sig("fail", "x").apply_async(link_error=errback)
    for _ in range(2):
        worker.heard(key)
    for _ in range(2):
        worker.go(key)
    ended(worker, "hold", result.id, before, 2)
    without_stream(worker, result.id, before)
    before = len(worker.log)
    worker.sig("fail", "x").apply_async(link_error=errback)  # and a third time, after the end
    worker.heard(key)
    worker.go(key)
    ended(worker, "hold", result.id, before, 1)
    without_stream(worker, result.id, before)


def test_a_frozen_chord_applied_again_is_no_warning(worker: Worker) -> None:
    before = len(worker.log)
    key = unique()
    canvas = chord([worker.sig("hold", key), worker.sig("hold", key)], worker.sig("total"))
    body = canvas.freeze()
    for times in (1, 2):
        canvas.apply_async()
        # Celery drops a part of the second time that ends before this call has: the parts wait.
        for _ in range(2):
            worker.go(key)
        ended(worker, "total", body.id, before, times)
        for part in body.parent.results:  # the last one also puts the chord's keys away
            ended(worker, "hold", part.id, before, times)
    for result in (body, *body.parent.results):
        without_stream(worker, result.id, before)


def is_claimed_by(worker: Worker, task_id: str) -> bool:
    return Execution(task_id, app=worker.app).snapshot().worker == worker.name


def message_without_a_worker(worker: Worker, name: str, key: str) -> tuple[str, dict[str, Any]]:
    """The id of a task, and its message, which no worker has."""
    queue = unique("q")
    task_id = worker.app.send_task(name, args=(key,), queue=queue).id
    return task_id, json.loads(worker.app.backend.client.rpop(queue))


def deliver(worker: Worker, message: dict[str, Any], *, again: bool = False) -> None:
    """Put a message into the queue of a worker; `again` as Kombu restores what was delivered."""
    about = message["properties"]["delivery_info"]
    about["routing_key"] = worker.queue
    if again:
        about["redelivered"] = message["headers"]["redelivered"] = True
    worker.app.backend.client.lpush(worker.queue, json.dumps(message))


def test_one_id_on_two_workers_at_once_is_no_warning(worker: Worker, other: Worker) -> None:
    """Two messages of one frozen signature: the second takes the stream over from the first."""
    before, others = len(worker.log), len(other.log)
    key = unique()
    signature = worker.sig("hold", key)
    result = signature.freeze()
    for each in (worker, other):
        signature.apply_async(queue=each.queue)
        each.heard(key)
        eventually(lambda one=each: is_claimed_by(one, result.id), "the claim")
    for _ in range(2):
        worker.go(key)
    for each, since in ((worker, before), (other, others)):
        ended(each, "hold", result.id, since, 1)
    without_stream(worker, result.id, before)
    assert not warnings_of(other, others)


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_one_message_that_runs_twice_at_once_is_a_warning(
    worker: Worker, other: Worker, is_elsewhere: bool
) -> None:
    """The message is delivered again while its first delivery still runs."""
    before = len(worker.log)
    key = unique()
    task_id, message = message_without_a_worker(worker, "hold", key)
    deliver(worker, message)
    worker.heard(key)
    eventually(lambda: is_claimed_by(worker, task_id), "the claim")
    deliver(other if is_elsewhere else worker, message, again=True)
    worker.heard(key)
    for _ in range(2):
        worker.go(key)
    ended(worker, "hold", task_id, before, 1 if is_elsewhere else 2)
    without_stream(worker, task_id, before, "WARNING")
