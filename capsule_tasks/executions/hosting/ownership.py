"""The ownership of one named session in this worker: from the take to the last release.

Only the owner with the latest token changes the call log of a session. A token is lost when another
worker takes the session, or the session is forgotten; the owner finds out with its next write.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from capsule_tasks.errors import LeaseLost, SessionHeld, SessionOwnerLost, StorageError
from capsule_tasks.storage.operations import new_operation
from capsule_tasks.storage.sessions.types import BegunCall, Taken

if TYPE_CHECKING:
    from capsule_tasks.executions.hosting.profile import ProfileHost

log = logging.getLogger("capsule_tasks.taskpool")

T = TypeVar("T")


class Ownership:
    """Takes, retakes and releases one session, and makes the writes of its owner."""

    def __init__(self, session_id: str, host: ProfileHost) -> None:
        self.session_id = session_id
        self.incarnation = ""
        """Under which the session is owned."""
        self.token = 0
        self.is_lost = False
        """Whether another worker took the session, or it was forgotten."""
        self._profile = host.profile.name
        self._store = host.store
        self._lease = host.publisher.lease
        self._background = host.background
        self._spawn = host.spawn
        self._writing = asyncio.Lock()
        """Held by each of the owner's writes: the token changes between two of them."""

    async def take(self) -> Taken:
        """Become the owner. Raises SessionHeld, LeaseLost and StorageError."""
        lease = self._lease
        await lease.is_held.wait()
        self.incarnation = lease.incarnation
        await self._store.hold(self.incarnation, lease.token, [self.session_id])
        taken = await self._store.take(self.session_id, self.incarnation, profile=self._profile)
        self.token = taken.token
        if not lease.is_certain(self.incarnation):
            # If it had lapsed, a reaper may have looked for the session before it was taken.
            raise LeaseLost(self.incarnation)
        return taken

    async def retake(self, incarnation: str) -> bool:
        """Own the session under the worker's new lease; False if somebody else took it since."""
        async with self._writing:
            if not self.token or self.is_lost:
                return True
            retake = partial(self._retake, incarnation, new_operation())
            try:
                await self._background.call_until_answered(retake)
            except LeaseLost:
                return True  # the lease after that one retakes the session
            except SessionHeld as held:
                log.warning("%s, so its child is killed in this worker", held)
                self.is_lost = True
        return not self.is_lost

    async def _retake(self, incarnation: str, operation_id: str) -> None:
        await self._store.hold(incarnation, self._lease.token, [self.session_id])
        taken = await self._store.take(
            self.session_id,
            incarnation,
            profile=self._profile,
            operation_id=operation_id,
            expected=self.token,
        )
        self.incarnation, self.token = incarnation, taken.token

    # --- the owner's writes ----------------------------------------------------------------------

    async def write(self, write: Callable[[], Awaitable[T]]) -> T:
        """Write as the owner until Redis answers; SessionOwnerLost if somebody else is."""
        return await self._write(self._background.call_until_answered, write)

    async def write_unless_refused(
        self, write: Callable[[], Awaitable[T]], what: str, patience_s: float
    ) -> T:
        """The same, but raise what only the operator of Redis can mend, after the patience."""
        until_refused = partial(
            self._background.call_unless_refused, what=what, patience_s=patience_s
        )
        return await self._write(until_refused, write)

    async def _write(
        self,
        until_answered: Callable[[Callable[[], Awaitable[T]]], Awaitable[T]],
        write: Callable[[], Awaitable[T]],
    ) -> T:
        async with self._writing:
            if self.is_lost:
                raise SessionOwnerLost(self.session_id, "")
            try:
                return await until_answered(write)
            except SessionOwnerLost:
                self.is_lost = True
                raise

    async def begin(self) -> BegunCall | None:
        """The call that is begun, or else the next one, begun now."""
        return await self.write(lambda: self._store.begin(self.session_id, self.token))

    async def done(self, begun: BegunCall, *, has_run: bool, cpu_ms: int = 0) -> None:
        """Take the call from the log."""
        done, seq = self._store.done, begun.seq
        await self.write(
            lambda: done(self.session_id, self.token, seq, has_run=has_run, cpu_ms=cpu_ms)
        )

    async def restart(self) -> int:
        """Record that the session begins with an empty namespace; how many calls are done."""
        return await self.write(lambda: self._store.restart(self.session_id, self.token))

    async def release(self, *, even_unfinished: bool = True) -> None:
        """End the ownership; raises SessionUnfinished unless `even_unfinished`."""
        release = self._store.release
        await self.write(
            lambda: release(self.session_id, self.token, even_unfinished=even_unfinished)
        )

    # --- after the release -----------------------------------------------------------------------

    async def drop_hold(self) -> None:
        """After the release: until then a reaper has to find the session."""
        if not self.incarnation:
            return
        try:
            await self._let_go()
        except StorageError:
            self._spawn(self._background.call_until_answered(self._let_go))

    async def _let_go(self) -> None:
        with contextlib.suppress(LeaseLost):  # a reaper does the same
            await self._store.let_go(self.session_id, self.incarnation, self._lease.token)
