"""The app of the day: its tasks write down in Redis what they did, beside what Celery stores."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

from tests.acceptance.app import app

__all__ = ["app"]

_LATE = {"acks_late": True, "reject_on_worker_lost": True}
_eaten = bytearray()


def note(task: Any, what: str) -> None:
    """The task's own account of itself."""
    app.backend.client.rpush(f"noted:{task.request.id}", what)


@app.task(name="work", bind=True)
def work(self: Any, seconds: float) -> str:
    note(self, "began")
    time.sleep(seconds)
    note(self, "ended")
    return "done"


@app.task(name="work_late", bind=True, **_LATE)
def work_late(self: Any, seconds: float) -> str:
    note(self, "began")
    time.sleep(seconds)
    note(self, "ended")
    return "done"


@app.task(name="await_late", bind=True, **_LATE)
async def await_late(self: Any, seconds: float) -> str:
    note(self, "began")
    await asyncio.sleep(seconds)
    note(self, "ended")
    return "done"


@app.task(name="be_tidy", bind=True, **_LATE)
def be_tidy(self: Any, seconds: float) -> str:
    """Has time to leave, and takes it."""
    note(self, "began")
    try:
        time.sleep(seconds)
    except SoftTimeLimitExceeded:
        note(self, "ended")
        return "tidied"
    note(self, "ended")
    return "done"


@app.task(name="go_wrong", bind=True)
def go_wrong(self: Any) -> None:
    note(self, "began")
    note(self, "failed")
    raise ValueError("as meant")


@app.task(name="try_twice", bind=True, max_retries=3)
def try_twice(self: Any) -> str:
    note(self, "began")
    if not self.request.retries:
        raise self.retry(countdown=1)
    note(self, "ended")
    return "done"


@app.task(name="die_once", bind=True, **_LATE)
def die_once(self: Any) -> str:
    """Its message is delivered again, and then it lives."""
    note(self, "began")
    if int(app.backend.client.llen(f"noted:{self.request.id}")) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    note(self, "ended")
    return "done"


@app.task(name="grow_fat", bind=True, **_LATE)
def grow_fat(self: Any, megabytes: int) -> str:
    """Its child keeps what it ate."""
    global _eaten  # noqa: PLW0603 - what a leak is
    note(self, "began")
    _eaten = bytearray(megabytes << 20)
    note(self, "ended")
    return "done"
