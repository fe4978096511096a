"""A worker that is told to stop does so in bounded time, with no process left and no loss."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import pytest
from celery import group

from capsule_tasks.client import Execution, GroupExecution
from capsule_tasks.protocol.events import AttemptEnded, Outcome
from capsule_tasks.testing.servers import PrivateServer
from tests.acceptance.workers import HANG_S, Worker, eventually, is_running, unique

SOON = json.dumps({"capsule_child_stop_s": 0.5})
VERY_SOON = json.dumps({"capsule_child_stop_s": 0.5, "capsule_worker_stop_s": 1})
FORCED = 70


def kin(worker: Worker) -> list[int]:
    """Every process that has this worker's environment: itself, children, what they start."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if worker.queue.encode() in environment and is_running(int(entry.name)):
            found.append(int(entry.name))
    return found


def begin(worker: Worker, name: str = "hold_late") -> int:
    """Start a task; its child, once the worker knows of it."""
    key = unique()
    worker.send(name, key)
    child = int(worker.heard(key))
    eventually(lambda: worker.ask("active"), "the news that it runs")
    return child


def leave(worker: Worker, *signals: int) -> int:
    """Send these signals, each once the one before has been handled; return the exit status."""
    assert worker.process is not None
    for signum, words in zip(signals, ("shutdown (MainProcess)", None), strict=False):
        worker.process.send_signal(signum)
        if words is not None and len(signals) > 1:
            eventually(lambda words=words: words in worker.log, "the first signal")
    status = worker.process.wait(HANG_S)
    eventually(lambda: not kin(worker), "the end of every process")
    return status


COLD = pytest.mark.parametrize(
    "signals",
    [(signal.SIGQUIT,), (signal.SIGTERM, signal.SIGQUIT), (signal.SIGINT, signal.SIGINT)],
    ids=["at once", "after a warm one", "Ctrl-C twice"],
)


@COLD
def test_a_cold_shutdown_requeues_running_and_waiting_tasks(
    redis_url: str, tmp_path: Path, pool: str, signals: tuple[int, ...]
) -> None:
    with Worker(redis_url, tmp_path, pool=pool) as worker:
        begin(worker, "hold_late")
        begin(worker, "wait_for_another")
        eventually(lambda: len(worker.ask("active")) == 2, "the news that both run")
        leave(worker, *signals)
        assert worker.app.backend.client.llen(worker.queue) == 2
        assert "Traceback" not in worker.log


@pytest.mark.parametrize("soft_s", ["0", "0.5"], ids=["cold", "soft"])
def test_a_child_that_is_stopped_delays_no_exit(
    redis_url: str, tmp_path: Path, soft_s: str
) -> None:
    """Under prefork it does, for ever; and so does one that is being started."""
    with Worker(redis_url, tmp_path, TEST_CONF=SOON, TEST_SOFT_S=soft_s) as worker:
        os.kill(begin(worker), signal.SIGSTOP)
        assert leave(worker, signal.SIGQUIT) != FORCED
        assert worker.app.backend.client.llen(worker.queue) == 1
        assert "Traceback" not in worker.log


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGQUIT], ids=["warm", "cold"])
def test_children_that_are_being_started_delay_no_exit(
    redis_url: str, tmp_path: Path, signum: int
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    with Worker(redis_url, tmp_path, TEST_CONF=SOON, TEST_GATE=str(gate)) as worker:
        eventually(lambda: worker.ask("stats"), "a worker that listens")
        if signum == signal.SIGQUIT:
            worker.send("set_mark_late", unique())
            eventually(lambda: worker.ask("reserved"), "the task in the worker")
        assert leave(worker, signum) != FORCED
        assert worker.app.backend.client.llen(worker.queue) == (signum == signal.SIGQUIT)
        assert "Traceback" not in worker.log


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGQUIT])
def test_a_worker_that_is_still_starting_stops_like_others(
    redis_url: str, tmp_path: Path, signum: int
) -> None:
    with Worker(redis_url, tmp_path, TEST_SIGNAL_AT_START=str(int(signum))) as worker:
        assert worker.process is not None
        assert worker.process.wait(HANG_S) == 0
        eventually(lambda: not kin(worker), "the end of every process")
        assert "Traceback" not in worker.log


def test_a_redis_that_is_gone_delays_no_exit(tmp_path: Path, pool: str) -> None:
    with (
        PrivateServer(tmp_path / "redis") as server,
        Worker(server.url, tmp_path, pool=pool) as worker,
    ):
        assert worker.get("add", 1, 1) == 2
        os.kill(server.pid, signal.SIGKILL)
        assert leave(worker, signal.SIGTERM) != FORCED


