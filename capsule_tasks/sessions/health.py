"""Watching a child's heartbeat. A missing one is only reported: a long C call delays it, too."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable

from capsule_tasks.protocol.messages import Heartbeat
from capsule_tasks.sessions.process.child_process import ChildProcess
from capsule_tasks.settings import TimeoutSettings

log = logging.getLogger("capsule_tasks.sessions")


@dataclasses.dataclass(frozen=True)
class Health:
    """Whether heartbeats are missing, and the state and stack of the child when they were."""

    unresponsive: bool = False
    process_state: str = ""
    cpu_s: float = 0.0
    stack: str = ""


class HealthWatch:
    """Watches one child that is ready; calls `changed` when heartbeats go missing and come back."""

    def __init__(
        self,
        session_id: str,
        process: ChildProcess,
        timeouts: TimeoutSettings,
        changed: Callable[[Health], None],
    ) -> None:
        self.health = Health()
        self.heartbeat: Heartbeat | None = None
        self.heartbeat_at: float | None = None
        self._session_id = session_id
        self._process = process
        self._timeouts = timeouts
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._pending: asyncio.TimerHandle | asyncio.Task[None] | None = None
        """The timer of the next heartbeat, then the report that it is missing."""

    def start(self) -> None:
        """Expect a heartbeat from now on."""
        self.stop()
        self._pending = self._loop.call_later(self._timeouts.unresponsive_s, self._on_missing)

    def stop(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        self.heartbeat, self.heartbeat_at = heartbeat, time.monotonic()
        if self._pending is not None:
            self.start()
        if self.health.unresponsive:
            log.info("session %s responds again", self._session_id)
            self._become(Health())

    def _on_missing(self) -> None:
        self._pending = self._loop.create_task(self._report())

    async def _report(self) -> None:
        stack = await self._process.dump_stacks(self._timeouts.stack_s)
        process_state, cpu_s = self._process.process_stats()
        log.warning(
            "session %s is unresponsive: process state %s, %.1f s of CPU time, stack:\n%s",
            *(self._session_id, process_state, cpu_s, stack or "(none)"),
        )
        self._become(Health(True, process_state, cpu_s, stack))

    def _become(self, health: Health) -> None:
        self.health = health
        self._changed(health)
