"""`SessionPool`: warm sessions, each lent to one borrower at a time, never leaked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Self

from capsule_tasks.errors import NotBorrowed
from capsule_tasks.sessions.arguments import check_type
from capsule_tasks.sessions.info import PoolInfo
from capsule_tasks.sessions.pool.profile_pool import ProfilePool
from capsule_tasks.sessions.process.template import TemplateSpawner
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
        """With a `spawner`, which the caller starts and stops, it starts all sessions.

        `on_new` is called with each session before it starts, so that listeners miss nothing.
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
            name: ProfilePool(name, profile, spawner, on_new) for name, profile in profiles.items()
        }

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Load the templates and start filling the pools; does not wait for the sessions."""
        try:
            await asyncio.gather(*(pool.start() for pool in self._pools.values()))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop every session, busy ones too, and fail the waiters. Safe at any time, and twice.

        A caller that is cancelled meanwhile returns only when everything has stopped.
        """
        pools = self._pools.values()
        ending = asyncio.ensure_future(asyncio.gather(*(pool.stop() for pool in pools)))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait({ending})
            raise

    async def acquire(self, profile: str = DEFAULT_PROFILE, *, name: str | None = None) -> Session:
        """A session for this caller alone; first come, first served. Return it with `release`.

        With a `name` it is the session of that name, with the namespace as its last borrower left
        it. PoolUnavailable says why there will be no session.
        """
        check_type("name", name, str, None)
        return await self.profile_pool(profile).acquire(name)

    def release(self, session: Session) -> None:
        """Return a session; NotBorrowed if it is not borrowed, SessionBusy if code runs in it."""
        self._owner_pool(session).release(session)

    def retire(self, session: Session) -> None:
        """Return a session that must not be used again, whatever still runs in it."""
        self._owner_pool(session).retire(session)

    @contextlib.asynccontextmanager
    async def borrow(
        self, profile: str = DEFAULT_PROFILE, *, name: str | None = None
    ) -> AsyncIterator[Session]:
        """`acquire`, then `release`; a session in which code still runs is retired instead."""
        check_type("name", name, str, None)
        pool = self.profile_pool(profile)
        session = await pool.acquire(name)
        try:
            yield session
        finally:
            if pool.owns(session):
                (pool.retire if session.info.running else pool.release)(session)

    def renew(self, spawner: TemplateSpawner, profiles: Mapping[str, Profile]) -> None:
        """Start sessions by these from now on; retire the others, borrowed ones on their release.

        The settings of the pools, as the number of sessions and their age, stay as they were.
        """
        for name, profile in profiles.items():
            self.profile_pool(name).renew(spawner, profile)

    def info(self, profile: str = DEFAULT_PROFILE) -> PoolInfo:
        """The state and the totals of the pool of a profile."""
        return self.profile_pool(profile).info()

    def spawner(self, profile: str = DEFAULT_PROFILE) -> TemplateSpawner:
        """The spawner of the profile's sessions, for a session that the pool should not own."""
        return self.profile_pool(profile).spawner

    def profile_pool(self, profile: str) -> ProfilePool:
        """The pool of one profile, for a caller that assigns work to sessions and borrows none."""
        check_type("profile", profile, str)
        pool = self._pools.get(profile)
        if pool is None:
            known = ", ".join(map(repr, self._pools))
            raise ValueError(f"there is no profile {profile!r}; this pool has {known}")
        return pool

    def _owner_pool(self, session: Session) -> ProfilePool:
        check_type("session", session, Session)
        for pool in self._pools.values():
            if pool.owns(session):
                return pool
        raise NotBorrowed(session.session_id)
