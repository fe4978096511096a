"""The child of one named session: started on need, and replaced when it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Self

import msgspec

from capsule_tasks.executions.hosting.lane import SessionLane
from capsule_tasks.executions.hosting.plan import HostLimits
from capsule_tasks.sessions.process.template import TemplateSpawner
from capsule_tasks.sessions.session import Session
from capsule_tasks.settings import MIB, SessionConfig
from capsule_tasks.system.usage import cpu_s

log = logging.getLogger("capsule_tasks.taskpool")


METER_EVERY_S = 0.25
"""Between two readings of the processor time of a child in which a call runs."""


class HostedProfile(msgspec.Struct, frozen=True):
    """A kind of named session: how its children are started, and how many a worker holds."""

    name: str
    limits: HostLimits
    config: SessionConfig
    spawner: TemplateSpawner
    max_checkpoint_bytes: int = 256 * MIB


class Meter:
    """The processor time of the child, and of those that replace it, while it is measured.

    The kernel forgets the time of a process that ends, and code may end its process or have it
    killed. So the time is read again and again, by this process: what a child says of itself is
    up to its code. What it has used since the last reading is not counted.
    """

    def __init__(self, pid: Callable[[], int]) -> None:
        self._pid = pid
        self._used_s: dict[int, float] = {}
        first = pid()
        self._before_s = {first: cpu_s(first)}

    def __enter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(METER_EVERY_S, self._tick)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def used_ms(self) -> int:
        """The milliseconds that were used until now."""
        self._read()
        return int(sum(self._used_s.values()) * 1000)

    def _tick(self) -> None:
        self._read()
        self._timer = asyncio.get_running_loop().call_later(METER_EVERY_S, self._tick)

    def _read(self) -> None:
        pid = self._pid()
        used_s = cpu_s(pid) - self._before_s.get(pid, 0.0)
        self._used_s[pid] = max(used_s, self._used_s.get(pid, 0.0))


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
        """Measures what the child uses from now on, as a context manager."""
        return Meter(self._pid)

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
