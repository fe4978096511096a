"""Named sessions in one Redis: calls, owners, and the lists of sessions that are wanted or held.

Every write can be repeated: calls carry an id, what owners write carries their token, and a take is
an operation with an id.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal

from capsule_tasks.errors import (
    LeaseLost,
    NamedSessionBusy,
    SessionCallsFull,
    SessionClosing,
    SessionHeld,
    SessionMismatch,
    SessionNotLive,
    SessionOwnerLost,
    SessionUnfinished,
    SessionUnknown,
    SessionUnlisted,
)
from capsule_tasks.settings import NamedSessionSettings
from capsule_tasks.storage.drivers import drive
from capsule_tasks.storage.facades import AsyncTarget
from capsule_tasks.storage.keys import HostKeys, NamedSessionKeys, doorbell_prefix, escaped
from capsule_tasks.storage.leases import lease_left_s
from capsule_tasks.storage.operations import Reply, named, new_operation, refused
from capsule_tasks.storage.scripts import Call, Code
from capsule_tasks.storage.sessions import scripts
from capsule_tasks.storage.sessions.index import SessionIndex
from capsule_tasks.storage.sessions.tenants import TenantStore
from capsule_tasks.storage.sessions.types import (
    BegunCall,
    NamedSessionInfo,
    RequestEntry,
    RequestPage,
    Submitted,
    Taken,
)
from capsule_tasks.storage.sessions.wanted import WantedStore, ms_of

OnBusy = Literal["wait", "error"]
_TOKEN_TTL_MS = 600_000
"""How long the token of a session is left of which there is nothing else."""
_PAGE = 500


class NamedSessionStore(WantedStore):
    """Calls and owners of named sessions in Redis.

    A producer appends to a session's log. If the session has no owner it is listed first, so that a
    producer that dies in between leaves nothing that nobody looks for. Workers with room are given
    sessions from that list. So that no call is left behind, whatever dies when, a worker

    - holds a session before it takes it (`hold`, `take`), and drops the hold last (`let_go`);
    - looks at its own lease after `take`: if that is not certain any more, a reaper may have looked
      for the session before it was taken, and the worker lets go;
    - removes a listing only after that, or where another live worker has the session (`unwant`),
      and only under the mark that `take_wanted` gave: one that was listed again since stays.
    """

    def __init__(self, redis: AsyncTarget, *, settings: NamedSessionSettings | None = None) -> None:
        super().__init__(redis, settings=settings)
        self._doorbell_prefix = doorbell_prefix(self._prefix)
        self.tenants = TenantStore(self.store, settings=self.settings)
        self.index = SessionIndex(self.store, settings=self.settings)

    def keys_of(self, session_id: str) -> NamedSessionKeys:
        return NamedSessionKeys(session_id, self._prefix)

    def doorbell_of(self, incarnation: str) -> str:
        """The channel that rings for the sessions of an owner; the message is a session's id."""
        return HostKeys(incarnation, self._prefix).channel

    def requests_doorbell_of(self, incarnation: str) -> str:
        """The channel that rings an owner for requests; the message is a session's id."""
        return HostKeys(incarnation, self._prefix).requests_channel

    # --- producers -----------------------------------------------------------------------------

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
    ) -> Submitted:
        """Append a call to a session's log, listing the session first if it has no owner.

        A call whose id is known is not appended again. Raises SessionMismatch, SessionClosing,
        NamedSessionBusy (`on_busy="error"`, and a call is unfinished), and SessionCallsFull.
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
                # Whoever takes the session from the list changes its token: the append is refused
                # then, as the taker may have removed the session from the list and released it.
                if tenant:
                    await self.tenants.note(tenant, session_id)
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
        """As `submit`, in one step; raises SessionUnlisted for a session that must be listed."""
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
        """What is known of a session. Raises SessionUnknown."""
        reply = await self._call(scripts.session_info.call(self.keys_of(session_id)))
        if reply[0] != Code.DONE:
            raise SessionUnknown(session_id)
        fields = {reply[n].decode(): reply[n + 1] for n in range(2, len(reply), 2)}
        begun_call = fields.get("begun_call", b"").decode()
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
            checkpoint=fields.get("checkpoint"),
        )

    async def relist(self, session_id: str) -> bool:
        """List a session again whose calls nobody would run any more; whether that was needed.

        For a caller who has waited long: a Redis that fails over may lose the listing of a session,
        or the end of an ownership.
        """
        try:
            info = await self.info(session_id)
        except SessionUnknown:
            return False
        if not info.unfinished or await self._is_live(info.owner):
            return False
        await self.want(info.profile, session_id)
        return True

    async def _is_live(self, owner: str) -> bool:
        return bool(
            owner and await drive(lease_left_s(owner, self._prefix, self._retry), self.store)
        )

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

    async def request(
        self, session_id: str, payload: bytes, *, request_id: str | None = None
    ) -> str:
        """Ask the owner of a session for something, past the calls that wait; the request's id.

        The reply is announced on the session's channel. Raises SessionUnknown, and SessionNotLive
        for a session without an owner.
        """
        request_id = request_id or new_operation()
        call = scripts.session_request.call(
            self.keys_of(session_id),
            session_id=session_id,
            request=request_id,
            payload=payload,
            ttl_ms=ms_of(self.settings.request_ttl_s),
            doorbell_prefix=self._doorbell_prefix,
        )
        reply = await self._call(call)
        if reply[0] == Code.MISSING:
            raise SessionUnknown(session_id)
        if reply[0] == Code.LOST:
            raise SessionNotLive(session_id)
        return request_id

    async def read_reply(self, session_id: str, request_id: str) -> bytes | None:
        """The reply to a request; None while there is none."""
        key = self.keys_of(session_id).reply(request_id)
        reply = await self._call(scripts.session_reply_read.call(key))
        return reply[1] if reply[0] == Code.DONE else None

    async def close_session(self, session_id: str, token: int = 0) -> bool:
        """Close a session; False if its owner, or the next one, is yet to do so.

        With the token of its latest owner, who may be gone, it is closed if all calls are done. The
        session's checkpoint is deleted before. Closing a session that does not exist does nothing.
        Raises SessionOwnerLost, and SessionUnfinished where a token is given.
        """
        call = scripts.session_close.call(
            self.keys_of(session_id),
            session_id=session_id,
            token=token,
            doorbell_prefix=self._doorbell_prefix,
        )
        reply = await self._own(session_id, call)
        if reply[0] == Code.UNFINISHED:
            raise SessionUnfinished(session_id, int(reply[1]))
        return reply[0] == Code.MISSING or int(reply[1]) == 1

    async def forget_session(self, session_id: str) -> None:
        """Erase a session's record, its calls, and its history, whoever owns it.

        The owner is rung and finds that it has lost the session. What has keys of its own is for
        the caller to erase before: the checkpoint, popped items, executions, results.
        """
        call = scripts.session_forget.call(
            self.keys_of(session_id),
            session_id=session_id,
            token_ttl_ms=_TOKEN_TTL_MS,
            doorbell_prefix=self._doorbell_prefix,
        )
        await self._call(call)
        await self.index.record(dropped=[session_id])

    # --- owners --------------------------------------------------------------------------------

    async def hold(
        self, incarnation: str, lease_token: str, add: Sequence[str], drop: Sequence[str] = ()
    ) -> None:
        """Record sessions before they are taken, and drop others. Raises LeaseLost."""
        call = scripts.session_hold.call(
            HostKeys(incarnation, self._prefix),
            token=lease_token,
            ttl_ms=ms_of(self.settings.hold_ttl_s),
            count=len(add),
            ids=[*add, *drop],
        )
        if (await self._call(call))[0] != Code.DONE:
            raise LeaseLost(incarnation)

    async def held_sessions(
        self, incarnation: str, done: Sequence[str] = (), count: int = 500
    ) -> list[str] | None:
        """Sessions that it held, without those that are done; None while its lease lasts."""
        call = scripts.session_held.call(HostKeys(incarnation, self._prefix), count=count, ids=done)
        reply = await self._call(call)
        if reply[0] != Code.DONE:
            return None
        return [value.decode() for value in reply[1:]]

    async def take(
        self,
        session_id: str,
        incarnation: str,
        *,
        profile: str,
        operation_id: str | None = None,
        expected: int = 0,
    ) -> Taken:
        """Take a session that has no owner, or whose owner's lease has lapsed.

        Exactly one worker gets it. Raises SessionHeld; also for a session that anybody has taken
        since it had the `expected` token, if one is given.
        """
        escaped("incarnation", incarnation)
        # One id for all attempts: a repeat of the call means the attempt that was granted.
        name, steal = named("session_take", operation_id), 0
        while True:
            call = scripts.session_take.call(
                self.keys_of(session_id),
                operation_id=name,
                incarnation=incarnation,
                steal=steal,
                expected=expected,
                profile=profile,
                ttl_ms=self._ttl_ms,
            )
            reply = await self._call(call)
            if reply[0] == Code.DONE:
                return _taken(session_id, reply)
            if reply[0] != Code.HELD:
                raise refused(reply, "a take")
            owner, token = reply[1].decode(), int(reply[2])
            if not owner or steal == token:
                raise SessionHeld(session_id, owner, token)
            # What the incarnation has itself it may take again: an earlier reply may be lost.
            if owner != incarnation and await self._is_live(owner):
                raise SessionHeld(session_id, owner, token)
            steal = token

    async def begin(self, session_id: str, token: int) -> BegunCall | None:
        """The call that is begun, or else the next one, begun now. Raises SessionOwnerLost."""
        reply = await self._own(
            session_id, scripts.session_begin.call(self.keys_of(session_id), token=token)
        )
        if len(reply) == 1:
            return None
        return BegunCall(int(reply[1]), reply[2].decode(), reply[3], reply[4].decode())

    async def done(
        self, session_id: str, token: int, seq: int, *, has_run: bool = True, cpu_ms: int = 0
    ) -> int:
        """Remove a call, an execution if it has run; how many wait. Raises SessionOwnerLost."""
        call = scripts.session_done.call(
            self.keys_of(session_id),
            token=token,
            seq=seq,
            has_run=int(has_run),
            cpu_ms=cpu_ms,
            known_ttl_ms=ms_of(self.settings.known_ttl_s),
            ttl_ms=self._ttl_ms,
        )
        return int((await self._own(session_id, call))[1])

    async def release(self, session_id: str, token: int, *, even_unfinished: bool = False) -> None:
        """End the ownership of a session. Raises SessionOwnerLost, and SessionUnfinished.

        With `even_unfinished` a session that has unfinished calls is released too, and is listed
        again. The caller drops its hold on the session only after this.
        """
        try:
            await self._release(session_id, token)
        except SessionUnfinished:
            if not even_unfinished:
                raise
            profile = (await self.info(session_id)).profile
            await self.want(profile, session_id)
            if await self._release(session_id, token, even_unfinished=True):
                # Another worker may have met the owner, and removed the first listing.
                await self.want(profile, session_id)

    async def _release(self, session_id: str, token: int, *, even_unfinished: bool = False) -> int:
        call = scripts.session_release.call(
            self.keys_of(session_id),
            token=token,
            even_unfinished=int(even_unfinished),
            token_ttl_ms=_TOKEN_TTL_MS,
        )
        reply = await self._own(session_id, call)
        if reply[0] == Code.UNFINISHED:
            raise SessionUnfinished(session_id, int(reply[1]))
        return int(reply[1])

    async def reap(self, session_id: str, incarnation: str) -> bool:
        """Release a session that a dead worker held; list it if it has calls or is to be closed.

        Any number of reapers may do so, also repeatedly; whether there was anything to do. The
        caller drops the dead worker's hold on the session (`held_sessions`) only after this.
        """
        try:
            info = await self.info(session_id)
            if info.owner == incarnation:
                await self.release(session_id, info.token, even_unfinished=True)
                if not (info.is_closing and info.created_at):
                    return True
            elif info.owner or not (info.unfinished or info.is_closing):
                return False
        except (SessionUnknown, SessionOwnerLost):
            return False
        # Also if its owner, or another reaper, has released it: who may have died since.
        await self.want(info.profile, session_id)
        return True

    async def take_requests(
        self, session_id: str, token: int, after: str = "", count: int = 100
    ) -> RequestPage:
        """Requests to the owner after an entry; they stay until `reply`, or until they expire.

        Raises SessionOwnerLost.
        """
        call = scripts.session_requests.call(
            self.keys_of(session_id), token=token, after=after, count=count
        )
        _, closing, *flat = await self._own(session_id, call)
        entries = (flat[n : n + 3] for n in range(0, len(flat), 3))
        return RequestPage(
            tuple(
                RequestEntry(entry.decode(), known.decode(), data) for entry, known, data in entries
            ),
            bool(closing),
        )

    async def reply(
        self, session_id: str, token: int, request: RequestEntry, payload: bytes
    ) -> None:
        """Answer a request; also after the session was released. Raises SessionOwnerLost."""
        keys = self.keys_of(session_id)
        call = scripts.session_reply.call(
            keys,
            keys.reply(request.request_id),
            token=token,
            entry=request.entry,
            answer=payload,
            ttl_ms=ms_of(self.settings.request_ttl_s),
        )
        await self._own(session_id, call)

    async def let_go(self, session_id: str, incarnation: str, lease_token: str) -> None:
        """Drop the hold on a session, however its ownership ended, and if it ever began.

        What is unfinished is listed again before: after a fault the worker may own the session
        without knowing it, or may have removed the listing of a session that it does not own.
        Raises LeaseLost; then a reaper does the same.
        """
        await self.reap(session_id, incarnation)
        await self.hold(incarnation, lease_token, [], [session_id])

    async def _own(self, session_id: str, call: Call) -> Reply:
        """The reply to an owner's call; raises SessionOwnerLost."""
        reply = await self._call(call)
        if reply[0] == Code.STALE:
            raise SessionOwnerLost(session_id, reply[1].decode())
        if reply[0] not in (Code.DONE, Code.UNFINISHED, Code.MISSING):
            raise refused(reply, f"session {session_id!r:.100}")
        return reply


def _taken(session_id: str, reply: Reply) -> Taken:
    _, token, profile, tenant, waiting, executions, closing, checkpoint, *begun = reply
    seq, call, payload, begun_ago_ms = begun
    return Taken(
        session_id=session_id,
        token=int(token),
        profile=profile.decode(),
        tenant=tenant.decode(),
        waiting=int(waiting),
        executions=int(executions),
        is_closing=bool(closing),
        checkpoint=checkpoint or None,
        begun=BegunCall(int(seq), call.decode(), payload) if seq else None,
        begun_ago_s=int(begun_ago_ms) / 1000,
    )


def _seconds(ms: bytes | None) -> float | None:
    return None if ms is None else int(ms) / 1000
