"""What is logged in children is where prefork has it, and looks as it does there."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from capsule_tasks.client import Execution
from capsule_tasks.protocol.messages import Output
from tests.acceptance.workers import HANG_S, Worker, eventually, unique

APP = "tests.acceptance.logging_app"
LOG_LINE = re.compile(r"\[[-\d :,]+: (\w+)/\S+\] (.*)")


def says(worker: Worker, line: str, log_file: Path | None = None) -> None:
    """Wait until the log has this line, by itself."""

    def has_line() -> bool:
        text = log_file.read_text() if log_file is not None else worker.log
        return any(re.fullmatch(line, found) for found in text.splitlines())

    eventually(has_line, f"{line!r} in:\n{worker.log[-5000:]}")


def fails(worker: Worker, word: str) -> str:
    """The id of a task that raises."""
    result = worker.send("fail", word)
    with contextlib.suppress(RuntimeError):
        result.get(timeout=HANG_S)
    return str(result.id)


@pytest.mark.parametrize("how", ["dictConfig", "after_setup"])
def test_a_formatter_that_relies_on_a_filter(
    redis_url: str, tmp_path: Path, pool: str, how: str
) -> None:
    word = unique()
    with Worker(redis_url, tmp_path, pool=pool, app=APP, TEST_LOGGING=how) as worker:
        result = worker.send("say", word, link=worker.sig("then", word))
        pid = result.get(timeout=HANG_S)
        assert worker.heard(word) == str(pid)
        says(worker, rf"correlation-{pid}\|INFO\|said {word}")
        says(worker, rf"correlation-{pid}\|INFO\|Task say\[{result.id}\] succeeded in .*: {pid}")
        task_id = fails(worker, word)
        says(worker, rf"correlation-\d+\|ERROR\|Task fail\[{task_id}\] raised unexpected: .*")
        assert "Logging error" not in worker.log
        assert "INTERNAL ERROR" not in worker.log.upper()
