"""Celery events, log lines and task output, as a worker publishes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.acceptance.workers import HANG_S, Worker, eventually, listening, unique


def test_with_events_switched_on_every_event_of_a_task_is_sent(
    redis_url: str, tmp_path: Path, pool: str
) -> None:
    silent = json.dumps({"worker_send_task_events": False})
    with (
        Worker(redis_url, tmp_path, "-E", pool=pool, TEST_CONF=silent) as worker,
        listening(worker) as events,
    ):
        word = unique()
        result = worker.send("tell_event", word)
        sent = {event["type"]: event for event in events.of(result.id, until=["task-succeeded"])}
        assert set(sent) == {"task-received", "task-started", "task-halfway", "task-succeeded"}
        assert {event["hostname"] for event in sent.values()} == {worker.name}
        assert sent["task-received"]["name"] == "tell_event"
        assert sent["task-received"]["args"] == f"('{word}',)"
        assert sent["task-received"]["root_id"] == result.id
        assert sent["task-started"]["pid"] == worker.pid
        assert sent["task-halfway"]["word"] == word
        assert sent["task-succeeded"]["result"] == "None"
        assert sent["task-succeeded"]["runtime"] >= 0
        retried = worker.send("retry", 1)
        types = [event["type"] for event in events.of(retried.id, until=["task-succeeded"])]
        assert types.count("task-retried") == 1
        assert types.count("task-started") == 2


@pytest.mark.parametrize("redirects", [True, False], ids=["redirected", "left alone"])
def test_a_log_file_has_log_lines_of_tasks_and_their_output_if_redirected(
    redis_url: str, tmp_path: Path, pool: str, redirects: bool
) -> None:
    file, word = tmp_path / "file", unique()
    conf = json.dumps({"worker_redirect_stdouts": redirects})
    with Worker(redis_url, tmp_path, f"--logfile={file}", pool=pool, TEST_CONF=conf) as worker:
        result = worker.send("speak", word)
        pid = result.get(timeout=HANG_S)

        def is_there(text: str, path: Path) -> bool:
            return f"{text} {word}\n" in path.read_text()

        eventually(lambda: is_there("logged", file), "what it logs in the file")
        eventually(lambda: is_there("from a process", worker.log_file), "what its process says")
        to, not_to = (file, worker.log_file) if redirects else (worker.log_file, file)
        for text in ("printed", "to stderr"):
            eventually(lambda text=text: is_there(text, to), f"{text} in {to}:\n{to.read_text()}")
            assert not is_there(text, not_to)
        lines = to.read_text().splitlines()
        (printed,) = [line for line in lines if line.endswith(f"printed {word}")]
        assert ("WARNING" in printed) == redirects
        if redirects and pool == "capsule":  # prefork names the process alone
            assert f"WARNING/Session-{pid}] speak[{result.id}]: printed {word}" in printed


def test_an_app_with_logging_of_its_own_has_what_its_tasks_print_as_it_is(
    redis_url: str, tmp_path: Path, pool: str
) -> None:
    word = unique()
    with Worker(redis_url, tmp_path, pool=pool, TEST_OWN_LOGGING="1") as worker:
        worker.get("speak", word)
        eventually(lambda: f"\nprinted {word}\n" in worker.log, "what it prints")


def test_a_worker_takes_from_each_of_its_queues(redis_url: str, tmp_path: Path, pool: str) -> None:
    queues = [unique("a"), unique("b")]
    options = ("-Q", ",".join(queues))
    with Worker(redis_url, tmp_path, *options, pool=pool, queue=queues[0]) as worker:
        for queue in queues:
            result = worker.sig("request").set(queue=queue).apply_async()
            assert result.get(timeout=HANG_S)["queue"] == queue
        assert {queue["name"] for queue in worker.ask("active_queues")} == set(queues)
