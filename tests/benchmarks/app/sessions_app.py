"""The Celery app of `scripts/bench sessions`: named sessions, and a task that does nothing."""

from __future__ import annotations

import os

from celery import Celery

from capsule_tasks import Capsule

_URL = os.environ.get("REDIS_URL", "redis://localhost/0")

app = Celery("sessions_app", broker=_URL, backend=_URL)
Capsule(app)
app.conf.update(
    broker_connection_retry_on_startup=True,
    capsule_redis_url=os.environ.get("BENCH_STREAMS_URL"),
    capsule_code_profiles={
        "sandbox": {"max_live": 40, "imports": ["numpy"]},
        "alone": {"max_live": 1},  # the next session evicts the one that is here
    },
)


@app.task(name="nothing")
def nothing() -> None:
    """Do nothing, so that its latency is that of the way to a session and back."""
