"""Requests to the owners of named sessions, past the calls that wait, and the replies."""

from __future__ import annotations

from capsule_tasks.errors import SessionNotLive, SessionUnknown
from capsule_tasks.storage.keys import HostKeys
from capsule_tasks.storage.operations import new_operation
from capsule_tasks.storage.scripts import Code
from capsule_tasks.storage.sessions import scripts
from capsule_tasks.storage.sessions.base import SessionStoreBase, ms_of
from capsule_tasks.storage.sessions.types import RequestEntry, RequestPage


class RequestStore(SessionStoreBase):
    """Both sides of a request: a producer sends it and reads the reply, the owner answers."""

    def requests_doorbell_of(self, incarnation: str) -> str:
        """The channel that rings an owner for requests; the message is a session's id."""
        return HostKeys(incarnation, self._prefix).requests_channel

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
