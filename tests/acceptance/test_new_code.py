"""A pool that is restarted runs the code that is on the disk by then, and loses nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.acceptance.workers import HANG_S, Worker, eventually, unique

HEAD = """
    from tests.acceptance.app import app, mark, os
    __all__ = ["app"]
"""


class Code:
    """A module of tasks that somebody edits while a worker runs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name = unique("tasks").replace("-", "_")
        self._path = directory / f"{self.name}.py"
        self._saved_at = time.time()

    def save(self, source: str, head: str = HEAD) -> None:
        self._path.write_text(dedent(head) + dedent(source))
        self._saved_at += 2  # Python knows a source by its seconds and its size
        os.utime(self._path, (self._saved_at, self._saved_at))

    def worker(self, url: str, directory: Path, *options: str, **environment: str) -> Worker:
        return Worker(
            url, directory, *options, app=self.name, PYTHONPATH=str(self.directory), **environment
        )


@pytest.fixture
def code(tmp_path: Path) -> Code:
    code = Code(tmp_path)
    code.save(answering("old"))
    return code


def answering(word: str) -> str:
    return f"""
    @app.task(name="answer")
    def answer():
        return "{word}"

    @app.task(name="answer_slowly", acks_late=True)
    def answer_slowly(key):
        mark(key, os.getpid())
        app.backend.client.blpop(f"go:{{key}}", 30)
        return "{word}"

    @app.task(name="await_answer")
    async def await_answer():
        return "{word}"
"""


def restart(worker: Worker, **options: Any) -> None:
    assert worker.tell("pool_restart", **options) == {"ok": "reload started"}


def answers(worker: Worker, word: str, name: str = "answer") -> None:
    eventually(lambda: worker.get(name) == word, f"{word} of {name}")


@pytest.mark.parametrize(
    "start",
    [
        "fork",
        pytest.param("exec", marks=pytest.mark.full),
        pytest.param("cold", marks=pytest.mark.full),
    ],
)
def test_reloading_runs_the_new_code_and_running_tasks_end_well(
    redis_url: str, tmp_path: Path, code: Code, start: str
) -> None:
    with code.worker(redis_url, tmp_path, TEST_START=start) as worker:
        assert worker.get("answer") == worker.get("await_answer") == "old"
        keys = [unique() for _ in range(2)]
        running = [worker.send("answer_slowly", key) for key in keys]
        for key in keys:
            worker.heard(key)
        waiting = [worker.send("answer") for _ in range(6)]
        code.save(answering("new"))
        restart(worker, reload=True)
        # The first new child takes what waits when an old one has left.
        for key in keys:
            worker.go(key)
        assert [one.get(timeout=HANG_S) for one in running] == ["old", "old"]
        assert {one.get(timeout=HANG_S) for one in waiting} <= {"old", "new"}
        answers(worker, "new")
        answers(worker, "new", "await_answer")
        assert worker.app.backend.client.llen(worker.queue) == 0
        assert worker.stop() == 0


def test_modules_that_the_worker_did_not_know_are_imported(
    redis_url: str, tmp_path: Path, code: Code
) -> None:
    other = Code(tmp_path)
    head = f"from {code.name} import app\n"
    other.save('@app.task(name="other")\ndef other():\n    return "first"\n', head)
    with code.worker(redis_url, tmp_path) as worker:
        restart(worker, modules=[other.name])
        answers(worker, "first", "other")
        other.save('@app.task(name="other")\ndef other():\n    return "second"\n', head)
        restart(worker, modules=[other.name], reload=True)
        answers(worker, "second", "other")
        assert worker.get("answer") == "old"


def test_a_task_that_has_left_the_code_is_an_error_of_its_callers_alone(
    redis_url: str, tmp_path: Path, code: Code
) -> None:
    with code.worker(redis_url, tmp_path) as worker:
        code.save('@app.task(name="another")\ndef another():\n    return "here"\n')
        restart(worker, modules=[code.name], reload=True)
        answers(worker, "here", "another")
        with pytest.raises(Exception, match="answer"):
            worker.get("answer")
        assert worker.get("another") == "here"


@pytest.mark.parametrize("reload", [False, True], ids=["restart", "reload"])
def test_broken_code_leaves_the_pool_as_it_was(
    redis_url: str, tmp_path: Path, code: Code, reload: bool
) -> None:
    with code.worker(redis_url, tmp_path) as worker:
        assert worker.get("answer") == "old"

        def processes() -> set[int]:
            return set(worker.ask("stats")["pool"]["processes"])

        pids = eventually(lambda: len(found := processes()) == 2 and found, "both children")
        code.save("this is no Python\n")
        reply = worker.tell("pool_restart", modules=[code.name], reload=reload)
        if reload:
            assert "invalid syntax" in reply["error"]
        else:
            eventually(lambda: "the pool was not restarted" in worker.log, "the news")
            assert "this is no Python" in worker.log
        assert worker.get("answer") == "old"
        assert processes() == pids
        code.save(answering("mended"))
        restart(worker)
        answers(worker, "mended")


def test_restarts_that_overlap_are_done_one_after_the_other(
    redis_url: str, tmp_path: Path, code: Code
) -> None:
    with code.worker(redis_url, tmp_path) as worker:
        results = []
        for number in range(4):
            code.save(answering(f"edit {number}"))
            restart(worker)
            results += [worker.send("answer") for _ in range(5)]
        assert all(one.get(timeout=HANG_S) for one in results)
        answers(worker, "edit 3")
        eventually(lambda: len(worker.ask("stats")["pool"]["processes"]) == 2, "two children")
        assert worker.ask("stats")["pool"]["capsule"]["healthy"] is True
