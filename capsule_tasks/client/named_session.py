"""`NamedSession`: run code in one namespace again and again, wherever in the cluster it lives.

A call goes into the log of its session in Redis. With a live owner the script that appends the call
rings the owner, so there is one round trip; otherwise the session is listed first, and a worker
with room takes it. A call is appended once however often it is submitted, because of its id.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

from capsule_tasks.client.cancelling import CancelAnswer, check_type, requested_by
from capsule_tasks.client.execution import Execution
from capsule_tasks.client.session_execution import SessionExecution
from capsule_tasks.client.watching.watch_thread import blocking, watch_thread
from capsule_tasks.errors import StorageError
from capsule_tasks.protocol.calls import SessionCall, encode_call
from capsule_tasks.storage.keys import escaped
from capsule_tasks.storage.sessions.store import NamedSessionStore
from capsule_tasks.storage.sessions.types import NamedSessionInfo

Busy = Literal["wait", "error"]

_BUSY = ("wait", "error")
_MAX_TIMEOUT_S = 365 * 86400.0
DEFAULT_PROFILE = "sandbox"


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
        `operation_id`.
        """
        check_source(source, timeout_s, busy)
        if call_id is None:
            call_id = str(uuid.uuid4())
        check_id("call_id", call_id)
        call = SessionCall(
            source=source,
            timeout_s=timeout_s,
            producer=requested_by(),
            submitted_at=time.time(),
        )
        return await self.submit(call_id, call, busy=busy)

    execute = blocking(aexecute)

    async def submit(self, call_id: str, call: SessionCall, *, busy: Busy) -> SessionExecution:
        """Append a call to the log, unless it is known there."""
        store = await self._store()
        try:
            await store.submit(
                self.id,
                call_id,
                encode_call(call),
                profile=self.profile,
                tenant=self.tenant or "",
                on_busy=busy,
            )
        except StorageError as fault:
            fault.operation_id = call_id
            raise
        execution = SessionExecution.submitted(call_id, self.id, self.app)
        execution.member = call.group, call.index
        return execution

    async def ainfo(self) -> NamedSessionInfo:
        """What Redis knows of the session; SessionUnknown if that is nothing."""
        return await (await self._store()).info(self.id)

    info = blocking(ainfo)

    async def ainterrupt(self) -> CancelAnswer:
        """Raise KeyboardInterrupt in the call that runs, as Ctrl-C does; `over` if none runs."""
        begun_call = (await self.ainfo()).begun_call
        if not begun_call:
            return "over"
        return await Execution(begun_call, app=self.app).ainterrupt()

    interrupt = blocking(ainterrupt)

    async def _store(self) -> NamedSessionStore:
        return (await watch_thread.watcher(self.app)).sessions


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
