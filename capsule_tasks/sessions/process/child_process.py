"""The child as an operating system process: its descriptors, its signals, its exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from capsule_tasks.sessions.process.spawn import ChildDescriptors, Spawned
from capsule_tasks.system.family import Orphans, kill_family, kill_late_orphans, kill_orphans, reap
from capsule_tasks.system.portable import IS_LINUX, PROC
from capsule_tasks.system.sandbox.directories import SandboxDirectory

STACK_SIGNAL = signal.SIGWINCH


_REAP_PAUSE_S = 0.01
_REAP_ATTEMPTS = 200
_LATE_CHECKS_S = (0.02, 0.1, 0.5, 2.0, 5.0)
"""On a busy machine a process may be in the middle of `exec`, without its marker, for a while."""


CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
"""A process that ends by one of these has not ended by a signal that it was sent before."""
_ENDING = {signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT}
"""SystemExit is raised for these, and the code may then exit with any status."""


class ExitStatus(int):
    """A return code that reads as a cause."""

    def was_asked_for(self, sent: set[int]) -> bool:
        """Whether one of the signals that were sent to the process explains this end.

        A signal explains it only if it was sent: the system also kills, when memory runs out.
        """
        return -self in sent or (self >= 0 and not _ENDING.isdisjoint(sent))

    def __str__(self) -> str:
        if self >= 0:
            return f"exited with status {int(self)}"
        try:
            return f"was killed by {signal.Signals(-self).name}"
        except ValueError:
            return f"was killed by signal {-self}"


class ChildProcess:
    """Owns the process and the descriptors of one child, until `close`.

    `exited` is set within a millisecond of the exit, from a pidfd where the system has one. An end
    of file does not show the exit, since a grandchild may hold the pipes.
    """

    def __init__(
        self,
        spawned: Spawned,
        descriptors: ChildDescriptors,
        marker: str,
        loop: asyncio.AbstractEventLoop,
        sandbox_directory: SandboxDirectory | None = None,
    ) -> None:
        self.pid = spawned.pid
        self.descriptors = descriptors
        self.directory = sandbox_directory.home if sandbox_directory is not None else None
        """The private working directory of a sandbox, removed with the child."""
        self._sandbox_directory = sandbox_directory
        self.exited: asyncio.Future[ExitStatus] = loop.create_future()
        self.dumping: asyncio.Task[str] | None = None
        """The stack dump that is being taken."""
        self._collect = spawned.collect
        self._marker = marker
        self._loop = loop
        self._pidfd = -1
        self._adopted: set[int] = set()
        self.signals_sent: set[int] = set()
        descriptors.close_theirs()
        self._watch_exit()

    def signal(self, signum: int) -> None:
        """Send a signal to the child alone; ignored if it has exited."""
        if not self.exited.done():
            self.signals_sent.add(signum)
            with contextlib.suppress(OSError):
                os.kill(self.pid, signum)

    def kill_family(self) -> None:
        """Kill the child and all its descendants; `exited` follows."""
        if not self.exited.done():
            self._adopted |= kill_family(self.pid)

    def threads_blocking(self, signum: int) -> set[str]:
        """Threads that have a signal blocked, as a thread has while it handles the signal."""
        blocking: set[str] = set()
        for thread in Path(f"{PROC}/{self.pid}/task").glob("*"):
            with contextlib.suppress(OSError, LookupError, ValueError):  # the thread has ended
                status = (thread / "status").read_text()
                mask = int(status.partition("SigBlk:")[2].split(None, 1)[0], 16)
                if mask >> (signum - 1) & 1:
                    blocking.add(thread.name)
        return blocking

    def process_stats(self) -> tuple[str, float]:
        """The kernel's letter for the state of the process, and the CPU seconds used."""
        try:
            fields = Path(f"{PROC}/{self.pid}/stat").read_text().rpartition(")")[2].split()
            ticks = int(fields[11]) + int(fields[12])
            return fields[0], ticks / os.sysconf("SC_CLK_TCK")
        except (OSError, IndexError, ValueError):
            return "", 0.0

    def close(self) -> None:
        """Release the descriptors and the sandbox directory, once the child has exited."""
        if self.descriptors.stacks >= 0:  # a dump may be in progress
            self._loop.remove_reader(self.descriptors.stacks)
        self.descriptors.close()
        sandbox_directory, self._sandbox_directory = self._sandbox_directory, None
        if sandbox_directory is not None:  # on a thread: it may hold many files
            threading.Thread(target=sandbox_directory.remove).start()

    def _watch_exit(self) -> None:
        try:
            self._pidfd = os.pidfd_open(self.pid) if IS_LINUX else -1
        except OSError:  # out of descriptors
            self._pidfd = -1
        if self._pidfd < 0:
            threading.Thread(target=self._wait_for_exit, daemon=True).start()
        else:
            self._loop.add_reader(self._pidfd, self._on_exit)

    def _on_exit(self) -> None:
        # First the orphans: as long as a zombie is not collected, no other process gets its pid.
        orphans = kill_orphans(self.pid, self._marker)
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self.exited.set_result(ExitStatus(self._collect()))
        self._reap_orphans(orphans, iter(_LATE_CHECKS_S))

    def _reap_orphans(self, orphans: Orphans, checks: Iterator[float]) -> None:
        """Reap the orphans; search again while one may be in the middle of `exec`."""
        self._adopted |= orphans.killed
        self._reap_adopted(_REAP_ATTEMPTS)
        delay_s = next(checks, None) if orphans.is_incomplete else None
        if delay_s is not None:
            self._loop.call_later(delay_s, self._find_late_orphans, orphans.born_at, checks)

    def _find_late_orphans(self, born_at: int, checks: Iterator[float]) -> None:
        self._reap_orphans(kill_late_orphans(self._marker, born_at), checks)

    def _reap_adopted(self, attempts: int) -> None:
        """Collect killed descendants: children of this process now, if it is a subreaper."""
        self._adopted = reap(self._adopted)
        if self._adopted and attempts:
            self._loop.call_later(_REAP_PAUSE_S, self._reap_adopted, attempts - 1)

    def _wait_for_exit(self) -> None:
        status = ExitStatus(self._collect())
        kill_orphans(self.pid, self._marker)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.exited.set_result, status)
