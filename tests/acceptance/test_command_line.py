"""`celery capsule …` against a real worker, as a person and as a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import group

from capsule_tasks.client import Execution
from tests.acceptance.workers import HANG_S, ROOT, Worker, eventually, unique
from tests.terminals import CTRL_C, Terminal


@pytest.fixture(scope="module")
def worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(redis_url, tmp_path_factory.mktemp("worker")) as worker:
        yield worker


def command(redis_url: str, *words: str) -> dict[str, Any]:
    arguments = [sys.executable, "-m", "celery", "-A", "tests.acceptance.app", "capsule", *words]
    env = {**os.environ, "REDIS_URL": redis_url}
    return {"args": arguments, "cwd": ROOT, "env": env, "text": True}


def run(redis_url: str, *words: str, status: int = 0) -> str:
    options = command(redis_url, *words)
    done = subprocess.run(**options, capture_output=True, timeout=HANG_S, check=False)
    assert done.returncode == status, done
    return str(done.stdout) + ("" if status == 0 else str(done.stderr))


def test_tail_shows_output_as_it_is_and_the_rest_beside_it(worker: Worker, redis_url: str) -> None:
    key = unique()
    result = worker.send("steps", key, 2)
    worker.go(key)
    assert run(redis_url, "tail", result.id) == "step 0\nstep 1\n"
    lines = [json.loads(line) for line in run(redis_url, "tail", result.id, "--json").splitlines()]
    assert lines[0]["t"] == "begun"
    assert lines[-1]["t"] == "ended"
    assert lines[-1]["outcome"] == "succeeded"
    rest = run(redis_url, "tail", result.id, "--json", "--after", lines[-2]["event"])
    assert [json.loads(line)["event"] for line in rest.splitlines()] == [lines[-1]["event"]]


def test_a_failed_task_is_a_failed_command(worker: Worker, redis_url: str) -> None:
    result = worker.send("fail", "because")
    assert "because" in run(redis_url, "tail", result.id, status=1)


def test_a_question_is_answered_from_the_command_line(worker: Worker, redis_url: str) -> None:
    result = worker.send("ask", "name? ")
    options = command(redis_url, "tail", result.id)
    with subprocess.Popen(**options, stderr=subprocess.PIPE) as watcher:
        assert watcher.stderr is not None
        asked = next(line for line in watcher.stderr if "asks:" in line)
        assert "name?" in asked
        run(redis_url, "respond", result.id, "Ada")
        assert watcher.wait(HANG_S) == 0
    assert result.get(timeout=HANG_S) == "heard Ada"
    assert "does not ask" in run(redis_url, "respond", result.id, "late", status=1)


def test_cancel_stack_and_ps(worker: Worker, redis_url: str) -> None:
    key = unique()
    result = worker.send("busy", key)
    worker.heard(key)
    assert "in busy" in run(redis_url, "stack", result.id)
    running = run(redis_url, "ps", "--state", "running", "--task", "busy", "--json")
    assert result.id in [json.loads(line)["id"] for line in running.splitlines()]
    assert run(redis_url, "cancel", result.id) == f"{result.id}: asked\n"
    run(redis_url, "tail", result.id, status=1)
    assert run(redis_url, "cancel", result.id) == f"{result.id}: over\n"
    assert result.id in run(redis_url, "top")


def test_a_stack_comes_by_the_stream_where_no_worker_hears_remote_commands(
    redis_url: str, tmp_path: Path
) -> None:
    deaf = json.dumps({"worker_enable_remote_control": False})
    with Worker(redis_url, tmp_path, TEST_CONF=deaf) as worker:
        key = unique()
        result = worker.send("busy", key)
        worker.heard(key)
        eventually(lambda: Execution.of(result).snapshot().state == "running", "its claim")
        shown = run(redis_url, "stack", result.id)
        assert shown.startswith(f"{worker.name}:\n")
        assert "in busy" in shown
        assert Execution.of(result).cancel() == "asked"


def test_tail_of_a_group_shows_how_far_it_is(worker: Worker, redis_url: str) -> None:
    members = [worker.sig("add", n, 1) for n in range(5)] + [worker.sig("fail", "why")]
    running = group(members, app=worker.app).apply_async()
    shown = run(redis_url, "tail", running.id, "--group", "6", status=1)
    assert "6/6 1 failed, 5 succeeded" in shown
    assert "ValueError" in shown


@pytest.fixture
def typed(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Terminal]:
    """A command on a terminal of its own."""
    monkeypatch.setenv("REDIS_URL", redis_url)
    return lambda *words: Terminal(command(redis_url, *words)["args"])


def test_on_a_terminal_colours_stay_and_nothing_else_moves_it(
    worker: Worker, redis_url: str, typed: Callable[..., Terminal]
) -> None:
    key = unique()
    result = worker.send("paint", key)
    with typed("tail", result.id) as terminal:
        terminal.until("end\n")
        assert "\x1b[31mred\x1b[0m" in terminal.transcript
        assert "moved" in terminal.transcript
        for sequence in ("\x1b[2J", "\x1b[1;1H", "\x07", "\x1b]0"):
            assert sequence not in terminal.transcript
        worker.go(key)
        assert terminal.leave() == 0
    piped = run(redis_url, "tail", result.id)
    assert "red moved" in piped
    assert "\x1b" not in piped
    assert "\x1b[2J\x1b[1;1Hmoved\x07" in run(redis_url, "tail", result.id, "--raw")


def test_a_question_is_asked_on_the_terminal(
    worker: Worker, typed: Callable[..., Terminal]
) -> None:
    result = worker.send("ask", "name? ")
    execution = Execution.of(result)
    eventually(execution.question, "a question")
    with typed("respond", result.id) as terminal:
        terminal.until("name?")
        terminal.type("Ada\n")
        assert terminal.leave() == 0
    assert result.get(timeout=HANG_S) == "heard Ada"


def test_a_group_has_a_bar_that_moves_on_a_terminal(
    worker: Worker, typed: Callable[..., Terminal]
) -> None:
    key = unique()
    members = [worker.sig("add", 1, 1), worker.sig("steps", key, 1)]
    running = group(members, app=worker.app).apply_async()
    with typed("tail", running.id, "--group", "2") as terminal:
        terminal.until("1/2")
        worker.go(key)
        terminal.until("2/2")
        assert terminal.leave() == 0
        assert "\r\x1b[K" in terminal.transcript


def test_top_is_live_on_a_terminal_until_it_is_interrupted(
    worker: Worker, typed: Callable[..., Terminal]
) -> None:
    key = unique()
    with typed("top") as terminal:
        terminal.until("\x1b[H\x1b[J")
        result = worker.send("steps", key, 1)
        terminal.until(result.id)
        worker.go(key)
        terminal.until("succeeded")
        terminal.type(CTRL_C)
        assert terminal.leave() == 0


def test_each_command_speaks_json(worker: Worker, redis_url: str) -> None:
    result = worker.send("ask", "name? ")
    eventually(Execution.of(result).question, "a question")
    (stack,) = run(redis_url, "stack", result.id, "--json").splitlines()
    assert "in ask" in json.loads(stack)["stack"]
    (said,) = run(redis_url, "respond", result.id, "Ada", "--json").splitlines()
    assert json.loads(said) == {"id": result.id, "respond": "asked"}
    assert result.get(timeout=HANG_S) == "heard Ada"
    (over,) = run(redis_url, "cancel", result.id, "--json").splitlines()
    assert json.loads(over) == {"id": result.id, "cancel": "over"}
    assert result.id in [
        json.loads(line)["id"] for line in run(redis_url, "top", "--json").splitlines()
    ]


def test_wrong_words_are_refused_with_their_value(redis_url: str) -> None:
    assert "nonsense" in run(redis_url, "tail", "x", "--after", "nonsense", status=1)
    assert "-3" in run(redis_url, "cancel", "x", "--grace=-3", status=1)