@pytest.mark.parametrize(
    ("task", "signum"),
    [("", signal.SIGTERM), ("hold_late", signal.SIGQUIT), ("hold", signal.SIGQUIT)],
    ids=["idle and warm", "busy and cold", "acknowledged and cold"],
)
def test_a_redis_that_accepts_and_stays_silent_delays_no_exit(
    tmp_path: Path, task: str, signum: int
) -> None:
    """Under prefork it does, for ever; here the log shows where the worker hung.

    Of a task that is acknowledged Celery itself stores that it was cancelled, in the signal's
    handler, which takes it two minutes.
    """
    with (
        PrivateServer(tmp_path / "redis") as server,
        Worker(server.url, tmp_path, TEST_CONF=VERY_SOON, TEST_VISIBILITY="1") as worker,
    ):
        key = unique()
        result = worker.send(task, key) if task else None
        if result is not None:
            worker.heard(key)
            eventually(lambda: worker.ask("active"), "the news that it runs")
        else:
            assert worker.get("add", 1, 1) == 2
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert leave(worker, signum) == FORCED
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert "did not stop within" in worker.log
        if result is not None and task == "hold_late":
            with Worker(server.url, tmp_path, queue=worker.queue, TEST_VISIBILITY="1") as second:
                second.heard(key)
                second.go(key)
                assert result.get(timeout=HANG_S) > 0


def test_a_result_that_a_silent_redis_does_not_take_delays_no_exit(tmp_path: Path) -> None:
    """The child hangs in Celery's result store; its message is delivered again."""
    began, until = tmp_path / "began", tmp_path / "until"
    with PrivateServer(tmp_path / "redis") as server:
        with Worker(server.url, tmp_path, TEST_CONF=VERY_SOON, TEST_VISIBILITY="1") as worker:
            result = worker.send("write_kept", str(began), str(until))
            eventually(began.exists, "the task")
            eventually(lambda: worker.app.backend.client.hlen("unacked"), "the note of it")
            os.kill(server.pid, signal.SIGSTOP)
            try:
                until.touch()
                assert leave(worker, signal.SIGTERM) == FORCED
            finally:
                os.kill(server.pid, signal.SIGCONT)
            assert "Redis does not answer, and tasks cannot end" in worker.log
            with Worker(server.url, tmp_path, queue=worker.queue, TEST_VISIBILITY="1"):
                assert result.get(timeout=HANG_S) > 0
        assert began.read_text() == "began\n" * 2


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGQUIT], ids=["warm", "cold"])
def test_a_redis_that_was_always_silent_delays_no_exit(tmp_path: Path, signum: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        worker = Worker(url, tmp_path, TEST_CONF=VERY_SOON)
        os.close(worker.launch())
        try:
            silent.settimeout(HANG_S)
            connection, _ = silent.accept()
            eventually(lambda: worker.log.count("begins") == 2, "the children")
            assert leave(worker, signum) == FORCED
            assert "did not stop within" in worker.log
            connection.close()
        finally:
            worker.kill()


async def test_an_acknowledged_task_ends_for_its_watchers_when_its_worker_stops(
    redis_url: str, tmp_path: Path
) -> None:
    """No other worker would end it: its message is gone, and reapers ignore what was given back."""
    with Worker(redis_url, tmp_path) as worker:
        key = unique()
        running = GroupExecution.of(group([worker.sig("hold", key)], app=worker.app).apply_async())
        execution = running.member(0)
        worker.heard(key)
        eventually(lambda: execution.snapshot().state == "running", "its claim")
        assert leave(worker, signal.SIGQUIT) != FORCED
        assert worker.app.backend.client.llen(worker.queue) == 0
        async with asyncio.timeout(HANG_S):
            last = [event async for event in execution.aevents()][-1]
        assert last.message.outcome == Outcome.CANCELLED
        assert running.snapshot().counts == {"cancelled": 1}


def test_a_task_requeued_by_a_stopped_worker_has_not_ended(redis_url: str, tmp_path: Path) -> None:
    with Worker(redis_url, tmp_path) as worker:
        key = unique()
        execution = Execution.of(worker.send("hold_late", key))
        worker.heard(key)
        eventually(lambda: execution.snapshot().state == "running", "its claim")
        assert leave(worker, signal.SIGQUIT) != FORCED
        assert isinstance(execution.tail()[-1].message, AttemptEnded)
        assert execution.snapshot().state == "waiting"
