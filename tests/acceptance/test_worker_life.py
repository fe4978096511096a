"""Starting, stopping, growing; a worker that is killed, a Redis that goes away."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from scripts._redis_server import PrivateServer
from tests.acceptance.conftest import BOTH
from tests.acceptance.workers import HANG_S, Worker, eventually, is_running, unique


@pytest.fixture(params=BOTH)
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def family(worker: Worker) -> list[int]:
    """The processes of a worker, itself left out."""
    return [
        int(pid)
        for pid in Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    ]


def test_a_warm_shutdown_finishes_and_acknowledges(
    redis_url: str, tmp_path: Path, pool: str
) -> None:
    key = unique()
    with Worker(redis_url, tmp_path, pool=pool) as worker:
        result = worker.send("hold_late", key)
        worker.heard(key)
        pids = family(worker)
        assert worker.process is not None
        worker.process.send_signal(signal.SIGTERM)
        eventually(lambda: "Warm shutdown" in worker.log, "the shutdown")
        worker.go(key)
        assert worker.process.wait(HANG_S) == 0
        assert result.get(timeout=HANG_S) > 0
        assert worker.app.backend.client.llen(worker.queue) == 0
        unacked = worker.app.backend.client.hvals("unacked")
        assert not [message for message in unacked if result.id.encode() in message]
    assert not [pid for pid in pids if is_running(pid)]


def test_a_cold_shutdown_gives_the_message_back(redis_url: str, tmp_path: Path, pool: str) -> None:
    key = unique()
    with Worker(redis_url, tmp_path, pool=pool) as worker:
        worker.send("hold_late", key)
        child = int(worker.heard(key))
        worker.stop(signal.SIGQUIT)
        eventually(lambda: not is_running(child), "the end of the child")
        eventually(
            lambda: worker.app.backend.client.llen(worker.queue), f"the message: {worker.log}"
        )


def test_a_killed_worker_leaves_no_process_and_loses_no_task(
    redis_url: str, tmp_path: Path
) -> None:
    keys, counted = [unique(), unique()], unique()
    with Worker(redis_url, tmp_path, TEST_VISIBILITY="2") as worker:
        results = [worker.send("hold_late", key) for key in keys]
        children = [int(worker.heard(key)) for key in keys]
        for n in range(20):
            worker.send("count", counted, n)
        # Both children are busy, and six more messages wait in the worker: kombu takes none off
        # the queue now, which it does in two steps, between which a kill would lose one.
        eventually(lambda: worker.app.backend.client.llen(worker.queue) == 14, "a full worker")
        pids = family(worker)
        worker.kill()
        for pid in (*pids, *children):
            eventually(lambda pid=pid: not is_running(pid), f"the end of {pid}")
        with Worker(redis_url, tmp_path, queue=worker.queue, TEST_VISIBILITY="2") as second:
            for key, result in zip(keys, results, strict=True):
                for _ in range(10):  # a short visibility may deliver it to the second one again
                    second.go(key)
                assert result.get(timeout=HANG_S) > 0
            eventually(lambda: second.app.backend.client.scard(counted) == 20, "every task")


def test_redis_restarted_under_load_loses_nothing(tmp_path: Path) -> None:
    counted = unique()
    with PrivateServer(tmp_path / "redis", aof=True) as server:
        port = server.port
        with Worker(server.url, tmp_path, TEST_VISIBILITY="3") as worker:
            client = worker.app.backend.client
            for _ in range(2):
                worker.send("sleep", 3)
            for n in range(300):
                worker.send("count", counted, n)
            # Both children are busy and eight messages wait in the worker: kombu takes none off
            # the queue now, which it does in two steps, between which one would be lost.
            eventually(lambda: client.llen(worker.queue) == 292, "a full worker")
            server.stop()
            with PrivateServer(tmp_path / "redis", port=port, aof=True):
                eventually(lambda: client.scard(counted) == 300, f"every task {worker.log[-3000:]}")
                assert worker.get("add", 1, 1) == 2


def test_the_pool_grows_and_shrinks(redis_url: str, tmp_path: Path, pool: str) -> None:
    with Worker(redis_url, tmp_path, pool=pool, concurrency=1) as worker:
        assert worker.tell("pool_grow", 2) == {"ok": "pool will grow"}
        keys = [unique() for _ in range(3)]
        results = [worker.send("hold", key) for key in keys]
        pids = {int(worker.heard(key)) for key in keys}
        assert len(pids) == 3
        assert "busy" in str(worker.tell("pool_shrink", 2))
        for key in keys:
            worker.go(key)
        for result in results:
            result.get(timeout=HANG_S)
        eventually(lambda: "ok" in worker.tell("pool_shrink", 2), "idle children")
        eventually(lambda: sum(map(is_running, pids)) == 1, "the shrinking")
        assert worker.get("add", 1, 1) == 2


def test_children_are_replaced_after_so_many_tasks(
    redis_url: str, tmp_path: Path, pool: str
) -> None:
    with Worker(
        redis_url,
        tmp_path,
        "--max-tasks-per-child=3",
        pool=pool,
        concurrency=1,
        TEST_MARK_PROCESSES="1",
    ) as worker:
        pids = [worker.get("signalled") for _ in range(7)]
        assert len(set(pids)) == 3
        assert pids[0] == pids[2] != pids[3]
        if pool == "capsule":
            assert worker.heard("process_shutdown") == str(pids[0])


def test_a_child_that_has_grown_is_replaced(redis_url: str, tmp_path: Path, pool: str) -> None:
    with Worker(
        redis_url, tmp_path, "--max-memory-per-child=150000", pool=pool, concurrency=1
    ) as worker:
        first = worker.get("eat", 200)
        eventually(lambda: worker.get("signalled") != first, "another child")


def test_autoscale_follows_the_load(redis_url: str, tmp_path: Path) -> None:
    with Worker(redis_url, tmp_path, "--autoscale=3,1", AUTOSCALE_KEEPALIVE="1") as worker:
        keys = [unique() for _ in range(3)]
        results = [worker.send("hold", key) for key in keys]
        pids = {int(worker.heard(key)) for key in keys}
        assert len(pids) == 3
        for key in keys:
            worker.go(key)
        for result in results:
            result.get(timeout=HANG_S)
        eventually(lambda: sum(map(is_running, pids)) == 1, "the shrinking")
        assert worker.ask("stats")["pool"]["max-concurrency"] == 1
        assert worker.get("add", 1, 1) == 2


@pytest.mark.parametrize("start", ["exec", "cold"])
def test_children_that_are_no_fork_run_the_same_tasks(
    redis_url: str, tmp_path: Path, start: str
) -> None:
    with Worker(redis_url, tmp_path, concurrency=1, TEST_START=start) as worker:
        assert worker.get("add", 1, 1) == 2
        assert worker.get("conf") == "by the worker"
        word = unique()
        worker.get("speak", word)
        assert worker.get("nap", 0)[0]
        eventually(lambda: f"logged {word}" in worker.log and f"printed {word}" in worker.log)


def test_a_restarted_pool_has_new_children_and_loses_nothing(
    redis_url: str, tmp_path: Path
) -> None:
    with Worker(redis_url, tmp_path, concurrency=2) as worker:
        before = set(worker.ask("stats")["pool"]["processes"])
        key = unique()
        result = worker.send("hold", key)
        old = int(worker.heard(key))
        assert worker.tell("pool_restart") == {"ok": "reload started"}
        worker.go(key)
        assert result.get(timeout=HANG_S) == old
        eventually(lambda: not any(map(is_running, before)), "the end of the old children")
        assert worker.get("signalled") not in before


def test_stats_show_the_sessions(redis_url: str, tmp_path: Path) -> None:
    with Worker(redis_url, tmp_path, concurrency=2) as worker:
        key = unique()
        result = worker.send("hold", key)
        pid = int(worker.heard(key))
        pool = worker.ask("stats")["pool"]
        assert pid in pool["processes"]
        (session,) = [s for s in pool["sessions"] if s["pid"] == pid]
        assert session["running"] == [result.id]
        (active,) = eventually(lambda: worker.ask("active"), "the news that it runs")
        assert (active["id"], active["worker_pid"]) == (result.id, pid)
        worker.go(key)
        result.get(timeout=HANG_S)


def test_an_idle_worker_sleeps(redis_url: str, tmp_path: Path) -> None:
    """Neither the hub nor the runtime wakes more often than Celery's own timers make it."""
    with Worker(redis_url, tmp_path, concurrency=1) as worker:
        assert worker.get("add", 1, 1) == 2
        tick = os.sysconf("SC_CLK_TCK")

        def used_s() -> float:
            fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / tick

        before = used_s()
        worker.get("sleep", 2)
        assert used_s() - before < 1.0


