"""The named sessions of one profile in a worker: which are wanted, which are here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from capsule_tasks.errors import SessionUnknown, StorageError
from capsule_tasks.executions.background import RETRY_DELAY_S, BackgroundTasks
from capsule_tasks.executions.hosting.checkpointing import SaveTurns
from capsule_tasks.executions.hosting.child import HostedProfile
from capsule_tasks.executions.hosting.hosted import HostedSession
from capsule_tasks.executions.hosting.listing import Listing
from capsule_tasks.executions.hosting.plan import WorkerRoom
from capsule_tasks.executions.hosting.results import ResultWriter
from capsule_tasks.executions.hosting.tenants import Tenants
from capsule_tasks.executions.publishing.publisher import Publisher
from capsule_tasks.executions.supervisor import Supervisor
from capsule_tasks.sessions.tasks import SessionTasks
from capsule_tasks.storage.sessions.checkpoints import CheckpointStore
from capsule_tasks.storage.sessions.store import NamedSessionStore
from capsule_tasks.storage.sessions.types import Wanted

log = logging.getLogger("capsule_tasks.taskpool")

_VISIBLE_AGAIN_S = 10.0
"""How long a session that was given to a worker is given to no other: longer than a start."""
PATIENCE_S = 4.0
"""How long sessions of a worker that stops try to be saved in a Redis that refuses that."""
_LOOK_AGAIN_S = 1.0
"""A full worker asks so often whether sessions still wait: others may have taken them."""


@dataclass(eq=False)
class Surroundings:
    """The parts of a worker that all its hosted sessions share."""

    publisher: Publisher
    supervisor: Supervisor
    store: NamedSessionStore
    checkpoints: CheckpointStore
    tenants: Tenants
    results: ResultWriter
    background: BackgroundTasks
    save_turns: SaveTurns
    restores: asyncio.Semaphore
    listing: Listing
    room: WorkerRoom
    hosts: dict[str, ProfileHost] = field(default_factory=dict)
    """By name of the profile."""


class ProfileHost:
    """Carries out what the plan of the profile decides; owns the tasks of its sessions."""

    def __init__(self, profile: HostedProfile, around: Surroundings) -> None:
        self.profile = profile
        self.publisher = around.publisher
        self.supervisor = around.supervisor
        self.store = around.store
        self.checkpoints = around.checkpoints
        self.tenants = around.tenants
        self.results = around.results
        self.background = around.background
        self.save_turns = around.save_turns
        self.restores = around.restores
        self.listing = around.listing
        self.plan = around.room.add_profile(profile.name, profile.limits)
        self.sessions: dict[str, HostedSession] = {}
        self._around = around
        around.hosts[profile.name] = self
        self._tasks = SessionTasks(f"host of profile {profile.name!r}")
        self._wake = asyncio.Event()
        self._patient_until = 0.0
        self._met: list[Wanted] = []
        """Listings of sessions that are here."""

    # --- from outside --------------------------------------------------------------------------

    def wake(self, _message: bytes | None = None) -> None:
        """A session is wanted, or one that is here has changed."""
        self._wake.set()

    def stop_taking(self) -> None:
        """Take nothing more; sessions that are idle, and later the others, leave."""
        if not self.plan.is_stopping:
            self._patient_until = self.now() + PATIENCE_S
        self.plan.is_stopping = True
        self.order_due()

    async def left_all(self) -> None:
        """Return when no session is here."""
        await self._tasks.end()

    def stop_calls(self, reason: str) -> None:
        """Stop the calls that run, in order, and by force after the grace of a cancel."""
        for session in self.sessions.values():
            session.runner.stop(reason)

    async def abandon_all(self) -> None:
        """Leave everything as it is in Redis, where a reaper finds it."""
        await self._tasks.end(0.0)
        await self._tasks.end()

    # --- the loop ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take what is wanted while there is room, and order what is due; until cancelled."""
        while True:
            self._wake.clear()
            wait_s: float | None = RETRY_DELAY_S
            try:
                wanted_in_s = await self._take_wanted()
            except StorageError as error:
                self.background.warn_unavailable(error)
            else:
                wait_s = self._wait_s(wanted_in_s)
            self.order_due()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    async def _take_wanted(self) -> float | None:
        """Take sessions that are wanted; seconds until there may be more, None for no time."""
        plan = self.plan
        if plan.is_stopping:
            return None
        room = plan.room()
        page = await self.store.take_wanted(self.profile.name, room, _VISIBLE_AGAIN_S)
        for wanted in page.sessions:
            if wanted.session_id in self.sessions:
                self._met.append(wanted)
            elif plan.may_take(wanted.session_id, self.now()):
                self._take(wanted)
        await self._take_met()
        is_due = page.next_s == 0.0
        wanted_count = 0
        if is_due and plan.is_full:
            wanted_count = (await self.store.wanted_state(self.profile.name)).sessions
        plan.want_room(wanted_count)
        if is_due:
            return 0.0 if plan.room() else _LOOK_AGAIN_S
        return page.next_s

    async def _take_met(self) -> None:
        """Take again what has just left, listed because calls wait; other listings are old."""
        met, self._met = self._met, []
        for wanted in met:
            session_id = wanted.session_id
            if session_id not in self.sessions:
                if self.plan.may_take(session_id, self.now()):
                    self._take(wanted)
            elif await self._owns(self.sessions[session_id]):
                await self.store.unwant(self.profile.name, wanted)
            else:
                self._met.append(wanted)

    async def _owns(self, session: HostedSession) -> bool:
        """Whether a listing of a session that is here is old.

        A session that is leaving, or was closed or forgotten a moment ago, is still here while a
        caller lists it again: that listing is the only one.
        """
        if self.plan.is_leaving(session.session_id):
            return False
        try:
            info = await self.store.info(session.session_id)
        except SessionUnknown:
            return False
        return bool(info.owner) and info.token == session.ownership.token

    def _take(self, wanted: Wanted) -> None:
        session = HostedSession(self, wanted)
        self.plan.take(wanted.session_id, self.now())
        self.sessions[wanted.session_id] = session
        self.spawn(session.run())

    def order_due(self) -> None:
        """Order what the plan decides now, and the worker's plan of its room."""
        for decision in self.plan.decide(self.now()):
            self.sessions[decision.session_id].order(decision)
        for profile, leave in self._around.room.decide(self.now()):
            self._around.hosts[profile].sessions[leave.session_id].order(leave)

    def _wait_s(self, wanted_in_s: float | None) -> float | None:
        checks = (self.plan.next_check_at(), self._around.room.next_check_at())
        waits = [max(0.001, check_at - self.now()) for check_at in checks if check_at is not None]
        if wanted_in_s is not None:
            waits.append(wanted_in_s)
        return min(waits, default=None)

    # --- for sessions --------------------------------------------------------------------------

    def failed(self, session: HostedSession, *, had_no_child: bool = False) -> None:
        """The session could not be taken, or had no child: this worker leaves it for a while."""
        pause_s = self.plan.failed(session.session_id, self.now(), had_no_child=had_no_child)
        log.info("session %r is tried again in %.0f s at least", session.session_id, pause_s)

    def left(self, session: HostedSession) -> None:
        """The session is not here any more."""
        self.plan.left(session.session_id)
        del self.sessions[session.session_id]
        self.wake()
        for host in self._around.hosts.values():
            if host.plan.kept_out:
                host.wake()

    def patience_s(self) -> float:
        """How long a session that leaves may try to be saved after Redis has refused it."""
        return max(0.0, self._patient_until - self.now())

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.spawn(work)

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()
