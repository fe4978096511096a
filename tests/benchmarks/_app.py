"""The Celery app of the task benchmarks."""

from __future__ import annotations

import asyncio
import os

from celery import Celery

_URL = os.environ.get("REDIS_URL", "redis://localhost/0")


def streams_url(url: str) -> str:
    """A database of their own: what is drained is counted by the keys of the other."""
    return url.rpartition("/")[0] + "/1"


app = Celery("tests.benchmarks._app", broker=_URL, backend=_URL)
app.conf.update(
    worker_pool=os.environ.get("BENCH_POOL", "capsule_tasks.taskpool:TaskPool"),
    broker_connection_retry_on_startup=True,
    task_acks_late=True,
    capsule_redis_url=streams_url(_URL),
    capsule_streams=os.environ.get("BENCH_STREAMS", "1") == "1",
)


@app.task(name="add")
def add(x: int, y: int) -> int:
    return x + y


@app.task(name="nap")
async def nap(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds
