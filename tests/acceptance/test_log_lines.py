"""What the worker's log says of tasks that are stopped, lost, or run again."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Iterator

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


def without_stream(worker: Worker, task_id: str, before: int) -> None:
    """Wait until the log says so of this task; there is no warning among it."""
    found = re.compile(rf"INFO/MainProcess\] task {task_id}\b.* stored")
    eventually(lambda: found.search(worker.log[before:]), f"a line of {task_id}")
    assert not warnings_of(worker, before)


def ended(worker: Worker, name: str, task_id: str, before: int, times: int) -> None:
    """Wait until this task has succeeded so often."""
    said = f"Task {name}[{task_id}] succeeded"
    eventually(lambda: worker.log[before:].count(said) == times, f"{times} ends of {name}")


@pytest.mark.parametrize("name", ["hold", "async_hold"])
def test_a_cancel_says_who_asked(worker: Worker, name: str) -> None:
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
def test_a_terminate_says_that_it_came_by_remote_control(worker: Worker, name: str) -> None:
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
    told = eventually(lambda: traceback_of(worker.log[before:]), "the traceback")
    assert told == ["Traceback (most recent call last):", f"{LOST}: {lost.value}"]


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


def test_a_child_that_crashes_although_it_was_asked_to_leave_is_a_warning(worker: Worker) -> None:
    key = unique()
    result = worker.send("crash_when_told", key)
    worker.heard(key)
    worker.tell("revoke", result.id, terminate=True, signal="SIGTERM")
    line = line_with(worker, f"lost its child, which ran crash_when_told[{result.id}]")
    assert "WARNING/MainProcess" in line
    assert "SIGSEGV" in line


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
