"""Requests to the owner of one session, past the calls that wait for it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from capsule_tasks.errors import CapsuleError, SessionOwnerLost, reason_of
from capsule_tasks.executions.hosting.ownership import Ownership
from capsule_tasks.protocol.calls import (
    NamesListed,
    NamesRequest,
    RequestFailed,
    RestartRequest,
    SessionReply,
    SessionRequest,
    decode_request,
    encode_reply,
)
from capsule_tasks.sessions.session import Session
from capsule_tasks.storage.sessions.store import NamedSessionStore
from capsule_tasks.storage.sessions.types import RequestEntry, RequestPage

log = logging.getLogger("capsule_tasks.taskpool")

_UNKNOWN = RequestFailed(message="the worker that has the session does not know this request")


class Owner(Protocol):
    """The session whose requests these are."""

    ownership: Ownership

    @property
    def child(self) -> Session | None: ...

    async def kill(self, reason: str) -> None: ...

    def ring(self) -> None: ...

    async def carry_out(self, request: SessionRequest) -> SessionReply:
        """Do what is asked, between two calls."""
        ...


class Requests:
    """Reads requests when the owner is rung. Names are listed also while a call runs."""

    def __init__(
        self,
        owner: Owner,
        store: NamedSessionStore,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.is_closing = False
        """Whether the session is to be closed once its calls are done."""
        self._owner = owner
        self._store = store
        self._spawn = spawn
        self._after = ""
        self._is_rung: bool | None = None
        """None while nothing is being read; else whether the doorbell rang since."""
        self._between_calls: deque[tuple[RequestEntry, SessionRequest]] = deque()
        self._for_names: deque[RequestEntry] = deque()
        self._is_listing = False
        """Whether a task asks the child for names, which holds up no other request."""

    @property
    def has_restart(self) -> bool:
        """Whether a restart waits until no call runs."""
        return any(isinstance(request, RestartRequest) for _, request in self._between_calls)

    async def read(self) -> None:
        """Read and answer what came, until the doorbell is quiet. Raises SessionOwnerLost."""
        is_reading = self._is_rung is not None
        self._is_rung = True
        if is_reading:
            return
        try:
            while self._is_rung:
                self._is_rung = False
                page = await self._owner.ownership.write(self._page)
                self.is_closing = self.is_closing or page.is_closing
                for entry in page.requests:
                    self._after = entry.entry
                    await self._take(entry)
        finally:
            self._is_rung = None
        if self.is_closing or self._between_calls:
            self._owner.ring()

    async def answer_waiting(self) -> None:
        """Answer the requests that had to wait until no call runs."""
        while self._between_calls:
            entry, request = self._take_next()
            try:
                reply = await self._owner.carry_out(request)
            except SessionOwnerLost:
                raise
            except (CapsuleError, TimeoutError) as fault:
                reply = RequestFailed(message=reason_of(fault))
            await self._reply(entry, reply)

    def _take_next(self) -> tuple[RequestEntry, SessionRequest]:
        """The oldest request, but a restart first: others would restore what it drops."""
        for found in self._between_calls:
            if isinstance(found[1], RestartRequest):
                self._between_calls.remove(found)
                return found
        return self._between_calls.popleft()

    async def _page(self) -> RequestPage:
        owner = self._owner.ownership
        return await self._store.take_requests(owner.session_id, owner.token, self._after)

    async def _take(self, entry: RequestEntry) -> None:
        request = decode_request(entry.payload)
        if request is None:
            await self._reply(entry, _UNKNOWN)
            return
        if isinstance(request, NamesRequest) and self._owner.child is not None:
            self._for_names.append(entry)
            if not self._is_listing:
                self._is_listing = True
                self._spawn(self._list_names())
            return
        self._between_calls.append((entry, request))
        if isinstance(request, RestartRequest):
            # At once: a call, a restore or a save may go on for ever.
            await self._owner.kill("its session was restarted")
        self._owner.ring()

    async def _list_names(self) -> None:
        try:
            while self._for_names:
                entry = self._for_names.popleft()
                if (session := self._owner.child) is not None:
                    await self._reply(entry, await names_in(session))
                else:  # it has ended since
                    self._between_calls.append((entry, NamesRequest()))
                    self._owner.ring()
        except SessionOwnerLost:
            return  # the next owner answers
        finally:
            self._is_listing = False

    async def _reply(self, entry: RequestEntry, reply: SessionReply) -> None:
        owner, answer = self._owner.ownership, encode_reply(reply)
        await owner.write(lambda: self._store.reply(owner.session_id, owner.token, entry, answer))


async def names_in(session: Session) -> SessionReply:
    """The names in the namespace of a child."""
    try:
        summary = await session.namespace_summary()
    except (CapsuleError, TimeoutError) as fault:
        return RequestFailed(message=reason_of(fault))
    return NamesListed(total=summary.total, entries=tuple(summary.entries))
