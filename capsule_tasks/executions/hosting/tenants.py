"""Limits of tenants: how many of their sessions are live, and how much processor time they use."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial

from capsule_tasks.errors import StorageError
from capsule_tasks.executions.background import BackgroundTasks
from capsule_tasks.settings import TenantSettings
from capsule_tasks.storage.sessions.tenants import TenantStore

ANY = "*"
"""Stands for every tenant that has no limits of its own."""
_UNLIMITED = TenantSettings()
_LEASES = 3
"""Renewals that may fail until a place lapses."""


class Tenants:
    """The tenants of the sessions that are here. A session without a tenant has no limits."""

    def __init__(
        self,
        store: TenantStore,
        limits: Mapping[str, TenantSettings],
        lease_s: float,
        background: BackgroundTasks,
    ) -> None:
        self._store = store
        self._limits = limits
        self._lease_s = lease_s
        self._background = background
        self._sessions: defaultdict[str, set[str]] = defaultdict(set)

    async def enter(self, tenant: str, session_id: str) -> None:
        """Reserve a place for a session, unless it has one. Raises TenantFull.

        Before the session gets a child; and before its first call, for a worker that takes a new
        session before that call is appended, and does not know the tenant until then.
        """
        if not tenant or session_id in self._sessions.get(tenant, ()):
            return
        limits = self._limits_of(tenant)
        reserve = partial(
            self._store.reserve,
            tenant,
            session_id,
            max_sessions=limits.max_sessions,
            lease_s=_LEASES * self._lease_s,
        )
        await self._background.call_until_answered(reserve)
        self._sessions[tenant].add(session_id)

    async def leave(self, tenant: str, session_id: str) -> None:
        """Give up the place; if Redis does not answer, it lapses."""
        if session_id not in self._sessions.get(tenant, ()):
            return
        self._sessions[tenant].discard(session_id)
        if not self._sessions[tenant]:
            del self._sessions[tenant]
        try:
            await self._store.unreserve(tenant, [session_id])
        except StorageError as error:
            self._background.warn_unavailable(error)

    async def over_limit(self, tenant: str) -> str:
        """Why no call of the tenant may begin now; empty if it may."""
        limits = self._limits_of(tenant)
        if not tenant or not limits.max_cpu_s:
            return ""
        usage = await self._background.call_until_answered(partial(self._store.usage, tenant))
        if usage.cpu_ms < limits.max_cpu_s * 1000:
            return ""
        since = datetime.fromtimestamp(usage.window_started_at, UTC).isoformat(" ", "seconds")
        return (
            f"tenant {tenant!r} has used {usage.cpu_ms / 1000:.1f} s of processor time since "
            f"{since}, and may use {limits.max_cpu_s:g} s"
        )

    async def add_usage(self, tenant: str, call_id: str, cpu_ms: int) -> None:
        """Count a call that has ended, once."""
        if tenant:
            add = partial(self._store.add_usage, tenant, cpu_ms, operation_id=call_id)
            await self._background.call_until_answered(add)

    async def run(self) -> None:
        """Renew the places of the sessions that are here; until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s)
            for tenant, sessions in list(self._sessions.items()):
                try:
                    await self._store.renew_reservations(
                        tenant, sorted(sessions), lease_s=_LEASES * self._lease_s
                    )
                except StorageError as error:
                    self._background.warn_unavailable(error)

    def _limits_of(self, tenant: str) -> TenantSettings:
        return self._limits.get(tenant) or self._limits.get(ANY) or _UNLIMITED
