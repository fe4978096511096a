"""Coroutine tasks that end by asyncio's CancelledError, without anybody having stopped them."""

from __future__ import annotations

import asyncio

from tests.acceptance.app import app, mark


@app.task(name="cancel_itself")
async def cancel_itself() -> None:
    raise asyncio.CancelledError("by itself")


@app.task(name="await_cancelled")
async def await_cancelled() -> None:
    """As a pool of connections does that is closed while somebody waits for one."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel("at once")
    await future


@app.task(
    name="retry_cancelled",
    bind=True,
    autoretry_for=(asyncio.CancelledError,),
    retry_backoff=False,
    default_retry_delay=0,
)
async def retry_cancelled(self) -> int:
    if not self.request.retries:
        raise asyncio.CancelledError
    return int(self.request.retries)


class Watching(app.Task):
    def on_failure(self, exc, task_id, args, kwargs, einfo) -> None:
        mark(f"failed:{task_id}", isinstance(exc, asyncio.CancelledError))


@app.task(name="watch_cancelled", base=Watching)
async def watch_cancelled() -> None:
    raise asyncio.CancelledError
