"""The limits of a sandbox that the kernel does not enforce: its processes, threads, memory, files.

RLIMIT_NPROC counts all processes of a uid and exempts root, other limits count each process alone,
and no limit exists for a directory. So the parent checks: often while an execution runs, and less
often afterwards, since processes and threads of an execution may go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import threading
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from capsule_tasks.protocol.messages import ErrorKind
from capsule_tasks.sessions.stopping import KillReason
from capsule_tasks.settings import LimitSettings, SandboxSettings
from capsule_tasks.system.family import descendants, kill_descendants
from capsule_tasks.system.sandbox.directories import sizes_in_tree
from capsule_tasks.system.usage import (
    cpu_s,
    proportional_bytes,
    resident_bytes,
    sizes_of_deleted,
    thread_count,
)

if TYPE_CHECKING:
    from capsule_tasks.sessions.process.live_child import LiveChild

log = logging.getLogger("capsule_tasks.sessions")

_BUSY_CHECK_S = 0.05
_IDLE_CHECK_S = 0.5
_QUIET_CHECK_S = 5.0
"""While no execution runs, and neither a process nor processor time shows that code goes on. A
worker may have many idle sessions, and these checks are most of what they cost."""
_QUICK_ENTRIES = 200
"""Entries of the directory that are measured on the event loop; a thread measures the others."""


class Confinement:
    """Checks the limits of one sandboxed child, from its first execution on."""

    def __init__(self, child: LiveChild, settings: SandboxSettings, limits: LimitSettings) -> None:
        self._child = child
        self._settings = settings
        self._limits = limits
        self._is_busy = asyncio.Event()
        self._checks: asyncio.Task[None] | None = None
        self._idle_check_s = _IDLE_CHECK_S
        self._used_s = 0.0
        """Processor time of the child at the last check."""

    def watch(self) -> None:
        """Check often: an execution runs."""
        self._is_busy.set()
        if self._checks is None:
            self._checks = asyncio.get_running_loop().create_task(self._check_often())

    def rest(self) -> None:
        """Check less often: no execution runs."""
        self._is_busy.clear()
        if self._checks is not None and self._child.is_over:
            self._checks.cancel()

    async def _check_often(self) -> None:
        """A child whose limits cannot be checked is killed: it would go on without them."""
        try:
            await self._kill_at_excess()
        except Exception as fault:
            log.exception(
                "the limits of the child %d could not be checked", self._child.process.pid
            )
            message = f"the limits could not be checked: {fault!r}"
            self._child.kill(KillReason(message, ErrorKind.LOST, replace=True))

    async def _kill_at_excess(self) -> None:
        excess = ""
        while not excess:
            await self._pause()
            excess = await self._excess()
        process = self._child.process
        log.warning("the child %d of a sandbox is killed: %s", process.pid, excess)
        reason = KillReason(excess, ErrorKind.LIMIT, replace=True)
        self._child.expect_exit(reason)  # whatever the child dies of from now on
        # The descendants first, so that the child can still be asked for its stacks.
        kill_descendants(process.pid)
        stack = await self._child.stopper.stack_text()
        self._child.kill(dataclasses.replace(reason, stack=stack))

    async def _pause(self) -> None:
        """Wait until the next check is due; short executions, which are many, share one."""
        if not self._is_busy.is_set():
            try:
                async with asyncio.timeout(self._idle_check_s):
                    await self._is_busy.wait()
            except TimeoutError:
                return
        await asyncio.sleep(_BUSY_CHECK_S)

    async def _excess(self) -> str:
        """Which limit is exceeded, and by what; empty if none is."""
        pid = self._child.process.pid
        family = [pid, *descendants(pid)]
        self._plan_idle_check(family)
        excess = self._tasks(family) or self._memory(family)
        if excess:
            return excess
        files = self._sizes(family)
        used = sum(itertools.islice(files, _QUICK_ENTRIES))
        excess = self._disk(used)
        if excess or (another := next(files, None)) is None:
            return excess
        measured: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        rest = (files, used + another, measured)
        threading.Thread(target=self._measure, args=rest, daemon=True).start()
        return await asyncio.shield(measured)

    def _plan_idle_check(self, family: list[int]) -> None:
        used_s = cpu_s(family[0])
        is_quiet = len(family) == 1 and used_s == self._used_s
        self._idle_check_s = _QUIET_CHECK_S if is_quiet else _IDLE_CHECK_S
        self._used_s = used_s

    def _measure(self, files: Iterator[int], used: int, measured: asyncio.Future[str]) -> None:
        """Measure many files, on a thread of its own."""
        sizes = itertools.accumulate(files, initial=used)
        try:
            excess = next(filter(None, map(self._disk, sizes)), "")
            report = partial(measured.set_result, excess)
        except Exception as fault:  # noqa: BLE001 - raised by `_excess`
            report = partial(measured.set_exception, fault)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            measured.get_loop().call_soon_threadsafe(report)

    # --- the limits; each answers with the excess, or is empty ---------------------------------

    def _tasks(self, family: list[int]) -> str:
        count, limit, what = len(family) - 1, self._settings.max_processes, "processes"
        if count <= limit:
            limit, what = self._settings.max_threads, "threads"
            count = sum(map(thread_count, family))
        return f"limit of {limit} {what}: {count} were running" if count > limit else ""

    def _memory(self, family: list[int]) -> str:
        """The kernel limits a single process; memory that several share is counted once."""
        limit, count = self._limits.memory_bytes, len(family)
        if limit is None or count == 1 or sum(map(resident_bytes, family)) <= limit:
            return ""
        used = sum(map(proportional_bytes, family))
        excess = f"memory limit of {limit} bytes: {used} were used by {count} processes"
        return excess if used > limit else ""

    def _disk(self, used: int) -> str:
        limit = self._settings.max_disk_bytes
        return f"disk limit of {limit} bytes: {used} were used" if used > limit else ""

    def _sizes(self, family: list[int]) -> Iterator[int]:
        directory = self._child.process.sandbox_directory
        if directory is None:
            return
        try:
            yield from sizes_of_deleted(family, directory.home)
            yield from sizes_in_tree(directory.home)
        except OSError:  # a directory that cannot be read counts as too large
            yield self._settings.max_disk_bytes + 1
