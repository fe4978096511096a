"""The call logs of named sessions, as producers write and read them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Literal

from capsule_tasks.errors import (
    NamedSessionBusy,
    SessionCallsFull,
    SessionClosing,
    SessionMismatch,
    SessionUnknown,
    SessionUnlisted,
)
from capsule_tasks.settings import NamedSessionSettings
from capsule_tasks.storage.drivers import drive
from capsule_tasks.storage.facades import AsyncTarget
from capsule_tasks.storage.keys import escaped
from capsule_tasks.storage.leases import lease_left_s
from capsule_tasks.storage.operations import refused
from capsule_tasks.storage.scripts import Code
from capsule_tasks.storage.sessions import scripts
from capsule_tasks.storage.sessions.checkpoints import CheckpointManifest
from capsule_tasks.storage.sessions.index import SessionIndex
from capsule_tasks.storage.sessions.tenants import TenantStore
from capsule_tasks.storage.sessions.types import (
    BegunCall,
    CallLook,
    CallPlace,
    NamedSessionInfo,
    SessionEntry,
    Submitted,
)
from capsule_tasks.storage.sessions.wanted import WantedStore

OnBusy = Literal["wait", "error"]
_PAGE = 500
_PAYLOADS = 50
"""Calls that are read at once with what they run."""


class CallStore(WantedStore):
    """Submits calls, and says what is known of sessions and their calls."""

    def __init__(self, redis: AsyncTarget, *, settings: NamedSessionSettings | None = None) -> None:
        super().__init__(redis, settings=settings)
        self.tenants = TenantStore(self.store, settings=self.settings)
        self.index = SessionIndex(self.store, settings=self.settings)

    async def submit(
        self,
        session_id: str,
        call_id: str,
        payload: bytes,
        *,
        profile: str,
        tenant: str = "",
        on_busy: OnBusy = "wait",
        max_waiting: int | None = None,
        before_listing: Callable[[], object] = lambda: None,
    ) -> Submitted:
        """Append a call to a session's log, listing the session first if it has no owner.

        One round trip for a session that has an owner. A call whose id is known is not appended
        again. Raises SessionMismatch, SessionClosing, NamedSessionBusy (`on_busy="error"`, and a
        call is unfinished), SessionCallsFull, and what `before_listing` raises.
        """
        listed_under = ""
        while True:
            try:
                return await self.append(
                    session_id,
                    call_id,
                    payload,
                    profile=profile,
                    tenant=tenant,
                    on_busy=on_busy,
                    max_waiting=max_waiting,
                    listed_under=listed_under,
                )
            except SessionUnlisted as unlisted:
                before_listing()
                # In the lists before there is anything of it, so that `forget` finds all of it.
                if tenant:
                    await self.tenants.note(tenant, session_id)
                await self.index.record([SessionEntry(session_id, profile, tenant)])
                # Whoever takes the session from the list changes its token: the append is refused
                # then, as the taker may have removed the session from the list and released it.
                await self.want(profile, session_id)
                listed_under = str(unlisted.token)

    async def append(
        self,
        session_id: str,
        call_id: str,
        payload: bytes,
        *,
        profile: str,
        tenant: str = "",
        on_busy: OnBusy = "wait",
        max_waiting: int | None = None,
        listed_under: str = "",
    ) -> Submitted:
        """Submit a call in one step; raises SessionUnlisted for a session that must be listed."""
        limit = self.settings.max_waiting if max_waiting is None else max_waiting
        call = scripts.session_submit.call(
            self.keys_of(session_id),
            session_id=session_id,
            call=escaped("call id", call_id) and call_id,
            payload=payload,
            profile=escaped("profile", profile) and profile,
            tenant=tenant,
            may_wait=int(on_busy == "wait"),
            listed_under=listed_under,
            max_waiting=limit,
            ttl_ms=self._ttl_ms,
            doorbell_prefix=self._doorbell_prefix,
        )
        reply = await self._call(call)
        match reply[0]:
            case Code.DONE:
                return Submitted(int(reply[1]), reply[2].decode(), int(reply[3]))
            case Code.UNLISTED:
                raise SessionUnlisted(session_id, int(reply[1]))
            case Code.BUSY:
                raise NamedSessionBusy(session_id, int(reply[1]))
            case Code.FULL:
                raise SessionCallsFull(session_id, int(reply[1]), limit)
            case Code.ENDED:
                raise SessionClosing(session_id)
            case Code.CHANGED:
                stored = reply[1].decode()
                if stored != profile:
                    raise SessionMismatch(session_id, "profile", stored, profile)
                raise SessionMismatch(session_id, "tenant", reply[2].decode(), tenant)
        raise refused(reply, "a submit")

    async def info(self, session_id: str) -> NamedSessionInfo:
        """The record of a session. Raises SessionUnknown."""
        reply = await self._call(scripts.session_info.call(self.keys_of(session_id)))
        if reply[0] != Code.DONE:
            raise SessionUnknown(session_id)
        fields = {reply[n].decode(): reply[n + 1] for n in range(2, len(reply), 2)}
        begun_call = fields.get("begun_call", b"").decode()
        stored = fields.get("checkpoint")
        return NamedSessionInfo(
            session_id=session_id,
            profile=fields["profile"].decode(),
            tenant=fields.get("tenant", b"").decode(),
            owner=fields.get("owner", b"").decode(),
            token=int(fields.get("token", 0)),
            created_at=_seconds(fields.get("created")),
            used_at=_seconds(fields.get("used")),
            executions=int(fields.get("executions", 0)),
            cpu_ms=int(fields.get("cpu_ms", 0)),
            waiting=int(reply[1]) - bool(begun_call),
            begun_call=begun_call,
            is_closing="closing" in fields,
            is_forgotten="forgetting" in fields,
            checkpoint=CheckpointManifest.unpacked(stored) if stored else None,
        )

    async def look_after(self, session_id: str, call_id: str) -> CallLook:
        """Where a call is. If nobody would run it any more, its session is listed again.

        For a caller who has waited long: a Redis that fails over may lose the listing of a session,
        the end of an ownership, or the call; and an owner may die while no worker is left to reap.
        """
        call = scripts.session_look.call(self.keys_of(session_id), call=call_id)
        place, profile, owner = (each.decode() for each in (await self._call(call))[1:])
        if place != CallPlace.UNFINISHED or await self.is_live(owner):
            return CallLook(CallPlace(place), profile)
        await self.want(profile, session_id)
        return CallLook(CallPlace(place), profile, (await self.wanted_state(profile)).hosts)

    async def is_live(self, owner: str) -> bool:
        """Whether the lease of an incarnation lasts."""
        return bool(
            owner and await drive(lease_left_s(owner, self._prefix, self._retry), self.store)
        )

    async def unfinished_calls_of(self, session_id: str) -> AsyncIterator[BegunCall]:
        """The calls of a session that are unfinished, in their order, begun or not."""
        seq = 0
        while True:
            call = scripts.session_unfinished.call(
                self.keys_of(session_id), after=seq, count=_PAYLOADS
            )
            _, *flat = await self._call(call)
            for n in range(0, len(flat), 3):
                seq = int(flat[n])
                yield BegunCall(seq, flat[n + 1].decode(), flat[n + 2])
            if len(flat) < 3 * _PAYLOADS:
                return

    async def calls_of(self, session_id: str) -> AsyncIterator[str]:
        """The ids of a session's calls that are unfinished, or were done not long ago."""
        offset = 0
        while True:
            call = scripts.session_known.call(self.keys_of(session_id), offset=offset, count=_PAGE)
            _, *ids = await self._call(call)
            for call_id in ids:
                yield call_id.decode()
            if len(ids) < _PAGE:
                return
            offset += _PAGE


def _seconds(ms: bytes | None) -> float | None:
    return None if ms is None else int(ms) / 1000