def leave(worker: Worker, signum: int) -> None:
    assert worker.process is not None
    worker.process.send_signal(signum)


def test_a_second_ctrl_c_is_a_cold_shutdown(redis_url: str, tmp_path: Path, pool: str) -> None:
    key = unique()
    with Worker(redis_url, tmp_path, pool=pool) as worker:
        worker.send("hold_late", key)
        child = int(worker.heard(key))
        pids = family(worker)
        leave(worker, signal.SIGINT)
        eventually(lambda: "Hitting Ctrl+C again" in worker.log, "the news")
        eventually(lambda: "Warm shutdown" in worker.log, "the warm shutdown")
        assert is_running(child)
        worker.stop(signal.SIGINT)
        for pid in (child, *pids):
            eventually(lambda pid=pid: not is_running(pid), f"the end of {pid}")
        eventually(lambda: worker.app.backend.client.llen(worker.queue), "the message")


@pytest.mark.parametrize("is_done", [True, False], ids=["done in time", "not done"])
def test_a_soft_shutdown_gives_tasks_their_time(
    redis_url: str, tmp_path: Path, pool: str, is_done: bool
) -> None:
    """Celery sleeps in a signal handler meanwhile, and the rest of the worker goes on."""
    key = unique()
    seconds = "3" if is_done else "0.5"
    with Worker(redis_url, tmp_path, pool=pool, TEST_SOFT_S=seconds) as worker:
        result = worker.send("hold_late", key)
        child = int(worker.heard(key))
        eventually(lambda: worker.ask("active"), "the news: with nothing to wait for it is cold")
        leave(worker, signal.SIGQUIT)
        eventually(lambda: "Initiating Soft Shutdown" in worker.log, "the soft shutdown")
        if is_done:
            worker.go(key)
            assert result.get(timeout=HANG_S) == child
        assert worker.process is not None
        worker.process.wait(HANG_S)
        assert not is_running(child)
        left = worker.app.backend.client.llen(worker.queue)
        assert left == (0 if is_done else 1)


def test_sigterm_can_be_made_a_cold_shutdown(redis_url: str, tmp_path: Path, pool: str) -> None:
    key = unique()
    with Worker(redis_url, tmp_path, pool=pool, REMAP_SIGTERM="SIGQUIT") as worker:
        worker.send("hold_late", key)
        child = int(worker.heard(key))
        worker.stop(signal.SIGTERM)
        assert not is_running(child)
        assert worker.app.backend.client.llen(worker.queue) == 1


def test_a_hangup_restarts_the_worker(redis_url: str, tmp_path: Path, pool: str) -> None:
    """What runs finishes first; then there is the same process with another program in it."""
    key = unique()
    with Worker(redis_url, tmp_path, pool=pool, script=True) as worker:
        result = worker.send("hold_late", key)
        child = int(worker.heard(key))
        before = family(worker)
        leave(worker, signal.SIGHUP)
        eventually(lambda: "Restarting celery worker" in worker.log, "the restart")
        worker.go(key)
        assert result.get(timeout=HANG_S) == child
        for pid in (child, *before):
            eventually(lambda pid=pid: not is_running(pid), f"the end of {pid}")
        assert worker.get("signalled") not in before
        assert worker.ask("stats")["pid"] == worker.pid
        assert worker.stop() == 0
