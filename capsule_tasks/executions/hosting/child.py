"""The child of one named session: started on need, and replaced when it is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from capsule_tasks.executions.hosting.lane import SessionLane
from capsule_tasks.executions.hosting.plan import HostLimits
from capsule_tasks.sessions.process.template import TemplateSpawner
from capsule_tasks.sessions.session import Session
from capsule_tasks.settings import MIB, SessionConfig
from capsule_tasks.system.cpu import FamilyCpu, members_of

log = logging.getLogger("capsule_tasks.taskpool")


class HostedProfile(msgspec.Struct, frozen=True):
    """A kind of named session: how its children are started, and how many a worker holds."""

    name: str
    limits: HostLimits
    config: SessionConfig
    spawner: TemplateSpawner
    max_checkpoint_bytes: int = 256 * MIB


class Meter:
    """The processor time of the child's process family, and of the families that replace it.

    The time is read again and again, by this process: what a child says of itself is up to its
    code, and the kernel forgets the time of a process that ends.
    """

    def __init__(self, pid: Callable[[], int]) -> None:
        self._pid = pid
        self._of = 0
        self._family = FamilyCpu()
        self._before_s = 0.0
        """That of the families before."""

    def used_ms(self) -> int:
        """The milliseconds that were used until now, by all children of the session here."""
        pid = self._pid()
        if pid != self._of:
            self._before_s += self._family.used_s
            self._of, self._family = pid, FamilyCpu()
        self._family.read(members_of(pid))
        return int((self._before_s + self._family.used_s) * 1000)


class SessionChild:
    """One child at a time."""

    def __init__(
        self,
        session_id: str,
        profile: HostedProfile,
        lane: SessionLane,
    ) -> None:
        self._session_id = session_id
        self._profile = profile
        self._lane = lane
        self._session: Session | None = None
        self.meter = Meter(self._pid)

    @property
    def session(self) -> Session | None:
        """The child, if it can be used."""
        session = self._session
        return session if session is not None and session.is_alive else None

    def _pid(self) -> int:
        """The child's pid; 0 without a child."""
        session = self._session
        return session.pid or 0 if session is not None else 0

    async def start(self) -> Session:
        """A new child; SessionStartFailed says why there is none."""
        await self.end()
        await self._profile.spawner.start()
        config = msgspec.structs.replace(self._profile.config, replace_killed=False)
        session = Session(config, spawner=self._profile.spawner)
        self._session = session
        await session.start()
        return session

    def use(self) -> None:
        """Have calls sent to the child."""
        if (session := self.session) is not None:
            self._lane.use(session)

    async def end(self) -> None:
        """Kill the child with all its descendants; safe without one."""
        self._lane.drop_child()
        session, self._session = self._session, None
        if session is not None:
            await session.terminate()
