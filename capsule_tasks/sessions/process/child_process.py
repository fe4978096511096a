"""The child as an operating system process: its start, its descriptors, its stacks, its exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import msgspec

import capsule_tasks
from capsule_tasks.protocol.ids import new_id
from capsule_tasks.settings import SessionConfig
from capsule_tasks.system.descriptors import close_own, own_pipe
from capsule_tasks.system.family import (
    MARKER,
    Orphans,
    kill_family,
    kill_late_orphans,
    kill_orphans,
    reap,
)
from capsule_tasks.system.portable import IS_LINUX, PROC
from capsule_tasks.system.sandbox.directories import SandboxDirectory, sweep_once

SOURCE_ROOT = str(Path(capsule_tasks.__file__).parent.parent)
_BOOT = (
    "import sys; root, *numbers = sys.argv[1:]; sys.path.append(root); "
    "from capsule_tasks.child.main import main; main(*map(int, numbers))"
)
"""The path goes last, for an interpreter that has no capsule_tasks of its own."""

_STACK_SIGNAL = signal.SIGWINCH
_STACK_BYTES = 64 * 1024
_QUIET_S = 0.003
"""A stack dump comes in many small writes; after such a pause it may have ended."""
_FINISH_S = 1.0
"""For the rest of a dump that has started: on a busy machine it pauses in the middle."""
_INTERNAL = "capsule_tasks/child/"
"""Frames of these files are left out of a dump."""
_REAP_PAUSE_S = 0.01
_REAP_ATTEMPTS = 200
_LATE_CHECKS_S = (0.02, 0.1, 0.5, 2.0, 5.0)
"""On a busy machine a process may be in the middle of `exec`, without its marker, for a while."""
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
"""A process that ends by one of these has not ended by a signal that it was sent before."""
_ENDING = {signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT}
"""SystemExit is raised for these, and the code may then exit with any status."""


class ChildDescriptors:
    """Both ends of everything that connects parent and child: two socket pairs and three pipes.

    A spawner hands the child's ends on; then the parent closes its copies with `close_theirs`.
    """

    def __init__(self) -> None:
        self._ours, self._theirs = contextlib.ExitStack(), contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self.control, self.child_control = self._socket_pair()
            self.bulk, self.child_bulk = self._socket_pair()
            self.stdout, self.child_stdout = self._pipe()
            self.stderr, self.child_stderr = self._pipe()
            self.stacks, self.child_stacks = self._pipe()
            os.set_blocking(self.child_stacks, False)  # a signal handler writes there
            undo.pop_all()

    @property
    def child_numbers(self) -> tuple[int, int, int]:
        """The child's control, bulk and stacks, whose numbers a child gets as arguments."""
        return self.child_control.fileno(), self.child_bulk.fileno(), self.child_stacks

    def close_theirs(self) -> None:
        """Close the child's ends, which the child has by now: its end shows on ours."""
        self._theirs.close()

    def close(self) -> None:
        """Close both ends; safe at any time, any number of times."""
        self._theirs.close()
        self._ours.close()
        self.stacks = -1

    def _socket_pair(self) -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair()
        self._ours.callback(ours.close)
        self._theirs.callback(theirs.close)
        ours.setblocking(False)
        theirs.setblocking(True)  # whatever the default timeout, which Celery sets when it stops
        return ours, theirs

    def _pipe(self) -> tuple[int, int]:
        reading, writing = own_pipe()
        self._ours.callback(close_own, reading)
        self._theirs.callback(close_own, writing)
        os.set_blocking(reading, False)
        return reading, writing


class Spawned(NamedTuple):
    """A running process, and the call that collects its return code once it has exited."""

    pid: int
    collect: Callable[[], int]


class Spawner(Protocol):
    """Starts `capsule_tasks.child.main` with the child's ends of its descriptors.

    The process is a child of this one, leads a POSIX session and carries the marker in its
    environment. If `spawn` raises, or is cancelled, there is no process.
    """

    async def spawn(
        self, descriptors: ChildDescriptors, config: SessionConfig, marker: str
    ) -> Spawned: ...


