"""A store of named sessions with workers, for the suite."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from capsule_tasks.settings import LeaseSettings, NamedSessionSettings
from capsule_tasks.storage import Lease
from capsule_tasks.storage.drivers import AsyncStore
from capsule_tasks.storage.sessions.store import NamedSessionStore
from capsule_tasks.storage.sessions.types import Submitted, Taken, Wanted

PROFILE = "sandbox"


@dataclass
class Subject:
    """One store, and the leases of its workers."""

    store: AsyncStore
    prefix: str
    leases: dict[str, Any] = field(default_factory=dict)

    def sessions(self, **changes: Any) -> NamedSessionStore:
        settings = NamedSessionSettings(prefix=self.prefix, **changes)
        return NamedSessionStore(self.store, settings=settings)

    async def worker(self, incarnation: str) -> str:
        """Start a worker's lease; its token."""
        settings = LeaseSettings(lease_s=600.0)
        lease: Any = Lease(incarnation, self.store, settings=settings, prefix=self.prefix)
        await lease.acquire()
        self.leases[incarnation] = lease
        token: str = lease.core.token
        return token

    async def kill(self, incarnation: str) -> None:
        """Let a worker's lease lapse."""
        await self.leases[incarnation].release()

    async def submit(self, call_id: str, session_id: str = "s", **options: Any) -> Submitted:
        return await self.sessions().submit(
            session_id, call_id, f"run {call_id}".encode(), profile=PROFILE, **options
        )

    async def take(self, incarnation: str, session_id: str = "s") -> Taken:
        return await self.sessions().take(session_id, incarnation, profile=PROFILE)

    async def wanted(self) -> list[str]:
        """The sessions on the list; they stay due."""
        page = await self.sessions().take_wanted(PROFILE, 100, visible_again_s=0)
        return [each.session_id for each in page.sessions]

    async def one_wanted(self) -> Wanted:
        (wanted,) = (await self.sessions().take_wanted(PROFILE, 1)).sessions
        return wanted
