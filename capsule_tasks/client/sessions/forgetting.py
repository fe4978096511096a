"""Erase named sessions, and all sessions of a tenant: what Redis and the result backend have."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from capsule_tasks.client.configuration import named_session_settings
from capsule_tasks.client.sessions.execution import SessionExecution
from capsule_tasks.client.watching.results import keeps_results, translated_faults
from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.errors import SessionUnknown
from capsule_tasks.settings import HistorySettings
from capsule_tasks.storage.history.history import History

_BATCH_SIZE = 100
_GRACE_S = 1.0
_MAX_STOP_S = 10.0
"""How long the worker that runs a call of a session may take to stop it. A dead one never does: its
executions are reaped."""


async def forget_session(app: Any, session_id: str) -> None:
    """Erase a session: namespace, checkpoint, calls with their events and results, history.

    Safe to repeat, for example if Redis became unavailable in the middle of it. The call that runs
    is cancelled; the owner, if there is one, finds out and ends the child.
    """
    watcher = await watch_thread.watcher(app)
    store = watcher.sessions
    try:
        begun_call = (await store.info(session_id)).begun_call
    except SessionUnknown:
        begun_call = ""  # it was closed: its calls and its history may still be there
    batch: list[str] = []
    async for call_id in store.calls_of(session_id):
        if call_id != begun_call:
            batch.append(call_id)
        if len(batch) >= _BATCH_SIZE:
            await _forget_calls(app, batch)
            batch = []
    await _forget_calls(app, batch)
    prefix = named_session_settings(app).prefix
    history = History(session_id, watcher.connection, settings=HistorySettings(prefix=prefix))
    await history.clear_session()
    await watcher.checkpoints.delete(session_id)
    # Last, since it names what had to be erased before.
    await store.forget_session(session_id)
    if begun_call:
        await _stop(app, begun_call)
        await _forget_calls(app, [begun_call])
    await store.index.record(dropped=[session_id])


async def _stop(app: Any, call_id: str) -> None:
    """Cancel the call that runs: its owner looks after the session when it has ended."""
    call = SessionExecution(call_id, app=app)
    await call.acancel(_GRACE_S)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_MAX_STOP_S):
            seen = await call.atail(1)
            async for _ in call.aevents(seen[-1].id if seen else None):
                pass


async def forget_tenant(app: Any, tenant: str) -> None:
    """Erase all sessions of a tenant, and what it used."""
    tenants = (await watch_thread.watcher(app)).sessions.tenants
    session_ids = [session_id async for session_id in tenants.sessions_of(tenant)]
    for session_id in session_ids:
        await forget_session(app, session_id)
    await tenants.forget(tenant)


async def _forget_calls(app: Any, call_ids: Sequence[str]) -> None:
    await (await watch_thread.watcher(app)).store.forget(call_ids)
    if keeps_results(app):
        await asyncio.to_thread(_forget_results, app, call_ids)


def _forget_results(app: Any, call_ids: Sequence[str]) -> None:
    with translated_faults():
        for call_id in call_ids:
            app.backend.forget(call_id)
