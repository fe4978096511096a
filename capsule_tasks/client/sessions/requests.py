"""Requests to the worker that has a session, past the calls that wait; and the end of a session."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from capsule_tasks.client.watching.watch_thread import watch_thread
from capsule_tasks.client.watching.watcher import ExecutionWatcher, wait_for_ring
from capsule_tasks.errors import (
    SessionNotLive,
    SessionOwnerLost,
    SessionRequestFailed,
    SessionUnfinished,
    SessionUnknown,
)
from capsule_tasks.protocol.calls import (
    RequestFailed,
    SessionReply,
    SessionRequest,
    decode_reply,
    encode_request,
)
from capsule_tasks.storage.operations import new_operation
from capsule_tasks.storage.sessions.store import NamedSessionStore
from capsule_tasks.storage.sessions.types import NamedSessionInfo

_CHECK_S = 1.0
"""A doorbell may be lost: the key is read again after so long."""
_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 0.5
"""Between two looks whether a worker has taken the session, which rings nothing."""


async def ask_owner(
    app: Any, session_id: str, request: SessionRequest, timeout_s: float
) -> SessionReply:
    """The owner's reply. A session without an owner is brought to life on a worker before.

    Raises SessionUnknown, SessionRequestFailed, and TimeoutError.
    """
    watcher = await watch_thread.watcher(app)
    name = type(request).__struct_config__.tag
    try:
        async with asyncio.timeout(timeout_s), _ringing(watcher, session_id) as ringing:
            request_id = await _send(watcher, session_id, encode_request(request))
            while (reply := await watcher.sessions.read_reply(session_id, request_id)) is None:
                await wait_for_ring(ringing, _CHECK_S)
                if not ringing.is_set():
                    await _list_unowned(watcher.sessions, session_id)
                ringing.clear()
    except TimeoutError:
        raise TimeoutError(
            f"no worker has answered the request {name!r} to session {session_id!r} within "
            f"{timeout_s} s"
        ) from None
    answer = decode_reply(reply)
    if isinstance(answer, RequestFailed):
        raise SessionRequestFailed(session_id, str(name), answer.message)
    return answer


async def _send(watcher: ExecutionWatcher, session_id: str, payload: bytes) -> str:
    """Send a request to the owner, listing the session until there is one; the request's id."""
    store, request_id, pause_s = watcher.sessions, new_operation(), _FIRST_PAUSE_S
    is_listed = False
    while True:
        try:
            return await store.request(session_id, payload, request_id=request_id)
        except SessionNotLive:
            if not is_listed:
                info = await store.info(session_id)
                await store.want(info.profile, session_id)
                is_listed = True
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, _MAX_PAUSE_S)


async def close_session(app: Any, session_id: str, timeout_s: float) -> bool:
    """Close a session once its unfinished calls are done; TimeoutError if that takes longer.

    False if there was no such session.
    """
    watcher = await watch_thread.watcher(app)
    store, was_there = watcher.sessions, False
    try:
        async with asyncio.timeout(timeout_s), _ringing(watcher, session_id) as ringing:
            info = await store.info(session_id)
            was_there = True
            if not info.owner and not info.unfinished:
                with contextlib.suppress(SessionOwnerLost):  # then the new owner does so
                    await watcher.checkpoints.delete(session_id, info.token)
            if await store.close_session(session_id):
                await store.index.record(dropped=[session_id])
                return True
            while (await _list_unowned(store, session_id)).is_closing:
                await wait_for_ring(ringing, _CHECK_S)
                ringing.clear()
    except SessionUnknown:
        return was_there
    except TimeoutError:
        raise TimeoutError(
            f"session {session_id!r} was not closed within {timeout_s} s; it takes no calls, and "
            "is closed when those that it has are done"
        ) from None
    return True


async def close_left_behind(app: Any, session_id: str) -> bool:
    """Close a session that was to be closed by an owner who is gone; False if that is not so.

    Only a session that is idle is closed here: with unfinished calls it is wanted, and the worker
    that takes it closes it.
    """
    watcher = await watch_thread.watcher(app)
    store = watcher.sessions
    try:
        info = await store.info(session_id)
        if not info.is_closing:
            return True  # it was closed meanwhile, and is used again
        if info.owner or info.unfinished or info.is_forgotten:
            return False
        await watcher.checkpoints.delete(session_id, info.token)
        await store.index.record(dropped=[session_id])
        await store.close_session(session_id, info.token)
    except (SessionUnknown, SessionUnfinished):
        return True  # somebody else has closed it
    except SessionOwnerLost:
        return False
    return True


async def _list_unowned(store: NamedSessionStore, session_id: str) -> NamedSessionInfo:
    """List the session for workers if it has no owner, who may have died with a request to it.

    Nothing else brings it back: without unfinished calls, a session is not wanted. The next owner
    reads the requests that nobody has answered.
    """
    info = await store.info(session_id)
    if not info.owner:
        await store.want(info.profile, session_id)
    return info


@asynccontextmanager
async def _ringing(
    watcher: ExecutionWatcher, session_id: str
) -> AsyncGenerator[asyncio.Event, None]:
    ringing = asyncio.Event()
    async with watcher.ringing(watcher.sessions.keys_of(session_id).channel, ringing):
        yield ringing


def check_timeout(timeout_s: Any) -> None:
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise TypeError(f"timeout_s = {timeout_s!r}: must be a number of seconds")
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s = {timeout_s!r}: must be more than 0, and finite")
