"""An app whose workers run code that producers send."""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery, signals
from celery.result import allow_join_result

from capsule_tasks import Capsule

CALL_LIMIT_S = 30
REDIS_URL = os.environ.get("REDIS_URL", "redis://localhost")

# Its tasks are not shared with the apps of other tests in a process that imports this module.
app = Celery("tests.acceptance.others.code_app", broker=REDIS_URL, backend=REDIS_URL)
app.conf.update(
    task_default_queue=os.environ.get("TEST_QUEUE", "celery"),
    broker_transport_options={"visibility_timeout": 2, "unacked_restore_interval": 0.2},
    worker_send_task_events=True,
    capsule_code_profiles={
        "sandbox": {},
        "tight": {
            "limits": {"cpu_time_s": 0.5, "memory_bytes": 512 * 1024**2},
            "warmup": "import os; warmed = os.getpid()",
        },
        "trusted": {"isolation": "none", "imports": ["json"], "warm": 0},
        "broken": {"warmup": "1 / 0"},
    },
)
app.conf.update(json.loads(os.environ.get("TEST_CONF", "{}")))
capsule = Capsule(app)


@signals.worker_ready.connect
def tell_ready(**_: Any) -> None:
    os.write(int(os.environ["TEST_READY_FD"]), b"ready\n")


@app.task(name="total", shared=False)
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(name="count", shared=False)
def count(session_id: str) -> list[int]:
    """Call a named session before and after the test lets the task go on, and then a new one."""
    session, new = capsule.session(session_id), capsule.session(f"{session_id}-new")
    with allow_join_result():
        counted = [session.execute("n = 1\nn").get(timeout=CALL_LIMIT_S)]
        app.backend.client.rpush(f"mark:{session_id}", "called")
        app.backend.client.blpop(f"go:{session_id}", CALL_LIMIT_S)
        counted.append(session.execute("n += 1\nn").get(timeout=CALL_LIMIT_S))
        return [*counted, new.execute("3").get(timeout=CALL_LIMIT_S)]


@app.task(name="explain", shared=False)
def explain(request: Any, error: BaseException, traceback: str) -> None:
    """An errback: whoever waits for the mark learns which error came."""
    app.backend.client.rpush(f"mark:{request.id}", f"{type(error).__name__}: {error}")
