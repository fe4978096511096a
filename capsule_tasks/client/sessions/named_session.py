"""`NamedSession`: run code in one namespace again and again, wherever in the cluster it lives.

A call goes into the log of its session in Redis. With a live owner the script that appends the call
rings the owner, so there is one round trip; otherwise the session is listed first, and a worker
with room takes it. A call is appended once however often it is submitted, because of its id.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

from capsule_tasks.client.cancelling import CancelAnswer, check_type
from capsule_tasks.client.configuration import code_profiles
from capsule_tasks.client.execution import Execution
from capsule_tasks.client.sessions.execution import SessionExecution, check_holder
from capsule_tasks.client.sessions.requests import (
    ask_owner,
    check_timeout,
    close_left_behind,
    close_session,
)
from capsule_tasks.client.watching.watch_thread import blocking, watch_thread
from capsule_tasks.errors import (
    InvalidSetting,
    NamedSessionBusy,
    SessionClosing,
    SessionUnknown,
    StorageError,
)
from capsule_tasks.protocol.calls import (
    CheckpointMade,
    CheckpointRequest,
    NamesListed,
    NamesRequest,
    RestartRequest,
    SessionCall,
    encode_call,
)
from capsule_tasks.settings import DEFAULT_CODE_PROFILE
from capsule_tasks.storage.keys import escaped
from capsule_tasks.storage.sessions.store import NamedSessionStore
from capsule_tasks.storage.sessions.types import NamedSessionInfo, Submitted

log = logging.getLogger("capsule_tasks.client")

Busy = Literal["wait", "error"]

_BUSY = ("wait", "error")
_MAX_TIMEOUT_S = 365 * 86400.0
_NOTED_WITHIN_S = 1.0
"""How soon the owner of a session notes in its record that a call has ended."""
_NOTED_POLL_S = 0.01
DEFAULT_PROFILE = DEFAULT_CODE_PROFILE


class NamedSession:
    """A session of the cluster, by its name. Making one asks nothing of Redis.

    The first call makes the session, with its profile and tenant. Each blocking method has an
    asyncio form whose name begins with `a`.
    """

    def __init__(
        self,
        app: Any,
        session_id: str,
        *,
        profile: str = DEFAULT_PROFILE,
        tenant: str | None = None,
    ) -> None:
        check_id("session id", session_id)
        check_id("profile", profile)
        if tenant is not None:
            check_id("tenant", tenant)
        self.app = app
        self.id = session_id
        self.profile = profile
        self.tenant = tenant
        self._last_seq = 0
        """The number of the last call that was submitted through this object."""

    def __repr__(self) -> str:
        return f"<NamedSession {self.id!r}, profile {self.profile!r}>"

    async def aexecute(
        self,
        source: str,
        *,
        timeout_s: float | None = None,
        busy: Busy = "wait",
        call_id: str | None = None,
    ) -> SessionExecution:
        """Submit code to the session; its execution, which may not have begun.

        Calls run one after the other, in the order of their submission. With `busy="error"`
        NamedSessionBusy is raised if a call is unfinished. `timeout_s` limits the run and not the
        wait. A call that was submitted under the same `call_id` is not run again: so a call whose
        submission failed with StorageError is repeated safely under its id, which is the error's
        `operation_id`. An id under which another session has a call is refused (CallIdTaken), here
        or by the execution, as soon as the other call has begun.
        """
        check_source(source, timeout_s, busy)
        if call_id is None:
            call_id = str(uuid.uuid4())
        else:
            await self._check_call_id(call_id)
        call = SessionCall(
            source=source,
            timeout_s=timeout_s,
        )
        return await self.submit(call_id, call, busy=busy)

    execute = blocking(aexecute)

    async def submit(self, call_id: str, call: SessionCall, *, busy: Busy) -> SessionExecution:
        """Append a call to the log, unless it is known there."""
        last_seq = self._last_seq
        with _named_in_errors(call_id):
            submission = await self._append(call_id, encode_call(call), busy)
        execution = SessionExecution.submitted(call_id, self.id, self.app, submission)
        execution.member = call.group, call.index
        if not submission.is_known:
            # Calls of one session have growing numbers, so this one is another.
            execution.has_begun_anew = submission.seq <= last_seq
            self._last_seq = submission.seq
        if execution.has_begun_anew:
            log.warning(
                "session %r has begun anew, with an empty namespace: it was closed or forgotten, "
                "or a Redis lost its record",
                self.id,
            )
        return execution

    async def _check_call_id(self, call_id: str) -> None:
        check_id("call_id", call_id)
        with _named_in_errors(call_id):
            record = await (await watch_thread.watcher(self.app)).store.read_record(call_id)
        check_holder(call_id, record.task, self.id)

    async def ainfo(self) -> NamedSessionInfo:
        """The session's record in Redis; raises SessionUnknown if it has none."""
        store = await self._store()
        info = await store.info(self.id)
        return replace(info, hosts=(await store.wanted_state(info.profile)).hosts)

    info = blocking(ainfo)

    async def ainterrupt(self) -> CancelAnswer:
        """Raise KeyboardInterrupt in the call that runs, as Ctrl-C does; `over` if none runs."""
        begun_call = (await (await self._store()).info(self.id)).begun_call
        if not begun_call:
            return "over"
        return await Execution(begun_call, app=self.app).ainterrupt()

    interrupt = blocking(ainterrupt)

    async def anamespace(self, timeout_s: float = 30.0) -> NamesListed:
        """Names, types and sizes in the namespace, never values. Works while code runs.

        A session that no worker has is brought to life before. TimeoutError if no worker answers.
        """
        check_timeout(timeout_s)
        reply = await ask_owner(self.app, self.id, NamesRequest(), timeout_s)
        return cast("NamesListed", reply)

    namespace = blocking(anamespace)

    async def arestart(self, timeout_s: float = 30.0) -> None:
        """Stop the call that runs and go on with an empty namespace; the checkpoint is deleted.

        Calls that wait run in the new namespace.
        """
        check_timeout(timeout_s)
        await ask_owner(self.app, self.id, RestartRequest(), timeout_s)

    restart = blocking(arestart)

    async def acheckpoint(self, timeout_s: float = 60.0) -> CheckpointMade:
        """Make a checkpoint as soon as no call runs; which names it has, and which not, and why."""
        check_timeout(timeout_s)
        reply = await ask_owner(self.app, self.id, CheckpointRequest(), timeout_s)
        return cast("CheckpointMade", reply)

    checkpoint = blocking(acheckpoint)

    async def aclose(self, timeout_s: float = 30.0) -> bool:
        """Close the session: it takes no more calls, and ends when those that it has are done.

        False if there is no such session.

        Namespace and checkpoint are gone then, and a call under the same name begins a new session.
        """
        check_timeout(timeout_s)
        self._last_seq = 0
        return await close_session(self.app, self.id, timeout_s)

    close = blocking(aclose)

    async def _append(self, call_id: str, payload: bytes, busy: Busy) -> Submitted:
        """Append a call, also to a session that is busy or closing for a moment only."""
        store = await self._store()
        submit = partial(
            store.submit,
            self.id,
            call_id,
            payload,
            profile=self.profile,
            tenant=self.tenant or "",
            on_busy=busy,
            before_listing=self._check_profile,
        )
        noted_by = asyncio.get_running_loop().time() + _NOTED_WITHIN_S
        while True:
            try:
                return await submit()
            except NamedSessionBusy:
                if asyncio.get_running_loop().time() > noted_by or not await self._has_ended():
                    raise
                await asyncio.sleep(_NOTED_POLL_S)
            except SessionClosing:
                if not await close_left_behind(self.app, self.id):
                    raise

    async def _has_ended(self) -> bool:
        """Whether the only unfinished call has ended, and its owner is about to note that.

        Its result can be read before, so the caller may know that the session is not busy.
        """
        try:
            info = await (await self._store()).info(self.id)
        except SessionUnknown:  # it was closed meanwhile
            return True
        if not info.unfinished:
            return True
        if info.waiting:
            return False
        watcher = await watch_thread.watcher(self.app)
        return (await watcher.store.read_record(info.begun_call)).state == "ended"

    def _check_profile(self) -> None:
        """Refuse a profile that is none of the app's, where this producer has its configuration."""
        if self.app.conf.get("capsule_code_profiles") is None:
            return  # the workers' may be another
        known = sorted(code_profiles(self.app))
        if self.profile not in known:
            must = f"one of capsule_code_profiles: {', '.join(known)}"
            raise InvalidSetting("profile", self.profile, must)

    async def _store(self) -> NamedSessionStore:
        return (await watch_thread.watcher(self.app)).sessions


@contextmanager
def _named_in_errors(call_id: str) -> Iterator[None]:
    """The call is repeated under its id after an error of Redis."""
    try:
        yield
    except StorageError as fault:
        fault.operation_id = call_id
        raise


def check_id(name: str, value: Any) -> None:
    """Refuse ids of which no key can be made."""
    check_type(name, value, str)
    escaped(name, value)


def check_source(source: Any, timeout_s: Any, busy: Any) -> None:
    """Refuse what cannot be run, with an error that names the value."""
    check_type("source", source, str)
    try:
        source.encode()
    except UnicodeEncodeError as fault:
        raise ValueError(f"source cannot be sent: {fault}") from None
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float | None):
        raise TypeError(f"timeout_s = {timeout_s!r}: must be a number of seconds, or None")
    if timeout_s is not None and not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise ValueError(f"timeout_s = {timeout_s!r}: must be more than 0, and at most a year")
    if busy not in _BUSY:
        raise ValueError(f"busy = {busy!r}: must be one of {', '.join(_BUSY)}")
