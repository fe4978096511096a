"""Hosts named sessions in a worker: takes those that are wanted, and leaves them in good order.

Redis has the truth of each session: its log of calls, its owner, its checkpoint. What is here, a
child with its namespace, may be lost at any time. Three parts repair that:

- the next owner, who finds the call that was begun and the checkpoint;
- the reaper, which releases what a dead worker held and lists it again if calls wait;
- this worker itself, which owns its sessions under each new lease again, unless they were taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from capsule_tasks.executions.background import BackgroundTasks
from capsule_tasks.executions.hosting.checkpointing import (
    RESTORES_AT_ONCE,
    SAVE_S,
    SAVES_AT_ONCE,
    STOPPING_SAVE_S,
    SaveTurns,
)
from capsule_tasks.executions.hosting.child import HostedProfile
from capsule_tasks.executions.hosting.hosted import HostedSession
from capsule_tasks.executions.hosting.listing import Listing
from capsule_tasks.executions.hosting.plan import WorkerRoom
from capsule_tasks.executions.hosting.profile import ProfileHost, Surroundings
from capsule_tasks.executions.hosting.results import ResultWriter, StoredEnd, StoreResult
from capsule_tasks.executions.hosting.tenants import Tenants
from capsule_tasks.executions.publishing.publisher import Publisher
from capsule_tasks.executions.supervisor import Supervisor
from capsule_tasks.settings import TenantSettings
from capsule_tasks.storage.connections.doorbells import OnRing
from capsule_tasks.storage.sessions.checkpoints import CheckpointStore

log = logging.getLogger("capsule_tasks.taskpool")

_STOPPED_WITH_WORKER = "its worker was stopped while the call ran"
_LEAVE_S = 8.0
"""How long sessions may take to be saved and to leave after their calls have ended."""


class SessionHost:
    """Started and stopped with the pool; everything runs on the loop."""

    def __init__(
        self,
        profiles: Iterable[HostedProfile],
        *,
        publisher: Publisher,
        supervisor: Supervisor,
        checkpoints: CheckpointStore,
        tenants: Mapping[str, TenantSettings],
        store_result: StoreResult,
        stored_end: StoredEnd,
        max_live: int | None = None,
    ) -> None:
        """`max_live`: sessions of all profiles together."""
        self._publisher = publisher
        self._store = store = publisher.sessions
        self._background = BackgroundTasks()
        self._results = ResultWriter(store_result, stored_end, self._background)
        lease_s = publisher.lease.settings.lease_s
        self._tenants = Tenants(store.tenants, tenants, lease_s, self._background)
        self._listing = Listing(store.index, self._background)
        self._save_turns = SaveTurns(SAVES_AT_ONCE, SAVE_S)
        around = Surroundings(
            publisher=publisher,
            supervisor=supervisor,
            store=store,
            checkpoints=checkpoints,
            tenants=self._tenants,
            results=self._results,
            background=self._background,
            save_turns=self._save_turns,
            restores=asyncio.Semaphore(RESTORES_AT_ONCE),
            listing=self._listing,
            room=WorkerRoom(max_live),
        )
        self.profiles = {
            profile.name: ProfileHost(profile, around)
            for profile in profiles
            if profile.limits.max_live > 0
        }
        self._doorbells: dict[str, OnRing] = {}
        """The channels of the present lease."""
        self._grace: asyncio.Timeout | None = None
        """While calls may end by themselves before the host stops."""
        self._is_started = self._is_stopped = False

    # --- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Look for sessions that are wanted; a Redis that is unavailable is waited for."""
        if self._is_started or self._is_stopped:
            return
        self._is_started = True
        self._publisher.follow_lease(self)
        self._background.spawn(self._tenants.run())
        self._background.spawn(self._listing.run())
        for name, host in self.profiles.items():
            self._publisher.listen(self._store.wanted_channel(name), host.wake)
            self._background.spawn(host.run())

    def stop_taking(self) -> None:
        """Take nothing more, and begin no call more; idle sessions leave now."""
        self._save_turns.hurry(STOPPING_SAVE_S)
        for host in self.profiles.values():
            host.stop_taking()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Let calls that run end within the grace, and leave all sessions. Safe at any time."""
        self._is_stopped = True
        hosts = self.profiles.values()
        self.stop_taking()
        self._grace = asyncio.timeout(grace_s)
        has_left_all = await self._left_all(self._grace)
        self._grace = None
        if not has_left_all:
            for host in hosts:
                host.stop_calls(_STOPPED_WITH_WORKER)
            if not await self._left_all(asyncio.timeout(_LEAVE_S)):
                log.warning("sessions were not released in time; other workers take them over")
                await asyncio.gather(*(host.abandon_all() for host in hosts))
        await self._background.stop()
        self._results.stop()

    def end_grace(self) -> None:
        """Stop the calls that `stop` waits for; safe at any time."""
        if self._grace is not None:
            with contextlib.suppress(RuntimeError):  # the grace has just ended
                self._grace.reschedule(asyncio.get_running_loop().time())
            self._grace = None

    async def _left_all(self, limit: asyncio.Timeout) -> bool:
        """Whether every session has left in time."""
        with contextlib.suppress(TimeoutError):
            async with limit:
                await asyncio.gather(*(host.left_all() for host in self.profiles.values()))
        return not any(host.sessions for host in self.profiles.values())

    # --- the lease -----------------------------------------------------------------------------

    def lease_started(self, incarnation: str) -> None:
        """Own all sessions under this lease from now on, and listen to its doorbell."""
        for channel, ring in self._doorbells.items():
            self._publisher.leave(channel, ring)
        self._doorbells = {
            self._store.doorbell_of(incarnation): partial(
                self._on_doorbell, incarnation, HostedSession.ring
            ),
            self._store.requests_doorbell_of(incarnation): partial(
                self._on_doorbell, incarnation, HostedSession.attend
            ),
        }
        for channel, ring in self._doorbells.items():
            self._publisher.listen(channel, ring)
        for session in self._sessions():
            if session.ownership.incarnation != incarnation:
                self._background.spawn(session.retake(incarnation))

    def _on_doorbell(
        self, incarnation: str, tell: Callable[[HostedSession], None], message: bytes | None
    ) -> None:
        """`message` is a session id; None after messages may have been missed."""
        if message is None:
            for session in self._sessions():
                tell(session)
            return
        session_id = message.decode(errors="replace")
        for host in self.profiles.values():
            if (rung := host.sessions.get(session_id)) is not None:
                tell(rung)
                return
        # After a fault Redis may take this worker for the owner of a session that is not here.
        reap = partial(self._store.reap, session_id, incarnation)
        self._background.spawn(self._background.call_until_answered(reap))

    def _sessions(self) -> list[HostedSession]:
        return [session for host in self.profiles.values() for session in host.sessions.values()]
