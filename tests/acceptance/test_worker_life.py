"""Starting, stopping, growing; a worker that is killed, a Redis that goes away."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
from pathlib import Path

import pytest

from capsule_tasks.testing.servers import PrivateServer
from tests.acceptance.workers import HANG_S, Worker, eventually, is_running, unique


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
    redis_url: str, tmp_path: Path, pool: str
) -> None:
    keys, counted = [unique(), unique()], unique()
    with Worker(redis_url, tmp_path, pool=pool, TEST_VISIBILITY="2") as worker:
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
        with Worker(
            redis_url, tmp_path, pool=pool, queue=worker.queue, TEST_VISIBILITY="2"
        ) as second:
            for key, result in zip(keys, results, strict=True):
                for _ in range(10):  # a short visibility may deliver it to the second one again
                    second.go(key)
                assert result.get(timeout=HANG_S) > 0
            eventually(lambda: second.app.backend.client.scard(counted) == 20, "every task")


def test_redis_restarted_under_load_loses_nothing(tmp_path: Path, pool: str) -> None:
    counted = unique()
    with PrivateServer(tmp_path / "redis", aof=True) as server:
        port = server.port
        with Worker(server.url, tmp_path, pool=pool, TEST_VISIBILITY="3") as worker:
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


def test_a_worker_outlives_a_server_that_hangs_up_on_its_commands_first(tmp_path: Path) -> None:
    """Kombu's channel of tasks then still waits for an answer when it is closed."""
    with PrivateServer(tmp_path / "redis", aof=True) as server:
        port = server.port
        with Worker(server.url, tmp_path, TEST_VISIBILITY="3") as worker:
            held = worker.send("add", 1, 1, countdown=2)
            eventually(lambda: worker.ask("scheduled"), "the task in the worker")
            with socket.create_connection(("127.0.0.1", port)) as operator:
                operator.sendall(b"CLIENT KILL TYPE pubsub\r\nSHUTDOWN NOSAVE\r\n")
                while operator.recv(1024):
                    pass
            with PrivateServer(tmp_path / "redis", port=port, aof=True):
                assert held.get(timeout=HANG_S) == 2
                assert worker.stop() == 0


def test_tasks_that_end_while_redis_is_away_are_acknowledged_when_it_is_back(
    tmp_path: Path,
) -> None:
    """Under prefork the acknowledgement fails, on a channel that is closed by then."""
    began, end = tmp_path / "began", tmp_path / "end"
    with PrivateServer(tmp_path / "redis", aof=True) as server:
        port = server.port
        with Worker(server.url, tmp_path, TEST_VISIBILITY="2") as worker:
            result = worker.send("write_late", str(began), str(end))
            eventually(began.exists, "the task")
            client = worker.app.backend.client
            eventually(lambda: client.hlen("unacked") == 1, "the note of it")
            server.stop()
            end.touch()
            eventually(lambda: f"write_late[{result.id}] succeeded" in worker.log, "its end")
            with PrivateServer(tmp_path / "redis", port=port, aof=True):
                eventually(lambda: client.hlen("unacked") == 0, "the acknowledgement")
                key = unique()
                worker.send("set_mark", key)
                worker.heard(key)
                assert client.llen(worker.queue) == 0
                assert began.read_text() == "began\n"


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
    shutdown = unique()
    with Worker(
        redis_url,
        tmp_path,
        "--max-tasks-per-child=3",
        pool=pool,
        concurrency=1,
        TEST_MARK_SHUTDOWNS=shutdown,
    ) as worker:
        pids = [worker.get("signalled") for _ in range(7)]
        assert len(set(pids)) == 3
        assert pids[0] == pids[2] != pids[3]
        if pool == "capsule":
            assert worker.heard(shutdown) == str(pids[0])


def test_processes_left_by_tasks_end_with_their_child(redis_url: str, tmp_path: Path) -> None:
    """Prefork leaves the processes, and its child waits for the thread."""
    key = unique()
    with Worker(redis_url, tmp_path, "--max-tasks-per-child=1", concurrency=1) as worker:
        pid = worker.get("leave_things", key)
        left = [int(word) for word in worker.heard(key).split()]
        assert worker.get("signalled") != pid
        for one in (pid, *left):
            eventually(lambda one=one: not is_running(one), f"the end of {one}")


def test_a_child_that_has_grown_is_replaced(redis_url: str, tmp_path: Path, pool: str) -> None:
    with Worker(
        redis_url, tmp_path, "--max-memory-per-child=150000", pool=pool, concurrency=1
    ) as worker:
        first = worker.get("eat", 200)
        eventually(lambda: worker.get("signalled") != first, "another child")


def test_memory_is_looked_at_while_a_task_runs(redis_url: str, tmp_path: Path) -> None:
    """By prefork only after a task, when this one has given it all back."""
    key = unique()
    with Worker(redis_url, tmp_path, "--max-memory-per-child=150000", concurrency=1) as worker:
        result = worker.send("feast", 200, key)
        pid = int(worker.heard(key))
        eventually(lambda: "is replaced: it uses" in worker.log, "the news")
        (session,) = worker.ask("stats")["pool"]["sessions"]
        assert (session["pid"], session["running"]) == (pid, [result.id])
        assert "it uses" in session["retiring"]
        worker.go(key)
        assert result.get(timeout=HANG_S) == pid
        assert worker.get("signalled") != pid


