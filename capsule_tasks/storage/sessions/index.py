"""The index of named sessions: for lists of them. Their records are authoritative."""

from __future__ import annotations

from collections.abc import Sequence

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
    o: str = ""
    n: int = 0


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
        """Record sessions as they are now, and drop those that are no more."""
        updates: list[Argument] = []
        for entry in entries:
            record = _Record(entry.profile, entry.tenant, entry.owner, entry.executions)
            updates += [entry.session_id, _encode(record)]
        for session_id in dropped:
            updates += [session_id, b""]
        call = scripts.index_record.call(
            self._keys,
            max_entries=self.settings.index_max,
            ttl_ms=ms_of(self.settings.ttl_s),
            updates=updates,
        )
        await self._call(call)

    async def list_sessions(
        self, *, profile: str | None = None, tenant: str | None = None, limit: int = 50
    ) -> list[SessionEntry]:
        """Sessions of a profile, or of a tenant; those that were recorded last come first."""
        found: list[SessionEntry] = []
        before = ""
        while len(found) < limit:
            call = scripts.index_list.call(self._keys, before=before, count=_PAGE)
            reply = await self._call(call)
            entries = [_entry(*reply[n : n + 3]) for n in range(1, len(reply), 3)]
            found += [
                entry
                for entry in entries
                if profile in (None, entry.profile) and tenant in (None, entry.tenant)
            ]
            if len(entries) < _PAGE:
                break
            before = reply[-2].decode()
        return found[:limit]


def _entry(session_id: bytes, recorded_us: bytes, record: bytes) -> SessionEntry:
    known = _decode(record or b"{}")
    return SessionEntry(
        session_id.decode(), known.p, known.t, known.o, known.n, int(recorded_us) / 1e6
    )
