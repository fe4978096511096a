"""The child of one named session: started on need, and replaced when it is lost."""

from __future__ import annotations

import logging

import msgspec

from capsule_tasks.executions.hosting.lane import SessionLane
from capsule_tasks.executions.hosting.plan import HostLimits
from capsule_tasks.sessions.process.template import TemplateSpawner
from capsule_tasks.sessions.session import Session
from capsule_tasks.settings import MIB, SessionConfig
from capsule_tasks.system.usage import cpu_s

log = logging.getLogger("capsule_tasks.taskpool")


class HostedProfile(msgspec.Struct, frozen=True):
    """A kind of named session: how its children are started, and how many a worker holds."""

    name: str
    limits: HostLimits
    config: SessionConfig
    spawner: TemplateSpawner
    max_checkpoint_bytes: int = 256 * MIB


class Meter:
    """The processor time of a process from now on; what one that ends has used last is unknown."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before_s = cpu_s(pid)

    def used_ms(self) -> int:
        return max(0, int((cpu_s(self._pid) - self._before_s) * 1000))


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

    @property
    def session(self) -> Session | None:
        """The child, if it can be used."""
        session = self._session
        return session if session is not None and session.is_alive else None

    def meter(self) -> Meter:
        """Measures what the child uses from now on."""
        session = self._session
        return Meter(session.pid or 0 if session is not None else 0)

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
