"""What the kernel does not bound for a sandbox: the number of its processes, the size of its files.

RLIMIT_NPROC counts all processes of a uid and spares root, and there is no limit for a directory.
So the parent looks, though only while an execution runs.
"""

from __future__ import annotations

import asyncio

from capsule_tasks.protocol.messages import ErrorKind
from capsule_tasks.sessions.incarnation import Doom, Incarnation
from capsule_tasks.settings import SandboxSettings
from capsule_tasks.system.family import descendants
from capsule_tasks.system.trees import size_of_tree

_LOOK_EVERY_S = 0.05


class Confinement:
    """Watches one sandboxed child between `watch` and `rest`."""

    def __init__(self, child: Incarnation, settings: SandboxSettings) -> None:
        self._child = child
        self._settings = settings
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_LOOK_EVERY_S, self._look, loop)

    def rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._child.is_over:
            return
        for check in (self._processes, self._disk):
            excess = check()
            if excess:
                self._child.kill(Doom(excess, ErrorKind.LIMIT, replace=True))
                return
        self._timer = loop.call_later(_LOOK_EVERY_S, self._look, loop)

    def _processes(self) -> str:
        count, most = len(descendants(self._child.process.pid)), self._settings.max_processes
        return f"limit of {most} processes: {count} were running" if count > most else ""

    def _disk(self) -> str:
        directory, most = self._child.process.directory, self._settings.max_disk_bytes
        size = size_of_tree(directory) if directory is not None else 0
        return f"disk limit of {most} bytes: {size} were used" if size > most else ""
