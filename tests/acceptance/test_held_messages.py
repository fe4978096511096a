"""A worker keeps the messages it holds while it lives; another has them soon after its death."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from capsule_tasks.testing.servers import PrivateServer
from tests.acceptance.workers import HANG_S, ROOT, Worker, close, eventually, unique

VISIBILITY_S = 3


def starts(worker: Worker, key: str) -> int:
    """How often a task that has set its mark once has begun again."""
    return int(worker.app.backend.client.llen(f"mark:{key}")) + 1


def see_a_sweep(worker: Worker, prefix: str = "", age_s: float = VISIBILITY_S) -> None:
    """Return once a made-up message, held by no worker, has been put back and run.

    Unless told otherwise, it is as old as the timeout, and too young for kombu's own sweep.
    """
    client, key, side = worker.app.backend.client, unique(), unique("q")
    worker.app.send_task("set_mark", args=(key,), queue=side)
    raw = json.loads(eventually(lambda: client.rpop(f"{prefix}{side}"), "the message"))
    raw["properties"]["delivery_info"]["routing_key"] = worker.queue
    tag = raw["properties"]["delivery_tag"]
    client.hset(f"{prefix}unacked", tag, json.dumps([raw, "", worker.queue]))
    score = time.time() - age_s
    for index in ("unacked_index", "unacked_index.renewed"):
        client.zadd(f"{prefix}{index}", {tag: score})
    worker.heard(key)


def take_no_more(worker: Worker) -> None:
    """The worker keeps the messages it has; new ones go to another."""
    worker.tell("cancel_consumer", worker.queue)


def outlast_the_timeout(worker: Worker, prefix: str = "", timeout_s: float = VISIBILITY_S) -> None:
    """The timeout passes, and then another worker has looked for what is overdue."""
    end = time.monotonic() + timeout_s + 0.5
    eventually(lambda: time.monotonic() > end)
    see_a_sweep(worker, prefix, timeout_s)


@pytest.mark.parametrize("prefix", [pytest.param("", marks=pytest.mark.full), "shop:"])
def test_a_long_task_and_a_long_eta_are_run_once(
    redis_url: str, tmp_path: Path, prefix: str
) -> None:
    settings = {"TEST_VISIBILITY": str(VISIBILITY_S), "TEST_KEY_PREFIX": prefix}
    with Worker(redis_url, tmp_path, concurrency=1, **settings) as worker:
        worker.app.conf.broker_transport_options["global_keyprefix"] = prefix
        long, late = unique(), unique()
        held = worker.send("hold_late", long)
        worker.heard(long)
        planned = worker.send("set_mark_late", late, countdown=2 * VISIBILITY_S)
        eventually(lambda: worker.ask("scheduled"), "the schedule")
        take_no_more(worker)
        with Worker(redis_url, tmp_path, queue=worker.queue, **settings) as other:
            other.app.conf.broker_transport_options["global_keyprefix"] = prefix
            outlast_the_timeout(other, prefix)
            assert not other.ask("scheduled")
            worker.go(long)
            assert held.get(timeout=HANG_S) > 0
            assert planned.get(timeout=HANG_S) == "marked"
            see_a_sweep(other, prefix)
            assert starts(worker, long) == 1
            assert worker.heard(late) == ""
            assert starts(worker, late) == 1


def test_a_warm_shutdown_may_outlast_the_timeout(redis_url: str, tmp_path: Path) -> None:
    key = unique()
    with (
        Worker(redis_url, tmp_path, TEST_VISIBILITY=str(VISIBILITY_S)) as leaving,
        Worker(
            redis_url, tmp_path, queue=leaving.queue, TEST_VISIBILITY=str(VISIBILITY_S)
        ) as other,
    ):
        take_no_more(other)
        result = leaving.send("hold_late", key)
        leaving.heard(key)
        other.tell("add_consumer", leaving.queue)
        assert leaving.process is not None
        leaving.process.send_signal(signal.SIGTERM)
        eventually(lambda: "Warm shutdown" in leaving.log, "the shutdown")
        outlast_the_timeout(other)
        leaving.go(key)
        assert leaving.process.wait(HANG_S) == 0
        assert result.get(timeout=HANG_S) > 0
        see_a_sweep(other)
        assert starts(other, key) == 1


def test_messages_of_a_killed_worker_are_redelivered_in_time(
    redis_url: str, tmp_path: Path, pool: str
) -> None:
    keys = [unique(), unique()]
    settings = {"pool": pool, "TEST_VISIBILITY": str(VISIBILITY_S)}
    with Worker(redis_url, tmp_path, **settings) as worker:
        results = [worker.send("hold_late", key) for key in keys]
        planned = worker.send("add", 1, 1, countdown=VISIBILITY_S)
        for key in keys:
            worker.heard(key)
        eventually(lambda: worker.ask("scheduled"), "the schedule")
        # The second worker sweeps at times of its own; the death of the first does not trigger it.
        with Worker(redis_url, tmp_path, queue=worker.queue, **settings) as second:
            worker.kill()
            began = time.monotonic()
            for key in keys:
                second.heard(key)
            assert time.monotonic() - began < VISIBILITY_S + 10
            for key, result in zip(keys, results, strict=True):
                second.go(key)
                assert result.get(timeout=HANG_S) > 0
            assert planned.get(timeout=HANG_S) == 2


def test_workers_that_do_not_renew_are_not_robbed(redis_url: str, tmp_path: Path) -> None:
    """One of Celery's own shares the queue; its task takes longer than the timeout of ours."""
    key = unique()
    with Worker(redis_url, tmp_path, pool="prefork", concurrency=1) as stock:
        result = stock.send("hold_late", key)
        stock.heard(key)
        take_no_more(stock)
        with Worker(
            redis_url, tmp_path, queue=stock.queue, TEST_VISIBILITY=str(VISIBILITY_S)
        ) as ours:
            outlast_the_timeout(ours)
            stock.go(key)
            assert result.get(timeout=HANG_S) > 0
            assert starts(stock, key) == 1, stock.log[-3000:] + "\nOURS " + ours.log[-3000:]


