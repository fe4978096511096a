"""`SessionPool`: sessions kept warm, lent to one borrower at a time, never leaked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Self

from capsule_tasks.errors import NotBorrowed
from capsule_tasks.sessions.arguments import check_type
from capsule_tasks.sessions.info import PoolInfo
from capsule_tasks.sessions.pool.profile_pool import SubPool
from capsule_tasks.sessions.process.template_spawner import TemplateSpawner
from capsule_tasks.sessions.session import Session
from capsule_tasks.settings import Profile

DEFAULT_PROFILE = "app"


class SessionPool:
    """Sessions by profile. Each profile has a pool of its own, so none can starve another.

    Borrow with `async with pool.borrow() as session`; or `acquire`, and `release` when done.
    """

    def __init__(
        self,
        profiles: Mapping[str, Profile] | None = None,
        *,
        spawner: TemplateSpawner | None = None,
        on_new: Callable[[Session], object] | None = None,
    ) -> None:
        """With a `spawner` all profiles are started by it; starting and stopping it is yours.

        `on_new` is called with each session before it starts, to listen to it from the beginning.
        """
        check_type("profiles", profiles, Mapping, None)
        if profiles is None:
            profiles = {DEFAULT_PROFILE: Profile()}
        elif not profiles:
            raise ValueError("profiles must hold at least one, or be None for the default")
        for name, profile in profiles.items():
            check_type("the name of a profile", name, str)
            check_type(f"profile {name!r}", profile, Profile)
        self._pools = {
            name: SubPool(name, profile, spawner, on_new) for name, profile in profiles.items()
        }

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Load the templates and begin to fill the pools; does not wait for the sessions."""
        try:
            await asyncio.gather(*(pool.start() for pool in self._pools.values()))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End everything, busy sessions too; waiters are told. Safe at any time, and twice.

        Who is cancelled meanwhile leaves only when everything has ended.
        """
        pools = self._pools.values()
        ending = asyncio.ensure_future(asyncio.gather(*(pool.stop() for pool in pools)))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait({ending})
            raise

    async def acquire(self, profile: str = DEFAULT_PROFILE, *, name: str | None = None) -> Session:
        """A session for this caller alone; first come, first served. Give it back with `release`.

        With a `name` it is the session of that name: what its last borrower left in the namespace
        is still there. PoolUnavailable says why there will be none.
        """
        check_type("name", name, str, None)
        return await self.subpool(profile).acquire(name)

    def release(self, session: Session) -> None:
        """Give a session back. NotBorrowed if it is not lent; SessionBusy while code runs in it."""
        self._owner_pool(session).release(session)

    def retire(self, session: Session) -> None:
        """Give a session back that nobody should use again, whatever still runs in it."""
        self._owner_pool(session).retire(session)

    @contextlib.asynccontextmanager
    async def borrow(
        self, profile: str = DEFAULT_PROFILE, *, name: str | None = None
    ) -> AsyncIterator[Session]:
        """`acquire`, then `release`; a session in which code still runs by then is retired."""
        check_type("name", name, str, None)
        pool = self.subpool(profile)
        session = await pool.acquire(name)
        try:
            yield session
        finally:
            if pool.owns(session):
                give_back = pool.retire if session.info.running else pool.release
                give_back(session)

    def renew(self, spawner: TemplateSpawner, profiles: Mapping[str, Profile]) -> None:
        """Start sessions by these from now on; the others end, those on loan once they are back.

        How many sessions each pool may have, and for how long, stays as it was.
        """
        for name, profile in profiles.items():
            self.subpool(name).renew(spawner, profile)

    def info(self, profile: str = DEFAULT_PROFILE) -> PoolInfo:
        """What the pool of a profile holds, and what it has done so far."""
        return self.subpool(profile).info()

    def spawner(self, profile: str = DEFAULT_PROFILE) -> TemplateSpawner:
        """What starts the profile's sessions, for a session that the pool should not own."""
        return self.subpool(profile).spawner

    def subpool(self, profile: str) -> SubPool:
        """The pool of one profile, for whoever assigns work to its sessions and borrows none."""
        check_type("profile", profile, str)
        pool = self._pools.get(profile)
        if pool is None:
            known = ", ".join(map(repr, self._pools))
            raise ValueError(f"there is no profile {profile!r}; this pool has {known}")
        return pool

    def _owner_pool(self, session: Session) -> SubPool:
        check_type("session", session, Session)
        for pool in self._pools.values():
            if pool.owns(session):
                return pool
        raise NotBorrowed(session.session_id)
