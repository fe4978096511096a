"""The app of the chaos tests of named sessions."""

from __future__ import annotations

import os

from celery import Celery, signals

from capsule_tasks import Capsule

URL = os.environ.get("REDIS_URL", "redis://localhost")

app = Celery("tests.chaos.code_app", broker=URL, backend=URL)
Capsule(app)
app.conf.update(
    task_default_queue=os.environ.get("TEST_QUEUE", "celery"),
    broker_connection_retry_on_startup=True,
    broker_transport_options={"client_name": os.environ.get("TEST_CLIENT_NAME")},
    result_backend_always_retry=True,
    capsule_lease_s=1.0,
    capsule_code_profiles={
        "sandbox": {"max_live": int(os.environ.get("TEST_MAX_LIVE", "40")), "checkpoint_every": 5},
    },
)


@signals.worker_ready.connect
def tell_ready(**_: object) -> None:
    if descriptor := os.environ.pop("TEST_READY_FD", None):
        os.write(int(descriptor), b"ready\n")
