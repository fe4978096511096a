"""Remote commands of our own: is this worker able to work, and where is that task."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.workers import HANG_S, ROOT, Worker, eventually, unique


@pytest.fixture(scope="module")
def worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(redis_url, tmp_path_factory.mktemp("worker")) as worker:
        yield worker


def ask(worker: Worker, command: str, **arguments: Any) -> Any:
    """The reply of this worker to a command without a method in Celery's `inspect`."""
    inspect = worker.app.control.inspect([worker.name], timeout=10, limit=1)
    return eventually(lambda: inspect._request(command, **arguments), "an answer")[worker.name]


def celery(worker: Worker, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Celery's own command line."""
    return subprocess.run(
        [sys.executable, "-m", "celery", "-A", "tests.acceptance.app", *arguments],
        cwd=ROOT,
        env=worker.environment,
        timeout=HANG_S,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_healthy_worker_reports_it_and_shows_its_sessions(worker: Worker) -> None:
    def whole() -> Any:
        said = ask(worker, "capsule_health")
        return said if len(said["sessions"]) == 2 else None

    said = eventually(whole, "both sessions")
    assert said["healthy"] is True
    assert said["reasons"] == []
    assert {session["kind"] for session in said["sessions"]} == {"blocking"}
    assert ask(worker, "stats")["pool"]["capsule"]["healthy"] is True


@pytest.mark.parametrize(
    ("task", "file"),
    [("hold", "app.py"), ("async_hold", "tasks/coroutines.py")],
    ids=["def", "async"],
)
def test_the_stack_of_a_running_task_is_shown(worker: Worker, task: str, file: str) -> None:
    key, other = unique(), unique()
    result = worker.send(task, key)
    worker.send("hold", other)
    for mark in (key, other):
        worker.heard(mark)
    stack = ask(worker, "capsule_stack", task_id=result.id)["ok"]
    assert f"in {task}" in stack
    assert f"tests/acceptance/{file}" in stack
    assert key not in stack  # values are never shown
    for mark in (key, other):
        worker.go(mark)
    worker.tell("revoke", result.id, terminate=True, signal="SIGTERM")


def test_a_task_that_does_not_run_has_no_stack(worker: Worker) -> None:
    assert "'nowhere'" in ask(worker, "capsule_stack", task_id="nowhere")["error"]


def test_the_commands_work_on_celerys_command_line(worker: Worker) -> None:
    node = ["-d", worker.name, "-t", "10"]
    done = celery(worker, "capsule", "health", *node)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"{worker.name}: healthy, \d sessions\n", done.stdout)
    done = celery(worker, "inspect", "-j", *node, "capsule_health")
    assert json.loads(done.stdout)[worker.name]["healthy"] is True
    key = unique()
    result = worker.send("hold", key)
    worker.heard(key)
    done = celery(worker, "capsule", "stack", *node, result.id)
    worker.go(key)
    assert done.returncode == 0, done.stderr
    assert "in hold" in done.stdout
    done = celery(worker, "capsule", "stack", *node, "nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no worker has started nowhere" in done.stderr
    done = celery(worker, "capsule", "health", "-d", "nobody@nowhere", "-t", "0.1")
    assert (done.returncode, done.stderr.strip()) == (69, "Error: no worker replied")


def test_children_that_end_before_their_first_task_are_replaced_ever_more_slowly(
    redis_url: str, tmp_path: Path
) -> None:
    """Else the worker would do nothing but fork."""
    trap = tmp_path / "trap"
    trap.touch()
    with Worker(redis_url, tmp_path, TEST_TRAP=str(trap)) as worker:
        said = eventually(
            lambda: not (health := ask(worker, "capsule_health"))["healthy"] and health,
            "the complaint",
        )
        assert "children end before their first task" in said["reasons"][0]
        trap.unlink()
        # The last of those that were trapped may still take one along.
        eventually(
            lambda: worker.send("add", 1, 1).get(timeout=HANG_S, propagate=False) == 2,
            "a child that stays",
        )
        eventually(lambda: ask(worker, "capsule_health")["healthy"], "the recovery")
        begun = worker.log.count(" begins")
        assert begun < 30, "a child lives for a twentieth of a second"


def test_a_worker_whose_children_never_become_ready_reports_it(
    redis_url: str, tmp_path: Path
) -> None:
    """Waiting tasks run once children start; the worker tries again, less and less often."""
    gate = tmp_path / "gate"
    gate.touch()
    with Worker(redis_url, tmp_path, TEST_GATE=str(gate), TEST_READY_S="0.5") as worker:
        result = worker.send("add", 1, 1)
        said = eventually(
            lambda: not (health := ask(worker, "capsule_health"))["healthy"] and health,
            "the breaker",
        )
        assert said["breaker-open"] is True
        assert "was not ready within 0.5 s" in said["reasons"][0]
        assert "in tell_process_init" in said["reasons"][0]  # where it hangs
        assert "was not ready within 0.5 s" in worker.log
        assert ask(worker, "stats")["pool"]["capsule"]["healthy"] is False
        done = celery(worker, "capsule", "health", "-d", worker.name, "-t", "10")
        assert done.returncode == 1
        assert "was not ready" in done.stdout
        gate.unlink()
        assert result.get(timeout=HANG_S) == 2
        eventually(lambda: ask(worker, "capsule_health")["healthy"], "the recovery")
