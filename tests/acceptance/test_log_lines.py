"""What the worker's log says of tasks that are stopped, lost, or run again: each line, and its level."""

from __future__ import annotations

import getpass
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from billiard.exceptions import Terminated
from celery import chord
from celery.exceptions import TaskRevokedError, TimeLimitExceeded, WorkerLostError

from capsule_tasks import Execution
from tests.acceptance.workers import HANG_S, Worker, eventually, unique

SELF = f"{getpass.getuser()}@{socket.gethostname()}, process {os.getpid()}"


@pytest.fixture(scope="module")
def worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(redis_url, tmp_path_factory.mktemp("worker")) as worker:
        yield worker


def lines_with(worker: Worker, *words: str) -> list[str]:
    return [line for line in worker.log.splitlines() if all(word in line for word in words)]


def line_with(worker: Worker, *words: str) -> str:
    """The only such line, which may yet have to be written."""
    eventually(lambda: lines_with(worker, *words), f"a line with {words}")
    (line,) = lines_with(worker, *words)
    return line


@pytest.mark.parametrize("name", ["hold", "async_hold"])
def test_a_cancel_says_who_asked(worker: Worker, name: str) -> None:
    key = unique()
    result = worker.send(name, key)
    worker.heard(key)
    assert Execution(result.id, app=worker.app).cancel() == "asked"
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
