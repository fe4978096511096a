"""Celery tasks through this pool, beside Celery's own prefork and threads, on the same Redis.

Every figure is the median over rounds in which the pools take turns, so that a machine that slows
down slows all of them.

- *drain*: 10,000 tasks that wait in the queue when the worker starts; tasks per second.
- *steady*: tasks per second while one producer keeps 50 of them on their way.
- *latency*: `.delay().get()`, one after another.
- *memory*: PSS of the worker's whole tree with 8 children that have all worked.
- *async*: 1,000 tasks that await one second, from the first `delay` to the last result.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from celery import Celery

from capsule_tasks.testing.servers import PrivateServer
from tests.benchmarks._measure import Bar, p50_ms, p99_ms, report, timed, use_plain_interpreters

ROOT = Path(__file__).parent.parent.parent
POOLS = {
    "capsule": "capsule_tasks.taskpool:TaskPool",
    "prefork": "prefork",
    "threads": "threads",
}
BARS = (
    Bar("drain_over_prefork", ">=", 1.0),
    Bar("latency_p50_over_prefork", "<=", 1.0),
    Bar("memory_pss_over_prefork", "<=", 1.15),
    Bar("async_1000_sleeps_s", "<=", 4.0),
)
_ROUNDS = 3
_DRAINED = 10_000
_UNCOUNTED = 500
"""Done before the clock starts: children are being forked, caches filled."""
_CALLS = 400
_STEADY = 4_000
_IN_FLIGHT = 50
_SLEEPS = 1_000
_WAIT_S = 120


@contextlib.contextmanager
def worker(url: str, pool: str, concurrency: int = 2) -> Iterator[int]:
    command = [sys.executable, "-m", "celery", "-A", "tests.benchmarks._app", "worker"]
    command += ["-c", str(concurrency), "-l", "ERROR"]
    command += ["--without-mingle", "--without-gossip", "--without-heartbeat"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "REDIS_URL": url, "BENCH_POOL": POOLS[pool]},
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


def producer(url: str) -> Celery:
    return Celery("bench", broker=url, backend=url, set_as_current=False)


def drain(url: str, pool: str) -> float:
    app = producer(url)
    client = app.backend.client
    client.flushall()
    with app.producer_pool.acquire(block=True) as channel:
        for number in range(_DRAINED):
            app.send_task("add", (number, 1), producer=channel)
    with worker(url, pool):
        begun_at = until_keys(client, _UNCOUNTED)
        first = client.dbsize()
        ended_at = until_keys(client, _DRAINED)
    app.close()
    return float((_DRAINED - first) / (ended_at - begun_at))


def until_keys(client: Any, count: int) -> float:
    """When so many results were stored; the queue and its relatives are few keys more."""
    deadline = time.monotonic() + _WAIT_S
    while client.dbsize() < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"only {client.dbsize()} of {count} results after {_WAIT_S} s")
        time.sleep(0.005)
    return time.perf_counter()


def latency_and_steady(url: str, pool: str) -> tuple[list[float], float]:
    app = producer(url)
    app.backend.client.flushall()
    took: list[float] = []
    with worker(url, pool):
        for _ in range(50):
            app.send_task("add", (1, 1)).get(timeout=_WAIT_S)
        for number in range(_CALLS):
            with timed(took):
                app.send_task("add", (number, 1)).get(timeout=_WAIT_S)
        begun = time.perf_counter()
        waiting: list[Any] = []
        for number in range(_STEADY):
            if len(waiting) == _IN_FLIGHT:
                waiting.pop(0).get(timeout=_WAIT_S)
            waiting.append(app.send_task("add", (number, 1)))
        for result in waiting:
            result.get(timeout=_WAIT_S)
        rate = _STEADY / (time.perf_counter() - begun)
    app.close()
    return took, rate


def memory_pss(url: str, pool: str) -> float:
    app = producer(url)
    app.backend.client.flushall()
    with worker(url, pool, concurrency=8) as pid:
        results = [app.send_task("add", (number, 1)) for number in range(800)]
        for result in results:
            result.get(timeout=_WAIT_S)
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        total = sum(process.memory_full_info().pss for process in tree)
    app.close()
    return float(total)


def sleeps(url: str) -> float:
    app = producer(url)
    app.backend.client.flushall()
    with worker(url, "capsule"):
        app.send_task("nap", (0.0,)).get(timeout=_WAIT_S)
        begun = time.perf_counter()
        results = [app.send_task("nap", (1.0,)) for _ in range(_SLEEPS)]
        for result in results:
            result.get(timeout=_WAIT_S)
        took = time.perf_counter() - begun
    app.close()
    return took


def measure(url: str) -> dict[str, float]:
    figures: dict[str, float] = {}
    drains: dict[str, list[float]] = {pool: [] for pool in POOLS}
    calls: dict[str, list[float]] = {pool: [] for pool in POOLS}
    steady: dict[str, list[float]] = {pool: [] for pool in POOLS}
    for _ in range(_ROUNDS):
        for pool in POOLS:
            drains[pool].append(drain(url, pool))
        for pool in POOLS:
            took, rate = latency_and_steady(url, pool)
            calls[pool] += took
            steady[pool].append(rate)
    for pool in POOLS:
        figures[f"drain_{pool}_per_s"] = median(drains[pool])
        figures[f"steady_{pool}_per_s"] = median(steady[pool])
        figures[f"latency_{pool}_p50_ms"] = p50_ms(calls[pool])
        figures[f"latency_{pool}_p99_ms"] = p99_ms(calls[pool])
    for pool in ("capsule", "prefork"):
        figures[f"memory_{pool}_pss_mib"] = memory_pss(url, pool) / 2**20
    figures["async_1000_sleeps_s"] = sleeps(url)
    figures["async_sleep_tasks_per_s"] = _SLEEPS / figures["async_1000_sleeps_s"]
    for name, mine, theirs in (
        ("drain_over_prefork", "drain_capsule_per_s", "drain_prefork_per_s"),
        ("steady_over_prefork", "steady_capsule_per_s", "steady_prefork_per_s"),
        ("latency_p50_over_prefork", "latency_capsule_p50_ms", "latency_prefork_p50_ms"),
        ("memory_pss_over_prefork", "memory_capsule_pss_mib", "memory_prefork_pss_mib"),
    ):
        figures[name] = figures[mine] / figures[theirs]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench tasks")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument(
        "--rounds", type=int, default=_ROUNDS, help="how often the pools take turns"
    )
    arguments = parser.parse_args()
    globals()["_ROUNDS"] = arguments.rounds
    use_plain_interpreters()
    with tempfile.TemporaryDirectory() as directory, PrivateServer(Path(directory)) as server:
        figures = measure(server.url)
    report(figures, BARS, as_json=arguments.json)


if __name__ == "__main__":
    main()
