"""What the kernel does not bound for a sandbox: the number of its processes, the size of its files.

RLIMIT_NPROC counts all processes of a uid and spares root, and there is no limit for a directory.
So the parent looks, though only while an execution runs.
"""

from __future__ import annotations

import asyncio

from capsule_tasks.protocol.messages import ErrorKind
from capsule_tasks.sessions import probe
from capsule_tasks.sessions.incarnation import Doom, Incarnation
from capsule_tasks.settings import SandboxSettings
from capsule_tasks.system.family import descendants, kill_descendants
from capsule_tasks.system.trees import size_of_tree

_LOOK_EVERY_S = 0.05


class Confinement:
    """Watches one sandboxed child between `watch` and `rest`."""

    def __init__(self, child: Incarnation, settings: SandboxSettings, stack_s: float) -> None:
        self._child = child
        self._settings = settings
        self._stack_s = stack_s
        self._timer: asyncio.TimerHandle | None = None
        self._look: asyncio.Task[None] | None = None
        self._watching = False

    def watch(self) -> None:
        if not self._watching:
            self._watching = True
            self._plan()

    def rest(self) -> None:
        self._watching = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _plan(self) -> None:
        if self._look is None and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_LOOK_EVERY_S, self._begin_look, loop)

    def _begin_look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        self._look = loop.create_task(self._check())

    async def _check(self) -> None:
        try:
            excess = self._processes() or await self._disk()
            if excess and not self._child.is_over:
                await self._end(excess)
        finally:
            self._look = None
        if self._watching and not self._child.is_over:
            self._plan()

    async def _end(self, excess: str) -> None:
        """What it started goes at once, so that it can be asked where it was."""
        process = self._child.process
        kill_descendants(process.pid)
        stack = await probe.dump(process, self._stack_s)
        self._child.kill(Doom(excess, ErrorKind.LIMIT, stack=stack, replace=True))

    def _processes(self) -> str:
        count, most = len(descendants(self._child.process.pid)), self._settings.max_processes
        return f"limit of {most} processes: {count} were running" if count > most else ""

    async def _disk(self) -> str:
        """On a thread: foreign code may have made any number of files."""
        directory, most = self._child.process.directory, self._settings.max_disk_bytes
        if directory is None:
            return ""
        loop = asyncio.get_running_loop()
        size = await loop.run_in_executor(None, size_of_tree, directory, most)
        return f"disk limit of {most} bytes: {size} were used" if size > most else ""
