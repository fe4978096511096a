"""`celery capsule …` against a real worker, as a person and as a script."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, group
from celery.bin.base import CLIContext
from celery.exceptions import OperationalError
from click.testing import CliRunner, Result

from capsule_tasks.cli import capsule
from capsule_tasks.cli.broker import Queues
from capsule_tasks.client import Execution
from capsule_tasks.testing.servers import PrivateServer, free_port
from tests.acceptance.workers import (
    HANG_S,
    ROOT,
    Worker,
    close,
    ended,
    eventually,
    producer,
    unique,
)
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


def typed_here(app: Celery, *words: str, status: int = 0) -> Result:
    """The same without a process of its own, for an app that the test has."""
    done = CliRunner().invoke(capsule, words, obj=CLIContext(app, no_color=True, workdir=None))
    assert done.exit_code == status, (done.output, done.exc_info)
    return done


def test_tail_writes_output_to_stdout_and_other_events_to_stderr(
    worker: Worker, redis_url: str
) -> None:
    key = unique()
    result = worker.send("steps", key, 2)
    worker.go(key)
    assert run(redis_url, "tail", result.id) == "step 0\nstep 1\n"
    lines = [json.loads(line) for line in run(redis_url, "tail", result.id, "--json").splitlines()]
    assert lines[0]["t"] == "attempt_claimed"
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
        asked = next(line for line in watcher.stderr if "question:" in line)
        assert "name?" in asked
        run(redis_url, "respond", result.id, "Ada")
        assert watcher.wait(HANG_S) == 0
    assert result.get(timeout=HANG_S) == "heard Ada"
    assert "has no open question" in run(redis_url, "respond", result.id, "late", status=1)


def test_cancel_stack_and_ps(worker: Worker, redis_url: str) -> None:
    key = unique()
    result = worker.send("busy", key)
    worker.heard(key)
    assert "in busy" in run(redis_url, "stack", result.id)
    running = run(redis_url, "ps", "--state", "running", "--task", "busy", "--json")
    assert result.id in [json.loads(line)["id"] for line in running.splitlines()]
    assert run(redis_url, "cancel", result.id) == f"{result.id}: requested\n"
    run(redis_url, "tail", result.id, status=1)
    assert run(redis_url, "cancel", result.id) == f"{result.id}: over\n"
    assert result.id in run(redis_url, "top")


def test_a_stack_comes_by_the_stream_where_no_worker_takes_remote_commands(
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
        assert Execution.of(result).cancel() == "requested"


def test_tail_of_a_group_shows_how_far_it_is(worker: Worker, redis_url: str) -> None:
    members = [worker.sig("add", n, 1) for n in range(5)] + [worker.sig("fail", "why")]
    running = group(members, app=worker.app).apply_async()
    shown = run(redis_url, "tail", running.id, "--group", "6", status=1)
    assert "6/6 1 failed, 5 succeeded" in shown
    assert "ValueError" in shown


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")
def test_tail_with_no_wait_does_not_wait_for_a_group(worker: Worker) -> None:
    one = group([worker.sig("add", 1, 1)], app=worker.app)
    waiting = one.apply_async(queue=unique())
    waiting.save()
    shown = typed_here(worker.app, "tail", "--no-wait", waiting.id, status=1).stdout
    assert "0/1" in shown
    (line,) = typed_here(
        worker.app, "tail", "--no-wait", "--json", waiting.id, status=1
    ).stdout.splitlines()
    assert json.loads(line) == {"done": 0, "total": 1, "counts": {}, "failures": []}
    over = one.apply_async()
    over.save()
    over.get(timeout=HANG_S)
    # counted by its worker, or else known to the result backend
    assert "1/1 1 succeeded" in typed_here(worker.app, "tail", "--no-wait", over.id).stdout


@pytest.fixture
def typed(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Terminal]:
    """A command on a terminal of its own."""
    monkeypatch.setenv("REDIS_URL", redis_url)
    return lambda *words: Terminal(command(redis_url, *words)["args"])


def test_on_a_terminal_only_colours_pass(
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
        terminal.shows(r".* 1/2 1 succeeded")
        worker.go(key)
        terminal.shows(r".* 2/2 2 succeeded")
        assert terminal.leave() == 0
        assert not any("1/2" in row for row in terminal.rows)


def test_top_is_live_on_a_terminal_until_it_is_interrupted(
    worker: Worker, typed: Callable[..., Terminal]
) -> None:
    key = unique()
    with typed("top") as terminal:
        terminal.shows("ID +STATE +TASK +WORKER +TIME")
        result = worker.send("steps", key, 1)
        terminal.shows(f"{result.id} +running .*")
        worker.go(key)
        terminal.shows(f"{result.id} +succeeded .*")
        terminal.type(CTRL_C)
        assert terminal.leave() == 0
        assert "\x1b[?1049l" in terminal.transcript  # what the terminal showed before is back


def test_each_command_writes_json(worker: Worker, redis_url: str) -> None:
    result = worker.send("ask", "name? ")
    eventually(Execution.of(result).question, "a question")
    (stack,) = run(redis_url, "stack", result.id, "--json").splitlines()
    assert "in ask" in json.loads(stack)["stack"]
    (said,) = run(redis_url, "respond", result.id, "Ada", "--json").splitlines()
    assert json.loads(said) == {"id": result.id, "respond": "requested"}
    assert result.get(timeout=HANG_S) == "heard Ada"
    ended(result)
    (over,) = run(redis_url, "cancel", result.id, "--json").splitlines()
    assert json.loads(over) == {"id": result.id, "cancel": "over"}
    assert result.id in [
        json.loads(line)["id"] for line in run(redis_url, "top", "--json").splitlines()
    ]


def test_wrong_values_are_refused_and_named(redis_url: str) -> None:
    assert "nonsense" in run(redis_url, "tail", "x", "--after", "nonsense", status=1)
    assert "-3" in run(redis_url, "cancel", "x", "--grace=-3", status=1)


def test_health_of_an_unavailable_broker_is_one_line(tmp_path: Path) -> None:
    away = f"redis://:secret@127.0.0.1:{free_port()}/3"
    done = subprocess.run(
        **command(away, "health"), capture_output=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 69
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "127.0.0.1" in line
    assert "is unavailable" in line
    assert "secret" not in line


def test_an_id_that_no_worker_has_started(redis_url: str) -> None:
    unknown = unique()
    said = f"no worker has started {unknown}"
    app = producer(redis_url, "nobody")
    assert said in typed_here(app, "tail", unknown, "--no-wait", status=1).stderr
    with subprocess.Popen(**command(redis_url, "tail", unknown), stderr=subprocess.PIPE) as waits:
        assert waits.stderr is not None
        line = waits.stderr.readline()
        assert said in line
        assert "waiting" in line
        waits.terminate()
    done = typed_here(app, "cancel", unknown, unique())
    assert f"{unknown}: pending\n" in done.stdout
    assert "no worker has started 2 executions" in done.stderr
    close(app)


def test_the_stack_of_an_id_that_no_worker_has_started(worker: Worker) -> None:
    unknown = unique()
    here = ("-d", worker.name, "-t", str(HANG_S))
    said = typed_here(worker.app, "stack", unknown, *here, status=1).stderr
    assert f"no worker has started {unknown}" in said
    over = worker.send("add", 1, 1)
    ended(over)
    said = typed_here(worker.app, "stack", over.id, *here, status=1).stderr
    assert "has ended: succeeded" in said


def test_a_hint_can_be_typed_as_it_is(worker: Worker, redis_url: str) -> None:
    result = worker.send("ask", "name? ")
    eventually(Execution.of(result).question, "a question")
    with subprocess.Popen(**command(redis_url, "tail", result.id), stderr=subprocess.PIPE) as tail:
        assert tail.stderr is not None
        hint = next(line for line in tail.stderr if "respond with: " in line)
        words = shlex.split(hint.partition("respond with: ")[2])
        assert words[:3] == ["celery", "-A", "tests.acceptance.app"]
        assert words[-1] == "TEXT"
        words[0] = str(Path(sys.executable).parent / "celery")
        options = command(redis_url) | {"args": [*words[:-1], "Ada"]}
        subprocess.run(**options, check=True, timeout=HANG_S)
        assert tail.wait(HANG_S) == 0
    assert result.get(timeout=HANG_S) == "heard Ada"


def test_ps_takes_times_with_a_unit(worker: Worker) -> None:
    result = worker.send("add", 1, 1)
    eventually(lambda: result.id in typed_here(worker.app, "ps").stdout, "its entry")
    for since in ("3600", "1h", "15m", "2d", "5400s", "0.5h"):
        assert result.id in typed_here(worker.app, "ps", "--since", since).stdout
    assert result.id not in typed_here(worker.app, "ps", "--since", "0s").stdout
    for wrong in ("1y", "h", "-5", "1e3", ""):
        assert (
            "is not a duration" in typed_here(worker.app, "ps", "--since", wrong, status=2).stderr
        )


def test_ps_and_top_show_queue_lengths(redis_url: str, tmp_path: Path) -> None:
    """In lists of their own for each priority, which count as one queue."""
    stopped = Worker(redis_url, tmp_path)
    for priority in (0, 3, 6, 9):
        stopped.send("add", 1, 1, priority=priority)
    empty = unique("q")
    for shows in ("ps", "top"):
        shown = typed_here(stopped.app, shows).stdout
        assert shown.splitlines()[0] == f"queued: {stopped.queue} 4"
    both = f"{stopped.queue},{empty}"
    listed = typed_here(stopped.app, "ps", "--state", "queued", "-Q", both, "--json").stdout
    assert [json.loads(line) for line in listed.splitlines()] == [
        {"id": None, "state": "queued", "queue": stopped.queue, "length": 4},
        {"id": None, "state": "queued", "queue": empty, "length": 0},
    ]
    assert "queued" not in typed_here(stopped.app, "ps", "--state", "running").stdout
    close(stopped.app)


def test_queue_lengths_are_unknown_while_only_the_broker_is_unavailable(
    worker: Worker, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPSULE_REDIS_URL", redis_url)
    result = worker.send("add", 1, 1)
    eventually(lambda: result.id in typed_here(worker.app, "ps").stdout, "its entry")
    away = producer(f"redis://:secret@127.0.0.1:{free_port()}/3", "nobody")
    for shows in ("ps", "top"):
        done = typed_here(away, shows)
        assert done.stdout.splitlines()[0] == "queued: nobody unknown"
        assert result.id in done.stdout
        (line,) = done.stderr.splitlines()
        assert "127.0.0.1" in line
        assert "is unavailable" in line
        assert "secret" not in line
        listed = typed_here(away, shows, "--json").stdout.splitlines()
        assert json.loads(listed[0]) == {
            "id": None,
            "state": "queued",
            "queue": "nobody",
            "length": None,
        }
    assert "is unavailable" in typed_here(away, "ps", "--state", "queued", status=69).stderr
    close(away)


def test_top_goes_on_without_its_broker(
    redis_url: str,
    tmp_path: Path,
    typed: Callable[..., Terminal],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CAPSULE_REDIS_URL", redis_url)
    with PrivateServer(tmp_path, port=free_port()) as broker:
        monkeypatch.setenv("REDIS_URL", broker.url)
        with typed("top") as terminal:
            terminal.shows("queued: celery 0")
            broker.stop()
            terminal.shows("queued: celery unknown")
            terminal.shows("-- the broker .*")
            terminal.shows("ID +STATE .*")
            broker.start()
            terminal.shows("queued: celery 0")
            terminal.type(CTRL_C)
            assert terminal.leave() == 0


def test_queues_are_counted_over_one_connection_while_it_lives(tmp_path: Path) -> None:
    with PrivateServer(tmp_path, port=free_port()) as broker:
        app = producer(broker.url, "full")
        app.signature("add").apply_async()
        queues = Queues(app, "full, empty,full")

        def connections() -> int:
            with redis.Redis.from_url(broker.url) as client:
                return int(client.info("stats")["total_connections_received"])

        assert queues.lengths() == {"full": 1, "empty": 0}
        before = connections()
        for _ in range(3):
            assert queues.lengths() == {"full": 1, "empty": 0}
        assert connections() == before + 1, "another than the one that asks here"
        broker.stop()
        for _ in range(2):
            with pytest.raises(OperationalError, match="is unavailable"):
                queues.lengths()
        broker.start()
        assert queues.lengths() == {"full": 0, "empty": 0}
        queues.close()
        close(app)


def test_a_stack_begins_with_the_tasks_own_frames(worker: Worker) -> None:
    key = unique()
    result = worker.send("busy", key)
    worker.heard(key)
    eventually(lambda: Execution.of(result).snapshot().state == "running", "its claim")
    patient = ("-t", str(HANG_S))
    for way in (patient, ("-d", worker.name, *patient)):  # by its stream, and by remote control
        short = typed_here(worker.app, "stack", result.id, *way).stdout
        name, thread, *frames = short.splitlines()
        assert (name, thread[:6]) == (f"{worker.name}:", "thread")
        assert "tests/acceptance/app.py" in frames[0]
        assert "in busy" in frames[0]
        whole = typed_here(worker.app, "stack", result.id, "--all", *way).stdout
        assert "in busy" in whole
        assert "celery/app/trace.py" in whole
    assert Execution.of(result).cancel() == "requested"


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")
def test_groups_and_single_tasks_are_cancelled_together(worker: Worker) -> None:
    members = [worker.sig("add", n, 1) for n in range(3)]
    saved = group(members, app=worker.app).apply_async()
    saved.save()
    single = worker.send("add", 1, 1)
    ended(*saved.results, single)
    shown = typed_here(worker.app, "cancel", single.id, saved.id, single.id).stdout
    assert shown.splitlines() == [
        f"{single.id}: over",
        f"{saved.id}: 0 requested, 0 pending, 3 over",
    ]


def test_json_is_taken_before_and_after_the_command(worker: Worker) -> None:
    result = worker.send("add", 1, 1)
    ended(result)
    for words in (("--json", "cancel", result.id), ("cancel", result.id, "--json")):
        said = json.loads(typed_here(worker.app, *words).stdout)
        assert said == {"id": result.id, "cancel": "over"}
    for words in (("--json", "health"), ("health", "--json")):
        here = ("-d", worker.name, "-t", str(HANG_S))
        said = json.loads(typed_here(worker.app, *words, *here).stdout)
        assert (said["worker"], said["healthy"]) == (worker.name, True)