def test_a_prefork_neighbour_with_a_short_timeout_takes_nothing(
    redis_url: str, tmp_path: Path
) -> None:
    """Kombu knows no marks; live messages are renewed often enough for its sweep as well."""
    key = unique()
    with Worker(redis_url, tmp_path, concurrency=1) as ours:
        result = ours.send("hold_late", key)
        ours.heard(key)
        take_no_more(ours)
        timeout_s = 2 * VISIBILITY_S
        short = {"pool": "prefork", "TEST_VISIBILITY": str(timeout_s)}
        with Worker(redis_url, tmp_path, queue=ours.queue, **short) as stock:
            outlast_the_timeout(stock, timeout_s=timeout_s)
            ours.go(key)
            assert result.get(timeout=HANG_S) > 0
            assert starts(ours, key) == 1


def test_a_long_task_cancelled_by_a_lost_connection_is_redelivered(
    tmp_path: Path, pool: str
) -> None:
    name, path, until = unique(), tmp_path / "lines", tmp_path / "until"
    conf = json.dumps({"worker_cancel_long_running_tasks_on_connection_loss": True})
    settings = {"TEST_VISIBILITY": str(VISIBILITY_S), "TEST_CLIENT_NAME": name, "TEST_CONF": conf}
    with (
        PrivateServer(tmp_path / "redis") as server,
        Worker(server.url, tmp_path, pool=pool, concurrency=1, **settings) as worker,
    ):
        worker.send("write_late", str(path), str(until))
        eventually(path.exists, "the first run")
        eventually(lambda: worker.ask("active"), "the news of it")
        client = worker.app.backend.client
        for connection in client.client_list():
            if connection["name"] == name:
                client.client_kill_filter(_id=connection["id"])
        # The one child that there is is free again: the first run was stopped.
        eventually(lambda: path.read_text().startswith("began\n" * 2), "the second run")
        until.touch()
        eventually(lambda: not client.exists("unacked"), "its end")
        assert worker.stop() == 0
        # Prefork renews nothing: on a busy machine the visibility timeout brings it once more.
        assert path.read_text() == "began\n" * 2 or pool == "prefork"


