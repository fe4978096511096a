"""An app without a result backend, which is Celery's default."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from celery import Celery, signals

app = Celery("tests.acceptance.bare_app", broker=os.environ.get("REDIS_URL", "redis://localhost"))
app.conf.update(
    worker_pool="capsule_tasks.taskpool:TaskPool",
    task_default_queue=os.environ.get("TEST_QUEUE", "celery"),
    broker_connection_retry_on_startup=True,
)


@signals.worker_ready.connect
def tell_ready(**_: Any) -> None:
    if descriptor := os.environ.get("TEST_READY_FD"):
        os.write(int(descriptor), b"ready\n")


@app.task(name="busy")
def busy() -> None:
    sys.stdout.write("at work\n")
    time.sleep(3600)
