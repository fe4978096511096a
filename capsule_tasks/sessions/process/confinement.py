"""What the kernel does not bound for a sandbox: processes, their threads, memory and files in all.

RLIMIT_NPROC counts all processes of a uid and spares root, other limits count each process alone,
and there is none for a directory. So the parent looks: often while an execution runs, and now and
then afterwards, since what an execution left behind may still be at work.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator

from capsule_tasks.protocol.messages import ErrorKind
from capsule_tasks.sessions.process.live_child import KillReason, LiveChild
from capsule_tasks.settings import LimitSettings, SandboxSettings
from capsule_tasks.system.family import descendants, kill_descendants
from capsule_tasks.system.sandbox.trees import sizes_in_tree
from capsule_tasks.system.usage import (
    proportional_bytes,
    resident_bytes,
    sizes_of_deleted,
    thread_count,
)

log = logging.getLogger("capsule_tasks.sessions")

_BUSY_CHECK_S = 0.05
_IDLE_CHECK_S = 0.5
_QUICK_ENTRIES = 200
"""Entries of the directory measured on the event loop; a thread goes on with the others."""


class Confinement:
    """Watches one sandboxed child from its first execution on."""

    def __init__(
        self,
        child: LiveChild,
        settings: SandboxSettings,
        limits: LimitSettings,
        stack_text: Callable[[], Awaitable[str]],
    ) -> None:
        self._child = child
        self._settings = settings
        self._limits = limits
        self._stack_text = stack_text
        self._ending: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._every_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._measuring = False

    def watch(self) -> None:
        """An execution runs."""
        self._every_s = _BUSY_CHECK_S
        self._check_later()

    def rest(self) -> None:
        """None does; a child that never ran one cannot have left anything."""
        self._every_s = _IDLE_CHECK_S
        if self._timer is not None and self._child.is_over:
            self._timer.cancel()

    def _check_later(self) -> None:
        """Have a look after the interval, or when it is due already: short executions are many."""
        if self._measuring:
            return  # the end of the measurement will see to it
        due = self._loop.time() + self._every_s
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        process = self._child.process
        if self._child.is_over:
            return
        family = [process.pid, *descendants(process.pid)]
        excess = self._processes(family) or self._threads(family) or self._memory(family)
        if excess:
            self._kill(excess)
            return
        files = self._sizes(family)
        used = sum(itertools.islice(files, _QUICK_ENTRIES))
        excess = self._disk(used)
        if excess or (another := next(files, None)) is None:
            self._end_check(excess)
            return
        self._measuring = True
        rest = (files, used + another)
        threading.Thread(target=self._measure, args=rest, daemon=True).start()

    def _measure(self, files: Iterator[int], used: int) -> None:
        """Finish a look at many files, on a thread of its own."""
        excess = ""
        for size in itertools.accumulate(files, initial=used):
            excess = self._disk(size)
            if excess:
                break
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody runs any more
            self._loop.call_soon_threadsafe(self._end_check, excess)

    def _end_check(self, excess: str) -> None:
        self._measuring = False
        if excess:
            self._kill(excess)
        elif not self._child.is_over:
            self._check_later()

    def _kill(self, excess: str) -> None:
        if not self._child.is_over and self._ending is None:
            log.warning("the child %d of a sandbox is killed: %s", self._child.process.pid, excess)
            self._ending = self._loop.create_task(self._end(excess))

    async def _end(self, excess: str) -> None:
        """What it started goes at once, so that it can be asked where it was."""
        doom = KillReason(excess, ErrorKind.LIMIT, replace=True)
        self._child.expect_exit(doom)  # whatever it dies of from now on
        kill_descendants(self._child.process.pid)
        self._child.kill(dataclasses.replace(doom, stack=await self._stack_text()))

    # --- what is counted -----------------------------------------------------------------------

    def _processes(self, family: list[int]) -> str:
        count, most = len(family) - 1, self._settings.max_processes
        return f"limit of {most} processes: {count} were running" if count > most else ""

    def _threads(self, family: list[int]) -> str:
        count, most = sum(map(thread_count, family)), self._settings.max_threads
        return f"limit of {most} threads: {count} were running" if count > most else ""

    def _memory(self, family: list[int]) -> str:
        """One process is bounded by the kernel; what several share is counted once."""
        most = self._limits.memory_bytes
        if most is None or len(family) == 1 or sum(map(resident_bytes, family)) <= most:
            return ""
        used = sum(map(proportional_bytes, family))
        what = f"{used} were used by {len(family)} processes"
        return f"memory limit of {most} bytes: {what}" if used > most else ""

    def _disk(self, used: int) -> str:
        most = self._settings.max_disk_bytes
        return f"disk limit of {most} bytes: {used} were used" if used > most else ""

    def _sizes(self, family: list[int]) -> Iterator[int]:
        directory = self._child.process.directory
        if directory is None:
            return
        try:
            yield from sizes_of_deleted(family, directory)
            yield from sizes_in_tree(directory)
        except OSError:  # what cannot be measured is over any limit
            yield self._settings.max_disk_bytes + 1