def test_asking_for_health_takes_no_worker_its_messages(redis_url: str, tmp_path: Path) -> None:
    """As `celery inspect` does, whose process was given the short timeout too."""
    asking = Worker(redis_url, tmp_path, TEST_VISIBILITY=str(VISIBILITY_S))  # never started
    client, held = asking.app.backend.client, unique()
    client.zadd("unacked_index", {held: time.time() - 2 * VISIBILITY_S})
    command = [sys.executable, "-m", "celery", "-A", "tests.acceptance.app"]

    def ask(*words: str) -> bool:
        """Whether the message is still held after a request without an answer."""
        subprocess.run(
            [*command, *words, "-t", "0.2", "-d", "nobody"],
            cwd=ROOT,
            env=asking.environment,
            timeout=HANG_S,
            capture_output=True,
            check=False,
        )
        return client.zscore("unacked_index", held) is not None

    assert ask("capsule", "health")
    assert not ask("inspect", "ping")
    close(asking.app)


def test_a_message_that_a_full_redis_cannot_acknowledge_is_redelivered(tmp_path: Path) -> None:
    """The worker survives, and does not hold the message for the rest of its life."""
    with (
        PrivateServer(tmp_path / "redis") as server,
        Worker(server.url, tmp_path, TEST_VISIBILITY=str(VISIBILITY_S)) as worker,
    ):
        results = []
        for requeue, said in (
            (True, "message cannot be requeued now; it is redelivered when"),
            (False, "could not be reported"),
        ):
            key = unique()
            results.append(worker.send("reject_when_full", key, requeue))
            worker.heard(key)
            eventually(lambda said=said: said in worker.log, said)
            worker.app.backend.client.config_set("maxmemory", 0)
        assert [result.get(timeout=HANG_S) for result in results] == ["again", "again"]
        assert worker.stop() == 0


def test_a_timeout_that_cannot_be_kept_is_refused(redis_url: str, tmp_path: Path) -> None:
    worker = Worker(redis_url, tmp_path, TEST_VISIBILITY="0")
    with pytest.raises(AssertionError), worker:
        pass
    assert worker.process is not None
    assert worker.process.wait(HANG_S) != 0
    assert "['visibility_timeout'] = 0: must be a number of seconds from 1" in worker.log


def nothing_is_left(worker: Worker, result: Any) -> bool:
    client = worker.app.backend.client
    index = {tag.decode() for tag in client.zrange("unacked_index", 0, -1)}
    marks = {tag.decode() for tag in client.zrange("unacked_index.renewed", 0, -1)}
    unacked = [message for message in client.hvals("unacked") if result.id.encode() in message]
    return not unacked and marks <= index


def test_an_acknowledgement_leaves_nothing_behind(redis_url: str, tmp_path: Path) -> None:
    with Worker(redis_url, tmp_path, TEST_VISIBILITY=str(VISIBILITY_S)) as worker:
        for name, arguments in (("add", (1, 2)), ("count", (unique(), 1)), ("reject", (unique(),))):
            result = worker.send(name, *arguments)
            result.get(timeout=HANG_S)
            eventually(lambda result=result: nothing_is_left(worker, result), f"the end of {name}")
        key = unique()
        worker.send("hold_late", key)
        worker.heard(key)
        ttl = worker.app.backend.client.ttl
        eventually(lambda: ttl("unacked_index.renewed") > 0, "a time to live")
        worker.go(key)
