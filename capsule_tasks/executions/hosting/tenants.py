"""Limits of tenants: how many of their sessions are live, and how much processor time they use."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial

from capsule_tasks.errors import StorageError
from capsule_tasks.executions.background import BackgroundTasks
from capsule_tasks.executions.hosting.child import Meter
from capsule_tasks.settings import TenantSettings
from capsule_tasks.storage.operations import new_operation
from capsule_tasks.storage.sessions.tenants import TenantStore

ANY = "*"
"""Stands for every tenant that has no limits of its own."""
_UNLIMITED = TenantSettings()
METER_EVERY_S = 0.25
"""Between two readings of the processor time of a session's child."""
COUNT_EVERY_S = 1.0
"""Between two times that it is counted, for a tenant with a limit."""
IDLE_MS = 1000
"""The time of a child after a call although its tenant is over the limit: for its checkpoint."""
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
        if not self.has_cpu_limit(tenant):
            return ""
        limits = self._limits_of(tenant)
        usage = await self._background.call_until_answered(partial(self._store.usage, tenant))
        if usage.cpu_ms < limits.max_cpu_s * 1000:
            return ""
        since = datetime.fromtimestamp(usage.window_started_at, UTC).isoformat(" ", "seconds")
        return (
            f"tenant {tenant!r} has used {usage.cpu_ms / 1000:.1f} s of processor time since "
            f"{since}, and may use {limits.max_cpu_s:g} s"
        )

    def has_cpu_limit(self, tenant: str) -> bool:
        """Whether the processor time of the tenant is limited."""
        return bool(tenant) and self._limits_of(tenant).max_cpu_s > 0

    async def add_call(self, tenant: str, call_id: str, cpu_ms: int) -> None:
        """Count a call that has ended, once."""
        if tenant:
            add = partial(self._store.add_usage, tenant, cpu_ms, operation_id=call_id)
            await self._background.call_until_answered(add)

    async def add_cpu(self, tenant: str, cpu_ms: int) -> None:
        """Count processor time that belongs to no call that has ended."""
        operation_id = new_operation()
        add = partial(self._store.add_usage, tenant, cpu_ms, 0, operation_id=operation_id)
        await self._background.call_until_answered(add)

    def add_cpu_soon(self, tenant: str, cpu_ms: int) -> None:
        """The same, without waiting."""
        self._background.spawn(self.add_cpu(tenant, cpu_ms))

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


class UsageWatch:
    """Counts the processor time of one session's child for its tenant.

    While a call runs; for a tenant with a limit all the time, since what code has started goes on
    after its call. A session that uses more once its tenant is over the limit is stopped.
    """

    def __init__(
        self,
        tenant: Callable[[], str],
        tenants: Tenants,
        meter: Meter,
        stop: Callable[[str], Awaitable[None]],
    ) -> None:
        """`tenant` may be unknown until the first call; `stop` is told why."""
        self._tenant = tenant
        self._tenants = tenants
        self._meter = meter
        self._stop = stop
        self._counted_ms = 0
        self._since_ms = 0
        """The time used when the call began, or the last one ended."""
        self._is_in_call = False

    async def run(self) -> None:
        """Measure, and count; until cancelled."""
        passed_s = 0.0
        while True:
            await asyncio.sleep(METER_EVERY_S)
            passed_s += METER_EVERY_S
            is_limited = self._tenants.has_cpu_limit(self._tenant())
            if not is_limited and not self._is_in_call:
                continue
            used_ms = self._meter.used_ms()
            if is_limited and passed_s >= COUNT_EVERY_S and used_ms > self._counted_ms:
                passed_s = 0.0
                await self._count(used_ms)

    async def _count(self, used_ms: int) -> None:
        """Count what was used since the last time; stop the session over the limit."""
        tenant, cpu_ms = self._tenant(), used_ms - self._counted_ms
        self._counted_ms = used_ms
        await self._tenants.add_cpu(tenant, cpu_ms)
        if not (why := await self._tenants.over_limit(tenant)):
            return
        if self._is_in_call or used_ms - self._since_ms >= IDLE_MS:
            await self._stop(why)

    def begin_call(self) -> None:
        """A call begins."""
        self._since_ms = self._meter.used_ms()
        self._is_in_call = True

    def end_call(self) -> int:
        """The milliseconds that the call has used."""
        self._is_in_call = False
        began_ms, self._since_ms = self._since_ms, self._meter.used_ms()
        return self._since_ms - began_ms

    async def count_call(self, call_id: str, cpu_ms: int) -> None:
        """Count a call that has ended, with what it used."""
        if self._tenants.has_cpu_limit(self._tenant()):
            used_ms = self._meter.used_ms()
            cpu_ms, self._counted_ms = used_ms - self._counted_ms, used_ms
        await self._tenants.add_call(self._tenant(), call_id, cpu_ms)

    def count_rest(self) -> None:
        """Count what is not counted yet, in the background: the session leaves."""
        used_ms = self._meter.used_ms()
        if self._tenants.has_cpu_limit(self._tenant()) and used_ms > self._counted_ms:
            self._tenants.add_cpu_soon(self._tenant(), used_ms - self._counted_ms)
            self._counted_ms = used_ms
