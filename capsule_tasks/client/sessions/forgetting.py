"""Erase named sessions, and all sessions of a tenant: what Redis and the result backend have.

A session is forgotten in this order, so that nothing is written after it was erased, and nobody
waits for what will never come:

1. It is taken from its owner. From then on nobody can own it, use it, or switch its checkpoint.
2. Each unfinished call ends with SessionForgotten, in its stream and in the result backend.
3. The owner is rung, kills the child, and leaves. One that is dead or silent is not waited for.
4. Durable runs of the session are cancelled, and those that run have some time to end. Unfinished
   ones end with RunForgotten, as calls do, and all are erased: their owners can write no more.
5. All the rest is erased: calls that had ended, history, checkpoint, and last the record.

Every step can be repeated; until the last one has been made the session stays as step 1 left it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from capsule_tasks.client.configuration import named_session_settings
from capsule_tasks.client.watching.results import keeps_results, stored_end, translated_faults
from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.client.watching.watcher import ExecutionWatcher, wait_for_ring
from capsule_tasks.errors import (
    ExecutionEnded,
    RunEnded,
    RunForgotten,
    RunNotFound,
    RunTimeout,
    SessionForgotten,
)
from capsule_tasks.protocol.calls import decode_call
from capsule_tasks.protocol.events import CancelCommand, Ended, Outcome
from capsule_tasks.settings import HistorySettings, RunSettings
from capsule_tasks.storage.executions.forgetting import forget, forget_unfinished
from capsule_tasks.storage.history.history import History
from capsule_tasks.storage.runs.store import RunStore
from capsule_tasks.storage.runs.types import ENDED, RunRecord
from capsule_tasks.storage.sessions.types import BegunCall

T = TypeVar("T")

_BATCH_SIZE = 100
_CHECK_S = 1.0
"""A doorbell may be lost: the owner is rung again after so long."""
_MAX_LEAVE_S = 10.0
"""How long the worker that has the session may take to leave it."""


async def forget_session(app: Any, session_id: str) -> None:
    """Erase a session: namespace, checkpoint, calls and runs with their events, history."""
    watcher = await watch_thread.watcher(app)
    store = watcher.sessions
    owner = await store.start_forgetting(session_id)
    unfinished = await _end_calls(app, watcher, session_id)
    if owner:
        await _wait_until_left(watcher, session_id)
    await _forget_calls(app, watcher, session_id, unfinished)
    prefix = named_session_settings(app).prefix
    runs = RunStore(watcher.connection, settings=RunSettings(prefix=prefix))
    await _forget_runs(app, watcher, runs, session_id)
    history = History(session_id, watcher.connection, settings=HistorySettings(prefix=prefix))
    await history.clear_session()
    await watcher.checkpoints.delete(session_id)
    # Last, since it names what had to be erased before.
    await store.forget_session(session_id)


async def forget_tenant(app: Any, tenant: str) -> None:
    """Erase all sessions of a tenant, and what it used."""
    tenants = (await watch_thread.watcher(app)).sessions.tenants
    session_ids = [session_id async for session_id in tenants.sessions_of(tenant)]
    for session_id in session_ids:
        await forget_session(app, session_id)
    await tenants.forget(tenant)


# --- the steps -----------------------------------------------------------------------------------


async def _end_calls(
    app: Any, watcher: ExecutionWatcher, session_id: str
) -> dict[str, SessionForgotten | None]:
    """End the calls of the log, each with its error; None for a call that had ended already.

    Such a call is in the log until its owner has stored the result.
    """
    errors: dict[str, SessionForgotten | None] = {}
    calls = [call async for call in watcher.sessions.unfinished_calls_of(session_id)]
    for some in _batches(calls):
        ends = await asyncio.gather(*(_end(watcher, session_id, call) for call in some))
        found = {call.call_id: error for call, error in zip(some, ends, strict=True)}
        await _store_errors(app, found)
        errors |= found
    return errors


async def _end(
    watcher: ExecutionWatcher, session_id: str, call: BegunCall
) -> SessionForgotten | None:
    unclaimed, claimed = (
        SessionForgotten(session_id, call.call_id, may_have_run) for may_have_run in (False, True)
    )
    outcome = await _end_execution(watcher, call.call_id, unclaimed, claimed)
    if outcome is None:
        return None
    error = claimed if outcome is Outcome.LOST else unclaimed
    with contextlib.suppress(msgspec.MsgspecError):  # a newer producer's: its group is unknown
        member = decode_call(call.payload)
        if member.group:
            end = (member.index, str(outcome), call.call_id, str(error))
            await watcher.store.record_group_ends(member.group, [end])
    return error


async def _end_execution(
    watcher: ExecutionWatcher, execution_id: str, unclaimed: Exception, claimed: Exception
) -> Outcome | None:
    """End an execution with one of two errors; None if it had ended already."""
    try:
        return await forget_unfinished(
            watcher.store,
            execution_id,
            unclaimed=_ended(Outcome.CANCELLED, unclaimed),
            claimed=_ended(Outcome.LOST, claimed),
        )
    except ExecutionEnded:
        return None


def _ended(outcome: Outcome, error: Exception) -> Ended:
    return Ended(outcome=outcome, type=type(error).__name__, message=str(error))


async def _wait_until_left(watcher: ExecutionWatcher, session_id: str) -> None:
    """Wait for the worker that had the session, as long as it may live."""
    store, ringing = watcher.sessions, asyncio.Event()
    with contextlib.suppress(TimeoutError):
        async with (
            asyncio.timeout(_MAX_LEAVE_S),
            watcher.ringing(store.keys_of(session_id).channel, ringing),
        ):
            while owner := await store.start_forgetting(session_id):
                if not await store.is_live(owner):
                    return
                await wait_for_ring(ringing, _CHECK_S)
                ringing.clear()


async def _forget_calls(
    app: Any,
    watcher: ExecutionWatcher,
    session_id: str,
    unfinished: dict[str, SessionForgotten | None],
) -> None:
    """Erase calls that have ended, and what is left of the others but their ends."""
    call_ids = {call_id async for call_id in watcher.sessions.calls_of(session_id)}
    for some in _batches(sorted(call_ids | unfinished.keys())):
        ended = [call_id for call_id in some if unfinished.get(call_id) is None]
        left_behind = {
            call_id: SessionForgotten(session_id, call_id, may_have_run=True)
            for call_id in ended
            if call_id in unfinished and not await _has_result(app, call_id)
        }
        await _store_errors(app, left_behind)
        await forget(watcher.store, ended)
        await watcher.store.drop_recent(some)
        await _forget_results(app, [each for each in ended if each not in left_behind])


async def _forget_runs(
    app: Any, watcher: ExecutionWatcher, runs: RunStore, session_id: str
) -> None:
    """End the runs of the session that have not ended, and erase all of them."""
    records = await _runs_of(runs, session_id)
    unfinished = {record.run_id for record in records if record.status not in ENDED}
    await _cancel_runs(watcher, runs, [each for each in records if each.run_id in unfinished])
    for some in _batches([record.run_id for record in records if record.message]):
        errors: dict[str, Exception | None] = dict.fromkeys(some)
        for run_id in unfinished.intersection(some):
            error = RunForgotten(session_id, run_id)
            if await _end_execution(watcher, run_id, error, error):
                errors[run_id] = error
        await _store_errors(app, errors)
        ended = [run_id for run_id, error in errors.items() if error is None]
        await forget(watcher.store, ended)
        await watcher.store.drop_recent(some)
        await _forget_results(app, ended)
    await runs.delete_all(session_id)


async def _runs_of(runs: RunStore, session_id: str) -> list[RunRecord]:
    found: dict[str, RunRecord] = {}
    cursor: str | None = None
    while True:
        # The oldest first: a run that changes its status meanwhile comes later.
        page = await runs.list(session_id=session_id, cursor=cursor, newest_first=False)
        found |= {record.run_id: record for record in page.runs}
        if (cursor := page.cursor) is None:
            return list(found.values())


async def _cancel_runs(
    watcher: ExecutionWatcher, runs: RunStore, records: Sequence[RunRecord]
) -> None:
    """Cancel runs, and wait for the workers that have some of them to end those."""
    running: list[RunRecord] = []
    for record in records:
        with contextlib.suppress(RunEnded, RunNotFound):
            if (await runs.cancel(record.run_id, by="forget")).owner:
                running.append(record)
    tasks = [record.run_id for record in running if record.message]
    await watcher.send_command_to_all(tasks, CancelCommand())
    waits = (runs.wait(record.run_id, timeout_s=_MAX_LEAVE_S) for record in running)
    for end in await asyncio.gather(*waits, return_exceptions=True):
        if isinstance(end, BaseException) and not isinstance(end, (RunTimeout, RunNotFound)):
            raise end


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[first : first + _BATCH_SIZE] for first in range(0, len(items), _BATCH_SIZE))


# --- the result backend --------------------------------------------------------------------------


async def _has_result(app: Any, call_id: str) -> bool:
    """Whether nobody waits for a result of the call for ever."""
    if not keeps_results(app):
        return True
    return (await asyncio.to_thread(stored_end, app, call_id))[0] is not None


async def _store_errors(app: Any, errors: Mapping[str, Exception | None]) -> None:
    def store() -> None:
        with translated_faults():
            for call_id, error in errors.items():
                if error is not None:
                    app.backend.mark_as_failure(call_id, error)

    if keeps_results(app):
        await asyncio.to_thread(store)


async def _forget_results(app: Any, call_ids: Sequence[str]) -> None:
    def erase() -> None:
        with translated_faults():
            for call_id in call_ids:
                app.backend.forget(call_id)

    if keeps_results(app):
        await asyncio.to_thread(erase)
