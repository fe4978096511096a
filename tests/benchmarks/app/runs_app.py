"""The Celery app of `scripts/bench runs`: agents whose runs wait, for a person or for a model."""

from __future__ import annotations

import os

from agents import set_tracing_disabled
from celery import Celery
from redis import Redis

from capsule_tasks import Capsule
from tests.benchmarks.app.scripted_agents import agent

_URL = os.environ.get("REDIS_URL", "redis://localhost/0")

app = Celery("runs_app", broker=_URL, backend=_URL)
app.conf.update(
    worker_pool="capsule_tasks.taskpool:TaskPool",
    broker_connection_retry_on_startup=True,
    capsule_redis_url=os.environ.get("BENCH_STREAMS_URL"),
)
set_tracing_disabled(True)
_counter = Redis.from_url(_URL)

runs = Capsule(app).runs
runs.register("approved", agent(needs_approval=True))
runs.register("waiting", agent(waits=lambda: _counter.incr("waiting")), max_turns=None)
