"""Log lines of children appear in the same places and formats as under prefork."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import chain

from capsule_tasks.client import Execution
from capsule_tasks.protocol.messages import Output
from capsule_tasks.testing import PrivateServer
from tests.acceptance.workers import (
    HANG_S,
    ROOT,
    Worker,
    close,
    eventually,
    listening,
    unique,
)

APP = "tests.acceptance.logging_app"
ENDS = ("task-succeeded", "task-failed", "task-retried")
INFO, ERROR = (rf"\[[-\d :,]+: {level}/\S+\] " for level in ("INFO", "ERROR"))


def says(worker: Worker, line: str, log_file: Path | None = None) -> None:
    """Wait until the log has this line, by itself."""

    def has_line() -> bool:
        text = log_file.read_text() if log_file is not None else worker.log
        return any(re.fullmatch(line, found) for found in text.splitlines())

    eventually(has_line, f"{line!r} in:\n{worker.log[-5000:]}")


def fails(worker: Worker, word: str) -> str:
    """The id of a task that raises."""
    result = worker.send("fail", word)
    with contextlib.suppress(ValueError):
        result.get(timeout=HANG_S)
    return str(result.id)


def output_of(task_id: str, worker: Worker) -> str:
    events = Execution(task_id, app=worker.app).events()
    return "".join(m.data for event in events if isinstance(m := event.message, Output))


def succeeds(worker: Worker, word: str) -> tuple[str, int]:
    """The id and the process of a task whose success is reported everywhere."""
    with listening(worker) as events:
        then = chain(worker.sig("say", word), worker.sig("then", word), app=worker.app)()
        result = then.parent
        pid = result.get(timeout=HANG_S)
        assert worker.heard(word) == str(pid)
        assert worker.heard(f"returned:{result.id}") == "SUCCESS"
        types = [event["type"] for event in events.of(result.id, until=ENDS)]
        assert [kind for kind in types if kind in ENDS] == ["task-succeeded"]
        assert then.get(timeout=HANG_S) is None
    return result.id, pid


def lines_are_preforks(worker: Worker, log_file: Path | None = None) -> None:
    """One task that ends well and one that does not, as Celery's own formats have them."""
    word = unique()
    result = worker.send("say", word)
    pid = result.get(timeout=HANG_S)
    says(worker, rf"{INFO}say\[{result.id}\]: said {word}", log_file)
    says(worker, rf"{INFO}Task say\[{result.id}\] succeeded in [\d.e-]+s: {pid}", log_file)
    task_id = fails(worker, word)
    error = re.escape(f"ValueError('{word}', 7)")
    says(worker, rf"{ERROR}Task fail\[{task_id}\] raised unexpected: {error}", log_file)
    says(worker, rf"ValueError: \('{word}', 7\)", log_file)
    if not worker.is_prefork:
        heard = output_of(result.id, worker)
        assert (f"said {word}" in heard) == (log_file is None)
        assert "succeeded" not in heard
        assert output_of(task_id, worker) == ""


@contextlib.contextmanager
def detached(worker: Worker, log_file: Path, pid_file: Path) -> Iterator[None]:
    """Run what this worker would, in the background, until its end."""
    command = [sys.executable, "-m", "celery", "-A", APP, "worker", "-n", worker.name]
    command += ["-l", "INFO", "-Q", worker.queue, "-c", "1", "--detach"]
    command += [f"--logfile={log_file}", f"--pidfile={pid_file}"]
    subprocess.run(command, cwd=ROOT, env=worker.environment, check=True, timeout=HANG_S)
    try:
        # The pid file is there before anything is in it.
        pid = eventually(lambda: pid_file.exists() and pid_file.read_text().strip(), "its pid")
        try:
            yield
        finally:
            os.kill(int(pid), signal.SIGTERM)
            eventually(lambda: not pid_file.exists(), "the end of the worker")
    finally:
        close(worker.app)


def test_a_log_file_shows_how_tasks_ended(redis_url: str, tmp_path: Path, pool: str) -> None:
    path = tmp_path / "log"
    with Worker(redis_url, tmp_path, f"--logfile={path}", pool=pool, app=APP) as worker:
        lines_are_preforks(worker, path)


def test_a_detached_worker_has_its_lines_in_its_file(
    redis_url: str, tmp_path: Path, pool: str
) -> None:
    worker = Worker(redis_url, tmp_path, pool=pool, app=APP)  # it starts itself
    worker.log_file = path = tmp_path / "log"
    with detached(worker, path, tmp_path / "pid"):
        lines_are_preforks(worker, path)


def test_a_log_file_may_be_a_standard_descriptor(redis_url: str, tmp_path: Path, pool: str) -> None:
    with Worker(redis_url, tmp_path, "--logfile=/dev/stderr", pool=pool, app=APP) as worker:
        lines_are_preforks(worker)


@pytest.mark.parametrize("how", ["fork", "spawn", "cold"])
def test_lines_look_the_same_however_a_child_is_started(
    redis_url: str, tmp_path: Path, pool: str, how: str
) -> None:
    start = {"TEST_START": how}
    if how == "spawn":
        start = {"TEST_CONF": json.dumps({"worker_pool_start_method": how})}
    with Worker(redis_url, tmp_path, pool=pool, app=APP, **start) as worker:
        lines_are_preforks(worker)
        if how == "fork" and not worker.is_prefork:
            before = worker.ask("stats")["pool"]["processes"]
            assert worker.tell("pool_restart") == {"ok": "reload started"}
            eventually(lambda: worker.get("say", "again") not in before, "new children")
            lines_are_preforks(worker)


def test_a_worker_at_a_terminal_has_fresh_children_colour_their_log(
    redis_url: str, tmp_path: Path
) -> None:
    options = {"TEST_LOGGING": "terminal", "TEST_START": "cold"}
    with Worker(redis_url, tmp_path, app=APP, concurrency=1, **options) as worker:
        task_id = fails(worker, unique())
        says(worker, rf"\x1b\[1;31m{ERROR}Task fail\[{task_id}\] raised unexpected: .*")


@pytest.mark.parametrize("how", ["dictConfig", "after_setup"])
def test_a_formatter_that_relies_on_a_filter(
    redis_url: str, tmp_path: Path, pool: str, how: str
) -> None:
    word = unique()
    with Worker(redis_url, tmp_path, pool=pool, app=APP, TEST_LOGGING=how) as worker:
        task_id, pid = succeeds(worker, word)
        says(worker, rf"correlation-{pid}\|INFO\|said {word}")
        says(worker, rf"correlation-{pid}\|INFO\|Task say\[{task_id}\] succeeded in .*: {pid}")
        task_id = fails(worker, word)
        says(worker, rf"correlation-\d+\|ERROR\|Task fail\[{task_id}\] raised unexpected: .*")
        assert "Logging error" not in worker.log
        assert "INTERNAL ERROR" not in worker.log.upper()


def test_a_handler_that_fails_is_no_failure_of_the_task(tmp_path: Path, pool: str) -> None:
    """The others are served, those too that write through another or through `sys.stderr`.

    The server is the test's own, so that the worker has no dead workers of other tests to log
    about. Handlers that log through each other, as these do, can deadlock when two threads log.
    """
    word = unique()
    options = {"pool": pool, "app": APP, "TEST_LOGGING": "handlers"}
    with (
        PrivateServer(tmp_path / "redis") as server,
        Worker(server.url, tmp_path, **options) as worker,
    ):
        task_id, _ = succeeds(worker, word)
        ended = rf"Task say\[{task_id}\] succeeded in .*"
        says(worker, rf"memory\|{ended}")
        says(worker, rf"(\[.* WARNING/.*\] )?printing\|{ended}")  # prefork redirects it
        if not worker.is_prefork:
            assert "succeeded" not in output_of(task_id, worker)


def test_children_have_the_files_that_the_worker_opened(
    redis_url: str, tmp_path: Path, pool: str
) -> None:
    word = unique()
    options = {"TEST_LOGGING": "opened", "TEST_DIRECTORY": str(tmp_path)}
    soon_over = "--max-tasks-per-child=1"  # what a child has put into a queue by then is sent
    with Worker(redis_url, tmp_path, soon_over, pool=pool, app=APP, **options) as worker:
        worker.get("say", word)
        says(worker, "the worker is there", tmp_path / "queue")
        for name in ("audit", "stream", "queue"):
            says(worker, f"said {word}", tmp_path / name)
        if worker.is_prefork:
            return
        assert "do not have" not in worker.log
        worker.tell("pool_restart")
        names_what_is_missing(worker, tmp_path)


def names_what_is_missing(worker: Worker, directory: Path) -> None:
    """Once: what the import of the app opens again is not among it."""
    eventually(lambda: "do not have" in worker.log, "the warning")
    (warning,) = [line for line in worker.log.splitlines() if "do not have" in line]
    assert f"{directory}/queue (descriptor " in warning
    assert "pipe:[" in warning
    assert "audit" not in warning
    assert f"{directory}/stream" not in warning


def test_what_a_new_child_cannot_inherit_is_logged_once(redis_url: str, tmp_path: Path) -> None:
    options = {"TEST_LOGGING": "opened", "TEST_DIRECTORY": str(tmp_path), "TEST_START": "cold"}
    statedb = f"--statedb={tmp_path}/state"
    with Worker(redis_url, tmp_path, statedb, app=APP, **options) as worker:
        worker.tell("pool_grow", 1)
        eventually(lambda: len(worker.ask("stats")["pool"]["processes"]) == 3, "a third child")
        names_what_is_missing(worker, tmp_path)
        assert "state" not in worker.log.partition("do not have")[2].partition("\n")[0]
