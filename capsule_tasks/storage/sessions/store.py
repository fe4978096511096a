"""Named sessions in one Redis: calls, owners, and the lists of sessions that are wanted or held.

Every write can be repeated: calls carry an id, what owners write carries their token, and a take is
an operation with an id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from capsule_tasks.errors import (
    LeaseLost,
    SessionHeld,
    SessionOwnerLost,
    SessionUnfinished,
    SessionUnknown,
)
from capsule_tasks.storage.keys import HostKeys, escaped
from capsule_tasks.storage.operations import Reply, named, refused
from capsule_tasks.storage.scripts import Code
from capsule_tasks.storage.sessions import scripts
from capsule_tasks.storage.sessions.base import ms_of
from capsule_tasks.storage.sessions.calls import CallStore
from capsule_tasks.storage.sessions.requests import RequestStore
from capsule_tasks.storage.sessions.types import BegunCall, NamedSessionInfo, Taken

_TOKEN_TTL_MS = 600_000
"""How long the token of a session is left of which there is nothing else."""
_READ_AT_ONCE = 100
"""Records that a list of sessions reads at the same time."""


class NamedSessionStore(CallStore, RequestStore):
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

    def doorbell_of(self, incarnation: str) -> str:
        """The channel that rings for the sessions of an owner; the message is a session's id."""
        return HostKeys(incarnation, self._prefix).channel

    async def list_sessions(
        self, *, profile: str | None = None, tenant: str | None = None, limit: int = 50
    ) -> list[NamedSessionInfo]:
        """Sessions of a profile, or of a tenant, as they are now; the one used last comes first.

        Their order in the index may be a second old, which matters where `limit` cuts it.
        """
        found: list[NamedSessionInfo] = []
        unread: list[str] = []
        async for entry in self.index.entries(profile=profile, tenant=tenant):
            unread.append(entry.session_id)
            if len(unread) >= min(_READ_AT_ONCE, limit - len(found)):
                found += await self._infos(unread)
                unread = []
            if len(found) >= limit:
                break
        found += await self._infos(unread)
        found.sort(key=lambda info: info.used_at or 0.0, reverse=True)
        return found

    async def _infos(self, session_ids: Sequence[str]) -> list[NamedSessionInfo]:
        """The sessions that exist: an index entry is written before a session, and outlives it."""
        infos = map(self.info, session_ids)
        found = await asyncio.gather(*infos, return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException) and not isinstance(each, SessionUnknown):
                raise each
        return [each for each in found if isinstance(each, NamedSessionInfo)]

    # --- from the take to the release ----------------------------------------------------------

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
            if owner != incarnation and await self.is_live(owner):
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

    async def restart(self, session_id: str, token: int) -> int:
        """Record that the session begins with an empty namespace; how many calls are done by now.

        Raises SessionOwnerLost.
        """
        call = scripts.session_restart.call(self.keys_of(session_id), token=token)
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
            if info.is_forgotten:
                await self._announce_left(session_id, incarnation)
                return False
            if info.owner == incarnation:
                await self.release(session_id, info.token, even_unfinished=True)
                if not (info.is_closing and info.created_at):
                    return True
            elif info.owner or not (info.unfinished or info.is_closing):
                return False
        except SessionUnknown:
            await self._announce_left(session_id, incarnation)
            return False
        except SessionOwnerLost:
            return False
        # Also if its owner, or another reaper, has released it: who may have died since.
        await self.want(info.profile, session_id)
        return True

    async def let_go(self, session_id: str, incarnation: str, lease_token: str) -> None:
        """Drop the hold on a session, however its ownership ended, and if it ever began.

        What is unfinished is listed again before: after a fault the worker may own the session
        without knowing it, or may have removed the listing of a session that it does not own.
        Raises LeaseLost; then a reaper does the same.
        """
        await self.reap(session_id, incarnation)
        await self.hold(incarnation, lease_token, [], [session_id])

    async def _announce_left(self, session_id: str, incarnation: str) -> None:
        """Tell whoever forgets the session, and may wait for that."""
        keys = self.keys_of(session_id)
        await self._call(scripts.session_forget_left.call(keys, incarnation=incarnation))

    # --- the end of a session ------------------------------------------------------------------

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

    async def start_forgetting(self, session_id: str) -> str:
        """Take a session from its owner and let nobody use it until `forget_session`.

        The incarnation that has not left the session yet, if there is one; a repeat of the call
        rings it. Once it has left, that is announced on the session's channel.
        """
        call = scripts.session_forget_start.call(
            self.keys_of(session_id),
            session_id=session_id,
            ttl_ms=self._ttl_ms,
            doorbell_prefix=self._doorbell_prefix,
        )
        owner: bytes = (await self._call(call))[1]
        return owner.decode()

    async def forget_session(self, session_id: str) -> None:
        """Erase a session's record, its calls, and its history, whoever owns it.

        What has keys of its own is for the caller to erase before: the checkpoint, popped items,
        executions, results.
        """
        call = scripts.session_forget.call(
            self.keys_of(session_id),
            session_id=session_id,
            token_ttl_ms=_TOKEN_TTL_MS,
            doorbell_prefix=self._doorbell_prefix,
        )
        await self._call(call)
        await self.index.record(dropped=[session_id])


def _taken(session_id: str, reply: Reply) -> Taken:
    _, token, profile, tenant, waiting, executions, restart, closing, checkpoint, *begun = reply
    seq, call, payload, begun_ago_ms = begun
    return Taken(
        session_id=session_id,
        token=int(token),
        profile=profile.decode(),
        tenant=tenant.decode(),
        waiting=int(waiting),
        executions=int(executions),
        before_restart=int(restart),
        is_closing=bool(closing),
        checkpoint=checkpoint or None,
        begun=BegunCall(int(seq), call.decode(), payload) if seq else None,
        begun_ago_s=int(begun_ago_ms) / 1000,
    )
