"""Coroutine tasks of the acceptance app."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

from tests.acceptance.app import OwnError, app, mark, request


@app.task(name="async_deaf")
async def async_deaf(key: str) -> None:
    mark(key)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


@app.task(name="async_run_out_of_memory", acks_late=True)
async def async_run_out_of_memory() -> None:
    await asyncio.sleep(0)
    raise MemoryError("too much")


colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")


@app.task(name="nap", bind=True)
async def nap(self: Any, seconds: float) -> list[str]:
    before = colour.get()
    colour.set(self.request.id)
    await asyncio.sleep(seconds)
    assert app.current_task is not None
    return [self.request.id, colour.get(), before, app.current_task.request.id]


@app.task(name="async_blip")
async def async_blip(number: int, seconds: float = 0, key: str = "") -> int:
    if key:
        mark(key, number)
    await asyncio.sleep(seconds)
    return number


@app.task(name="async_sleep_within", soft_time_limit=0.4)
async def async_sleep_within(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


@app.task(name="gather", bind=True)
async def gather(self: Any, key: str, size: int) -> int:
    """Ends when `size` of them have begun: it does if, and only if, they run beside each other."""
    client = app.backend.client
    client.incr(key)
    while int(client.get(key)) < size:
        await asyncio.sleep(0.02)
    return os.getpid()


@app.task(name="thread_names")
async def thread_names(size: int) -> list[str]:
    """Threads of blocking functions, of which `size` end together: so many threads, or it hangs."""
    together = threading.Barrier(size)

    def block() -> str:
        together.wait()
        return threading.current_thread().name

    names = await asyncio.gather(*(asyncio.to_thread(block) for _ in range(4 * size)))
    return sorted(set(names))


@app.task(name="async_retry", bind=True, max_retries=3)
async def async_retry(self: Any, times: int) -> int:
    await asyncio.sleep(0)
    if self.request.retries < times:
        raise self.retry(countdown=0)
    return int(self.request.retries)


@app.task(
    name="async_autoretry",
    bind=True,
    autoretry_for=(KeyError,),
    retry_backoff=False,
    max_retries=3,
    default_retry_delay=0,
)
async def async_autoretry(self: Any, times: int) -> int:
    await asyncio.sleep(0)
    if self.request.retries < times:
        raise KeyError("again")
    return int(self.request.retries)


@app.task(name="async_fail")
async def async_fail() -> None:
    await asyncio.sleep(0)
    raise OwnError(4, hint="awaited")


@app.task(name="async_hold", bind=True)
async def async_hold(self: Any, key: str) -> str:
    try:
        mark(key, os.getpid())
        await asyncio.sleep(60)
    except SoftTimeLimitExceeded:
        await asyncio.sleep(0)
        return "tidied"
    finally:
        mark(f"{key}:finally")
    return "slept"


@app.task(name="async_late", acks_late=True, reject_on_worker_lost=True)
async def async_late(key: str) -> int:
    """Run until the worker is killed; the second delivery ends."""
    times = int(app.backend.client.incr(f"times:{key}"))
    mark(key, os.getpid())
    if times == 1:
        await asyncio.sleep(60)
    return times


@app.task(name="async_parent", bind=True)
async def async_parent(self: Any, seconds: float) -> list[str]:
    await asyncio.sleep(seconds)
    child = request.delay()
    return [self.request.id, child.id]


@app.task(name="async_say")
async def async_say(word: str) -> None:
    print(f"awaited {word}")
    await asyncio.sleep(0)
