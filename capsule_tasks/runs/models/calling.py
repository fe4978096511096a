"""Calls a model once, with the time limit and the retries of its settings.

A retry is a matter of this call alone: whoever called gets one reply or one error, and nothing of
the attempts before is stored.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from time import perf_counter
from typing import Any

from msgspec.structs import replace

from capsule_tasks.errors import ModelFailed
from capsule_tasks.errors.base import reason_of
from capsule_tasks.runs.models.model import (
    Model,
    ModelDelta,
    ModelReply,
    ModelRequest,
    ModelRetries,
)

_log = logging.getLogger(__name__)

PASSES = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt)
"""What callers of a program's functions let pass. Any other error, an exit too, is the function's
own failure, and ends neither the process nor what else runs in it."""

DEFAULT_RETRIES = ModelRetries()
"""For settings that have none."""


async def call_model(
    model: Model,
    request: ModelRequest,
    *,
    on_delta: Callable[[ModelDelta], None] | None = None,
    on_discarded: Callable[[ModelFailed], None] | None = None,
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
) -> ModelReply:
    """The reply of a model; it is streamed if there is an `on_delta`.

    Raises ModelFailed, also for errors of the model that are of another class. Before a streamed
    attempt is made again whose deltas were shown, `on_discarded` gets the failure. A cancel ends
    the call at once, also within a pause.
    """
    retries = request.settings.retries or DEFAULT_RETRIES
    attempt = 1
    while True:
        stream = _Stream(on_delta) if on_delta is not None else None
        try:
            return await _attempt(model, request, stream)
        except ModelFailed as error:
            pause_s = pause_after(error, attempt, retries)
            if pause_s is None:
                raise
            failure = error
        if stream is not None and stream.has_deltas and on_discarded is not None:
            on_discarded(failure)
        attempt += 1
        text = "%s; making attempt %d of %d in %.1f s"
        _log.warning(text, failure, attempt, retries.attempts, pause_s)
        await sleep(pause_s)


def pause_after(error: ModelFailed, attempt: int, retries: ModelRetries) -> float | None:
    """The pause between this failed attempt and the next one, or None if there is no next one.

    A server that asks for a longer pause than the settings allow gets no further attempt: before
    the end of that pause it would be refused.
    """
    asked_s = error.retry_after_s or 0.0
    if not error.is_retryable or attempt >= retries.attempts or asked_s > retries.max_pause_s:
        return None
    longest_s = min(retries.pause_s * 2.0 ** min(attempt - 1, 60), retries.max_pause_s)
    jittered_s = longest_s * random.uniform(0.5, 1.0)  # noqa: S311  no secret
    return max(jittered_s, asked_s)


async def _attempt(model: Model, request: ModelRequest, stream: _Stream | None) -> ModelReply:
    timeout_s = request.settings.timeout_s
    began_at = perf_counter()
    limit = asyncio.timeout(timeout_s) if timeout_s is not None else None
    try:
        if limit is None:  # a context manager that does nothing would still cost its microseconds
            reply = await _answer(model, request, stream)
        else:
            async with limit:
                reply = await _answer(model, request, stream)
    except ModelFailed:
        raise
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        raise ModelFailed(name_of(model), "it was cancelled by itself") from error
    except PASSES:
        raise
    except BaseException as error:
        if limit is not None and limit.expired():
            why = f"it took longer than {timeout_s} s"
            raise ModelFailed(name_of(model), why, is_retryable=True) from error
        raise ModelFailed(name_of(model), f"{type(error).__name__}: {reason_of(error)}") from error
    made: object = reply
    if not isinstance(made, ModelReply):
        raise ModelFailed(name_of(model), f"it returned {made!r:.100}, not a ModelReply")
    took_ms = round((perf_counter() - began_at) * 1000)
    if took_ms and not reply.spent.time_ms:
        return replace(reply, spent=replace(reply.spent, time_ms=took_ms))
    return reply


async def _answer(model: Model, request: ModelRequest, stream: _Stream | None) -> ModelReply:
    if stream is None:
        return await model.get_response(request)
    parts = model.stream_response(request)
    async with _closing(parts):
        async for part in parts:
            if isinstance(part, ModelReply):
                return part
            stream.show(part)
    raise ModelFailed(name_of(model), "its stream ended without a reply", is_retryable=True)


class _Stream:
    """The watcher of an attempt's deltas, and whether there were any."""

    def __init__(self, show: Callable[[ModelDelta], None]) -> None:
        self._show = show
        self.has_deltas = False

    def show(self, delta: ModelDelta) -> None:
        self.has_deltas = True
        self._show(delta)


def _closing(parts: AsyncIterator[Any]) -> AbstractAsyncContextManager[Any]:
    """Close the stream at its end: a generator's connection would stay open until it is freed."""
    return aclosing(parts) if hasattr(parts, "aclose") else nullcontext()


def name_of(model: Model) -> str:
    """The name of a model in errors and log lines."""
    return str(getattr(model, "name", type(model).__name__))
