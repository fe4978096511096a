"""A worker to measure, and tasks that wait for it: the same for every pool and every commit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from celery import Celery

from tests.benchmarks._measure import cpu_s

WAIT_S = 120
_APP = Path(__file__).parent / "app"
_POOLS = {
    "capsule": "capsule_tasks.taskpool:TaskPool",
    "prefork": "prefork",
    "threads": "threads",
}
_UNCOUNTED = 500
"""Tasks done before the clock starts: children are being forked, caches filled."""


@dataclass(frozen=True)
class Kind:
    """Which worker is started, with which settings."""

    pool: str = "capsule"
    streams: bool = True
    acks_late: bool = True
    python: str = sys.executable
    """The interpreter, and with it the environment and the commit of the package."""
    app: str = "bench_app"


CAPSULE = Kind()
PREFORK = Kind("prefork")


@contextlib.contextmanager
def worker(
    url: str, kind: Kind = CAPSULE, concurrency: int = 2, queue: str = "celery"
) -> Iterator[int]:
    """The pid of a worker that is being started; it has ended when the block is left."""
    command = [kind.python, "-m", "celery", "-A", kind.app, "worker"]
    command += ["-c", str(concurrency), "-l", "ERROR", "-Q", queue]
    command += ["--without-mingle", "--without-gossip", "--without-heartbeat"]
    environment = {
        "REDIS_URL": url,
        "BENCH_POOL": _POOLS[kind.pool],
        "BENCH_STREAMS_URL": streams_url(url),
        "BENCH_STREAMS": str(int(kind.streams)),
        "BENCH_ACKS_LATE": str(int(kind.acks_late)),
    }
    process = subprocess.Popen(
        command,
        cwd=_APP,
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def streams_url(url: str) -> str:
    """A database of their own: finished tasks are counted by the keys of the other."""
    return url.rpartition("/")[0] + "/1"


def producer(url: str) -> Celery:
    app = Celery("bench", broker=url, backend=url, set_as_current=False)
    app.conf.capsule_redis_url = streams_url(url)
    return app


class Backlog:
    """Tasks that wait in the queue when a worker starts; published once, put back for each."""

    def __init__(self, app: Celery, count: int) -> None:
        self._client: Any = app.backend.client
        self._client.flushall()
        self._server_pid: int = self._client.info("server")["process_id"]
        with app.producer_pool.acquire(block=True) as channel:
            for number in range(count):
                app.send_task("add", (number, 1), producer=channel)
        self._messages = self._client.lrange("celery", 0, -1)

    def restore(self) -> None:
        """Empty the server but for the queue."""
        self._client.flushall()
        self._client.rpush("celery", *self._messages)

    def drain(self, pid: int) -> tuple[float, float]:
        """Tasks per second, and CPU microseconds per task: all processes of the worker, and Redis.

        The worker has just been started.
        """
        count = len(self._messages)
        begun_at = until_keys(self._client, _UNCOUNTED)
        first, cpu_before_s = self._client.dbsize(), self._cpu_s(pid)
        ended_at = until_keys(self._client, count)
        used_s = self._cpu_s(pid) - cpu_before_s
        done = count - first
        return done / (ended_at - begun_at), used_s / done * 1e6

    def _cpu_s(self, pid: int) -> float:
        return tree_cpu_s(pid) + cpu_s([self._server_pid])


def tree_cpu_s(pid: int) -> float:
    """CPU seconds of a process and all its descendants, of those that have ended, too."""
    used_s = 0.0
    for process in tree(pid):
        ended = process.cpu_times()
        used_s += cpu_s([process.pid]) + ended.children_user + ended.children_system
    return used_s


def tree(pid: int) -> list[psutil.Process]:
    top = psutil.Process(pid)
    return [top, *top.children(recursive=True)]


def until_keys(client: Any, count: int) -> float:
    """When so many results were stored; the queue and its relatives are few keys more."""
    deadline = time.monotonic() + WAIT_S
    while client.dbsize() < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"only {client.dbsize()} of {count} results after {WAIT_S} s")
        time.sleep(0.005)
    return time.perf_counter()
