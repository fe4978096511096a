"""The base of the stores of named sessions: settings, keys, and calls of scripts."""

from __future__ import annotations

from capsule_tasks.errors import SessionOwnerLost
from capsule_tasks.settings import NamedSessionSettings
from capsule_tasks.storage.drivers import drive
from capsule_tasks.storage.facades import AsyncFacade, AsyncTarget
from capsule_tasks.storage.keys import NamedSessionKeys, doorbell_prefix
from capsule_tasks.storage.operations import Reply, call_script, refused
from capsule_tasks.storage.scripts import Call, Code


class SessionStoreBase(AsyncFacade):
    """One Redis that has named sessions."""

    def __init__(self, redis: AsyncTarget, *, settings: NamedSessionSettings | None = None) -> None:
        super().__init__(redis)
        self.settings = settings or NamedSessionSettings()
        self._prefix = self.settings.prefix
        self._retry = self.settings.retry
        self._ttl_ms = ms_of(max(self.settings.ttl_s, self.settings.known_ttl_s))
        self._doorbell_prefix = doorbell_prefix(self._prefix)

    def keys_of(self, session_id: str) -> NamedSessionKeys:
        return NamedSessionKeys(session_id, self._prefix)

    async def _call(self, call: Call) -> Reply:
        return await drive(call_script(call, self._retry), self.store)

    async def _own(self, session_id: str, call: Call) -> Reply:
        """The reply to an owner's call; raises SessionOwnerLost."""
        reply = await self._call(call)
        if reply[0] == Code.STALE:
            raise SessionOwnerLost(session_id, reply[1].decode())
        if reply[0] not in (Code.DONE, Code.UNFINISHED, Code.MISSING):
            raise refused(reply, f"session {session_id!r:.100}")
        return reply


def ms_of(seconds: float) -> int:
    return int(seconds * 1000)