def test_memory_that_was_given_back_does_not_count(redis_url: str, tmp_path: Path) -> None:
    """By prefork it does: it asks for the most that a child ever had."""
    with Worker(redis_url, tmp_path, "--max-memory-per-child=150000", concurrency=1) as worker:

        def is_kept() -> bool:  # unless somebody looked at its memory just then
            return len({worker.get(*call) for call in (["feast", 200], ["signalled"])}) == 1

        eventually(is_kept, "a child that stays")


def test_autoscale_follows_the_load(redis_url: str, tmp_path: Path, pool: str) -> None:
    with Worker(
        redis_url, tmp_path, "--autoscale=3,1", pool=pool, AUTOSCALE_KEEPALIVE="1"
    ) as worker:
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


def test_autoscale_from_no_child_and_back(redis_url: str, tmp_path: Path, pool: str) -> None:
    """`--autoscale=3` is from nothing to three."""
    with Worker(redis_url, tmp_path, "--autoscale=3", pool=pool, AUTOSCALE_KEEPALIVE="1") as worker:
        for _ in range(2):
            key = unique()
            result = worker.send("hold", key)
            pid = int(worker.heard(key))
            worker.go(key)
            assert result.get(timeout=HANG_S) == pid
            eventually(lambda pid=pid: not is_running(pid), "the shrinking")
        assert worker.ask("stats")["pool"]["max-concurrency"] == 0


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


def test_settings_that_only_the_worker_has_reach_a_fresh_interpreter_or_are_named(
    redis_url: str, tmp_path: Path
) -> None:
    with Worker(
        redis_url, tmp_path, concurrency=1, TEST_START="exec", TEST_SET_IN_WORKER="1"
    ) as worker:
        assert worker.get("added") == ["by the worker", None]
        assert worker.get("conf") == "by the worker"
        missing = r"children run without these settings, .*: of_no_words\n"
        eventually(lambda: re.search(missing, worker.log), "the warning")


def test_a_restarted_pool_has_new_children_and_loses_nothing(
    redis_url: str, tmp_path: Path, pool: str
) -> None:
    with Worker(redis_url, tmp_path, pool=pool) as worker:
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


def test_an_idle_worker_sleeps(redis_url: str, tmp_path: Path, pool: str) -> None:
    """The hub and the runtime wake no more often than Celery's own timers require."""
    with Worker(redis_url, tmp_path, pool=pool, concurrency=1) as worker:
        assert worker.get("add", 1, 1) == 2
        tick = os.sysconf("SC_CLK_TCK")

        def used_s() -> float:
            fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / tick

        before = used_s()
        worker.get("sleep", 2)
        assert used_s() - before < 1.0


def test_unread_output_of_a_worker_blocks_no_task(redis_url: str, tmp_path: Path) -> None:
    flooded, held = unique(), unique()
    reading, writing = os.pipe()
    direct = json.dumps({"worker_redirect_stdouts": False})
    try:
        with Worker(redis_url, tmp_path, stdout=writing, TEST_CONF=direct) as worker:
            worker.send("flood_lines", flooded, 200_000)
            worker.heard(flooded)
            assert not select.select([], [writing], [], 0)[1]  # the pipe is full
            result = worker.send("hold_late", held)
            pid = int(worker.heard(held))
            worker.app.control.revoke(result.id, terminate=True, destination=[worker.name])
            eventually(lambda: not is_running(pid), "the end of the task")
            worker.go(flooded)
            assert worker.get("add", 1, 1) == 2
            # Killed, because Celery prints that it leaves, and the full pipe blocks it there.
    finally:
        os.close(reading)
        os.close(writing)


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


def test_signals_are_the_main_threads(redis_url: str, tmp_path: Path) -> None:
    """Another thread would take them in the middle of a turn, which the main thread blocks for."""
    late = unique()
    with Worker(redis_url, tmp_path, TEST_VISIBILITY="5") as worker:
        worker.get("add", 1, 1)
        worker.send("add", 1, 1, task_id=late, countdown=3600)
        worker.tell("revoke", late)
        threads = {int(path.name): path for path in Path(f"/proc/{worker.pid}/task").iterdir()}
        others = [path for tid, path in threads.items() if tid != worker.pid]
        assert len(others) >= 3
        for thread in others:
            blocked = int((thread / "status").read_text().split("SigBlk:\t")[1].split()[0], 16)
            for signum in (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT, signal.SIGHUP):
                assert blocked >> (signum - 1) & 1, (thread, signum)


def test_sigterm_can_be_made_a_cold_shutdown(redis_url: str, tmp_path: Path, pool: str) -> None:
    key = unique()
    with Worker(redis_url, tmp_path, pool=pool, REMAP_SIGTERM="SIGQUIT") as worker:
        worker.send("hold_late", key)
        child = int(worker.heard(key))
        worker.stop(signal.SIGTERM)
        assert not is_running(child)
        assert worker.app.backend.client.llen(worker.queue) == 1


def test_a_hangup_restarts_the_worker(redis_url: str, tmp_path: Path, pool: str) -> None:
    """Running tasks finish first; then the same process runs another program."""
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


def test_a_wrong_setting_is_refused_before_anything_is_started(
    redis_url: str, tmp_path: Path
) -> None:
    worker = Worker(redis_url, tmp_path, TEST_CONF=json.dumps({"capsule_ready_s": "soon"}))
    with pytest.raises(AssertionError), worker:
        pass
    assert worker.process is not None
    assert worker.process.wait(HANG_S) == 1
    assert "capsule_ready_s = 'soon': must be a " in worker.log
    assert "template" not in worker.log
