"""Without what only Linux has: the same tasks, stopped in the same ways, nothing left behind."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery.exceptions import TaskRevokedError, TimeLimitExceeded, WorkerLostError

from tests.acceptance.workers import HANG_S, Worker, eventually, is_running, unique

PORTABLE = {"CAPSULE_PORTABLE": "1"}


@pytest.fixture(scope="module")
def worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(redis_url, tmp_path_factory.mktemp("worker"), **PORTABLE) as worker:
        yield worker


def descriptors(pid: int) -> Iterator[str]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            yield str(link.readlink())


def test_nothing_of_linux_is_used(worker: Worker) -> None:
    pid = worker.get("signalled")
    pool = worker.ask("stats")["pool"]
    assert pid in pool["processes"]
    assert pool["capsule"]["template-pid"] is None  # children start cold
    assert not [kind for kind in descriptors(worker.pid) if "pidfd" in kind]


def test_tasks_of_both_kinds_run(worker: Worker) -> None:
    assert worker.get("add", 1, 1) == 2
    assert worker.get("conf") == "by the worker"
    assert worker.get("nap", 0)[0]
    assert worker.get("start_things") == [9, 4, 5]
    word = unique()
    worker.get("speak", word)
    eventually(lambda: f"logged {word}" in worker.log and f"printed {word}" in worker.log)


def test_limits_terminate_and_lost_children(worker: Worker) -> None:
    assert worker.get("tidy", unique(), soft_time_limit=0.5) == "tidied"
    key = unique()
    result = worker.send("stubborn", key, soft_time_limit=0.5, time_limit=1.5)
    pids = [int(pid) for pid in worker.heard(key).split()]
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=HANG_S)
    for pid in pids:
        eventually(lambda pid=pid: not is_running(pid), f"the end of {pid}")
    for name, arguments in (("hold", [unique()]), ("async_hold", [unique()])):
        result = worker.send(name, *arguments)
        worker.heard(arguments[0])
        worker.tell("revoke", result.id, terminate=True, signal="SIGTERM")
        with pytest.raises(TaskRevokedError):
            result.get(timeout=HANG_S)
    with pytest.raises(WorkerLostError, match="SIGKILL"):
        worker.get("die", "kill")
    assert worker.get("add", 1, 1) == 2


def test_children_end_with_their_worker(redis_url: str, tmp_path: Path) -> None:
    """Children read the end of their control socket, whether the worker exited or was killed."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with Worker(redis_url, tmp_path, **PORTABLE) as worker:
            children = [int(worker.get("signalled"))]
            children += worker.ask("stats")["pool"]["processes"]
            worker.stop(signum)
            for pid in children:
                eventually(lambda pid=pid: not is_running(pid), f"the end of {pid}")
