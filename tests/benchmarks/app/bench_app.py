"""The Celery app of the benchmarks with workers.

In a folder of its own, which is a worker's working directory: the package is then the one of the
worker's own environment, be it of this commit or of another (`scripts/bench compare`).
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from celery import Celery

_URL = os.environ.get("REDIS_URL", "redis://localhost/0")

app = Celery("bench_app", broker=_URL, backend=_URL)
app.conf.update(
    worker_pool=os.environ.get("BENCH_POOL", "capsule_tasks.taskpool:TaskPool"),
    broker_connection_retry_on_startup=True,
    task_acks_late=os.environ.get("BENCH_ACKS_LATE", "1") == "1",
    capsule_redis_url=os.environ.get("BENCH_STREAMS_URL"),
    capsule_streams=os.environ.get("BENCH_STREAMS", "1") == "1",
)


@app.task(name="add")
def add(x: int, y: int) -> int:
    return x + y


@app.task(name="nap")
async def nap(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


@app.task(name="clock")
def clock(count: int, pause_s: float) -> None:
    """Print what time it is, so that a watcher knows how old it is."""
    for _ in range(count):
        print(f"{time.time():.6f}")
        time.sleep(pause_s)


@app.task(name="flood")
def flood(seconds: float) -> None:
    line = "x" * 4095 + "\n"
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sys.stdout.write(line)


@app.task(name="spin")
def spin() -> None:
    while True:
        time.sleep(0.01)
