"""Tasks with a step, that lose their process at a chosen moment of their first delivery."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import capsule_tasks
from tests.acceptance.app import app

__all__ = ["app"]


def lose(key: str, moment: str) -> None:
    """Kill this process, once for each key and moment."""
    if app.backend.client.set(f"lost:{key}:{moment}", 1, nx=True):
        os.kill(os.getpid(), signal.SIGKILL)


def charge(key: str, moment: str) -> int:
    made: int = app.backend.client.incr(f"effects:{key}")
    if moment == "within":
        lose(key, moment)
    return made


async def charge_later(key: str, moment: str) -> int:
    await asyncio.sleep(0)
    return charge(key, moment)


@app.task(name="pay", acks_late=True, reject_on_worker_lost=True)
def pay(key: str, moment: str, **options: Any) -> int:
    if moment == "before":
        lose(key, moment)
    made: int = capsule_tasks.step("charge", charge, key, moment, **options)
    if moment == "behind":
        lose(key, moment)
    return made


@app.task(name="async_pay", acks_late=True, reject_on_worker_lost=True)
async def async_pay(key: str, moment: str, **options: Any) -> int:
    if moment == "before":
        lose(key, moment)
    made: int = await capsule_tasks.step("charge", charge_later, key, moment, **options)
    if moment == "behind":
        lose(key, moment)
    return made
