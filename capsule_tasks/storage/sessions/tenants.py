"""Tenants: how many sessions they have on workers, and what these used."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from capsule_tasks.errors import TenantFull
from capsule_tasks.settings import NamedSessionSettings
from capsule_tasks.storage.facades import AsyncTarget
from capsule_tasks.storage.keys import TenantKeys
from capsule_tasks.storage.operations import named
from capsule_tasks.storage.scripts import Code
from capsule_tasks.storage.sessions import scripts
from capsule_tasks.storage.sessions.base import SessionStoreBase, ms_of
from capsule_tasks.storage.sessions.types import TenantUsage

_PAGE = 500


class TenantStore(SessionStoreBase):
    """Reservations and usage of tenants.

    A reservation is made before a session is taken and lapses unless it is renewed, so that a
    worker that dies takes no place for long. A session has one place, whoever holds it: a worker
    that gives up the place of a session that another has taken meanwhile makes a mistake that the
    other's next renewal corrects.
    """

    def __init__(self, redis: AsyncTarget, *, settings: NamedSessionSettings | None = None) -> None:
        super().__init__(redis, settings=settings)
        self._ttl_ms = ms_of(self.settings.ttl_s)
        self._window_ms = ms_of(self.settings.usage_window_s)

    async def reserve(
        self, tenant: str, session_id: str, *, max_sessions: int, lease_s: float
    ) -> int:
        """Reserve a place for a session that is about to be taken; how many are live then.

        `max_sessions` is 0 for any number. Raises TenantFull.
        """
        call = scripts.tenant_reserve.call(
            self._keys(tenant),
            session_id=session_id,
            max_sessions=max_sessions,
            lease_ms=ms_of(lease_s),
            ttl_ms=self._ttl_ms,
        )
        reply = await self._call(call)
        if reply[0] == Code.FULL:
            raise TenantFull(tenant, int(reply[1]))
        return int(reply[1])

    async def renew_reservations(
        self, tenant: str, session_ids: Sequence[str], *, lease_s: float
    ) -> None:
        """Renew the places of sessions that the caller holds, also of those that had lapsed."""
        call = scripts.tenant_renew.call(
            self._keys(tenant),
            lease_ms=ms_of(lease_s),
            ttl_ms=self._ttl_ms,
            session_ids=session_ids,
        )
        await self._call(call)

    async def unreserve(self, tenant: str, session_ids: Sequence[str]) -> None:
        """Give up the places of sessions that the caller has released."""
        await self._call(scripts.tenant_unreserve.call(self._keys(tenant), session_ids=session_ids))

    async def note(self, tenant: str, session_id: str) -> None:
        """Note that a session is the tenant's, so that `sessions_of` finds it."""
        call = scripts.tenant_note.call(
            self._keys(tenant), session_id=session_id, ttl_ms=self._ttl_ms
        )
        await self._call(call)

    async def sessions_of(self, tenant: str) -> AsyncIterator[str]:
        """All sessions of a tenant that were used, or noted, within the time to live."""
        offset = 0
        while True:
            call = scripts.tenant_sessions.call(self._keys(tenant), offset=offset, count=_PAGE)
            _, *ids = await self._call(call)
            for session_id in ids:
                yield session_id.decode()
            if len(ids) < _PAGE:
                return
            offset += _PAGE

    async def add_usage(
        self, tenant: str, cpu_ms: int, calls: int = 1, *, operation_id: str | None = None
    ) -> int:
        """Count processor time and calls; the milliseconds in the present window of time."""
        call = scripts.tenant_add_usage.call(
            self._keys(tenant),
            operation_id=named("tenant_add_usage", operation_id),
            cpu_ms=cpu_ms,
            calls=calls,
            window_ms=self._window_ms,
            ttl_ms=self._ttl_ms,
        )
        return int((await self._call(call))[1])

    async def usage(self, tenant: str) -> TenantUsage:
        """The usage of a tenant's sessions, and how many are live; zeros for an unknown tenant."""
        call = scripts.tenant_usage.call(self._keys(tenant), window_ms=self._window_ms)
        _, live, window_ms, cpu_ms, calls, total_cpu_ms, total_calls = await self._call(call)
        return TenantUsage(
            live=int(live),
            window_started_at=int(window_ms) / 1000,
            cpu_ms=int(cpu_ms),
            calls=int(calls),
            total_cpu_ms=int(total_cpu_ms),
            total_calls=int(total_calls),
        )

    async def forget(self, tenant: str) -> None:
        """Erase what is known of a tenant; its sessions are to be forgotten first."""
        await self._call(scripts.tenant_forget.call(self._keys(tenant)))

    def _keys(self, tenant: str) -> TenantKeys:
        return TenantKeys(tenant, self._prefix)