class ColdSpawner:
    """Starts a fresh interpreter for each child."""

    async def spawn(
        self, descriptors: ChildDescriptors, config: SessionConfig, marker: str
    ) -> Spawned:
        environment = dict(os.environ if config.env is None else config.env)
        environment[MARKER] = marker
        numbers = (*descriptors.child_numbers, os.getpid())
        popen = subprocess.Popen(  # noqa: ASYNC220 - it returns within a millisecond
            [config.python, "-c", _BOOT, SOURCE_ROOT, *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            stdout=descriptors.child_stdout,
            stderr=descriptors.child_stderr,
            pass_fds=descriptors.child_numbers,
            cwd=config.cwd,
            env=environment,
            start_new_session=True,
        )
        return Spawned(popen.pid, popen.wait)


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
        sandbox_directory: SandboxDirectory | None,
    ) -> None:
        self.pid = spawned.pid
        self.descriptors = descriptors
        self.sandbox_directory = sandbox_directory
        """The private working directory of a sandbox, removed with the child."""
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[ExitStatus] = self._loop.create_future()
        self._dumping: asyncio.Task[str] | None = None
        self._collect = spawned.collect
        self._marker = marker
        self._adopted: set[int] = set()
        self.signals_sent: set[int] = set()
        descriptors.close_theirs()
        self._pidfd = -1
        with contextlib.suppress(OSError):  # out of descriptors
            self._pidfd = os.pidfd_open(self.pid) if IS_LINUX else -1
        if self._pidfd < 0:
            threading.Thread(target=self._wait_for_exit, daemon=True).start()
        else:
            self._loop.add_reader(self._pidfd, self._on_exit)

    @classmethod
    async def start(cls, spawner: Spawner, config: SessionConfig) -> Self:
        """Start a child process; nothing is left of one that did not start."""
        marker = new_id()  # of this child; a session may have had another one before
        with contextlib.ExitStack() as undo:
            sandbox_directory = None
            if config.child.sandbox is not None:
                sweep_once()
                sandbox_directory = SandboxDirectory()
                undo.callback(sandbox_directory.remove)
                config = msgspec.structs.replace(config, cwd=sandbox_directory.home)
            descriptors = undo.enter_context(contextlib.closing(ChildDescriptors()))
            spawned = await spawner.spawn(descriptors, config, marker)
            undo.pop_all()
        return cls(spawned, descriptors, marker, sandbox_directory)

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

    async def dump_stacks(self, timeout_s: float) -> str:
        """The stacks that `faulthandler` writes on a signal, even while the GIL is held.

        Empty if the process is stopped. Concurrent callers share one dump.
        """
        if self.descriptors.stacks < 0 or self.exited.done():
            return ""
        if self._dumping is None or self._dumping.done():
            self._dumping = self._loop.create_task(self._dump_stacks(timeout_s))
        return await asyncio.shield(self._dumping)

    async def _dump_stacks(self, timeout_s: float) -> str:
        if self.process_stats()[0] == "T":
            return ""
        self.read_final_output()
        arrived = asyncio.Event()
        self._loop.add_reader(self.descriptors.stacks, arrived.set)
        deadline = time.monotonic() + timeout_s
        text = ""
        never_handling = self._threads_blocking(_STACK_SIGNAL)
        try:
            self.signal(_STACK_SIGNAL)
            while (left := deadline - time.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(arrived.wait(), min(left, _QUIET_S) if text else left)
                arrived.clear()
                at_end = self.exited.done() or (
                    text and self._threads_blocking(_STACK_SIGNAL) <= never_handling
                )
                more = self.read_final_output()
                if more and not text:
                    deadline = max(deadline, time.monotonic() + _FINISH_S)
                text += more
                if at_end:
                    break
        finally:
            if self.descriptors.stacks >= 0:
                self._loop.remove_reader(self.descriptors.stacks)
        return "\n".join(line for line in text.splitlines() if _INTERNAL not in line)

    def read_final_output(self) -> str:
        """The text in the pipe: the rest of a dump, or the final output of a child that crashed."""
        text = b""
        with contextlib.suppress(OSError):
            while self.descriptors.stacks >= 0 and (
                data := os.read(self.descriptors.stacks, _STACK_BYTES)
            ):
                text += data
        return text.decode("utf-8", "replace")

    def _threads_blocking(self, signum: int) -> set[str]:
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
        if self.sandbox_directory is not None:  # on a thread: it may hold many files
            threading.Thread(target=self.sandbox_directory.remove).start()

    def _on_exit(self) -> None:
        # First the orphans: as long as a zombie is not collected, no other process gets its pid.
        orphans = kill_orphans(self.pid, self._marker)
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.exited.set_result(ExitStatus(self._collect()))
        self._reap_orphans(orphans, iter(_LATE_CHECKS_S))

    def _reap_orphans(self, orphans: Orphans, checks: Iterator[float]) -> None:
        """Reap the orphans; search again while one may be in the middle of `exec`."""
        self._adopted |= orphans.killed
        self._reap_adopted(_REAP_ATTEMPTS)
        delay_s = next(checks, None) if orphans.is_incomplete else None
        if delay_s is not None:
            find = partial(kill_late_orphans, self._marker, orphans.born_at)
            self._loop.call_later(delay_s, lambda: self._reap_orphans(find(), checks))

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
