"""The index of named sessions, by their last use. Their records are authoritative."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec

from capsule_tasks.settings import NamedSessionSettings
from capsule_tasks.storage.facades import AsyncTarget
from capsule_tasks.storage.keys import SessionIndexKeys
from capsule_tasks.storage.scripts import Argument
from capsule_tasks.storage.sessions import scripts
from capsule_tasks.storage.sessions.base import SessionStoreBase, ms_of
from capsule_tasks.storage.sessions.types import SessionEntry

_PAGE = 500


class _Record(msgspec.Struct, omit_defaults=True):
    p: str = ""
    t: str = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Record).decode


class SessionIndex(SessionStoreBase):
    """Sessions by the time when somebody recorded them last; the oldest are dropped."""

    def __init__(self, redis: AsyncTarget, *, settings: NamedSessionSettings | None = None) -> None:
        super().__init__(redis, settings=settings)
        self._keys = SessionIndexKeys(self._prefix)

    async def record(
        self, entries: Sequence[SessionEntry] = (), dropped: Sequence[str] = ()
    ) -> None:
        """Record sessions that are used now, and drop those that are no more."""
        updates: list[Argument] = []
        for entry in entries:
            updates += [entry.session_id, _encode(_Record(entry.profile, entry.tenant))]
        for session_id in dropped:
            updates += [session_id, b""]
        call = scripts.index_record.call(
            self._keys,
            max_entries=self.settings.index_max,
            ttl_ms=ms_of(self.settings.ttl_s),
            updates=updates,
        )
        await self._call(call)

    async def entries(
        self, *, profile: str | None = None, tenant: str | None = None
    ) -> AsyncIterator[SessionEntry]:
        """Sessions of a profile, or of a tenant; those that were recorded last come first."""
        before = ""
        while True:
            call = scripts.index_list.call(self._keys, before=before, count=_PAGE)
            _, *reply = await self._call(call)
            for n in range(0, len(reply), 3):
                entry = _entry(*reply[n : n + 3])
                if profile in (None, entry.profile) and tenant in (None, entry.tenant):
                    yield entry
            if len(reply) < 3 * _PAGE:
                return
            before = reply[-2].decode()


def _entry(session_id: bytes, recorded_us: bytes, record: bytes) -> SessionEntry:
    known = _decode(record or b"{}")
    return SessionEntry(session_id.decode(), known.p, known.t, int(recorded_us) / 1e6)
