"""The child as an operating system process: its birth, its descriptors, its exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import capsule_tasks
from capsule_tasks.settings import SessionConfig
from capsule_tasks.system.family import MARKER, kill_family, kill_orphans

STACK_SIGNAL = signal.SIGWINCH
_SOURCE_ROOT = str(Path(capsule_tasks.__file__).parent.parent)
_BOOT = (
    "import sys; root, *numbers = sys.argv[1:]; sys.path.append(root); "
    "from capsule_tasks.child.main import main; main(*map(int, numbers))"
)
"""The path goes last: it serves only an interpreter that has no capsule_tasks of its own."""


class ExitStatus(int):
    """A return code that reads as a cause."""

    def __str__(self) -> str:
        if self >= 0:
            return f"exited with status {int(self)}"
        try:
            return f"was killed by {signal.Signals(-self).name}"
        except ValueError:
            return f"was killed by signal {-self}"


class ChildProcess:
    """Owns one child: everything acquired here is released by `close`, in whatever state it is.

    `exited` is set within a millisecond of the exit, from a pidfd where the system has one; end of
    file is no sign of death, since a grandchild may hold the pipes.
    """

    def __init__(self, config: SessionConfig, marker: str, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._marker = marker
        self._pidfd = -1
        self.exited: asyncio.Future[ExitStatus] = loop.create_future()
        with contextlib.ExitStack() as undo:
            self.control, child_control = _socket_pair(undo)
            self.bulk, child_bulk = _socket_pair(undo)
            self.stdout, child_out = _pipe(undo)
            self.stderr, child_err = _pipe(undo)
            self.stacks, child_stacks = _pipe(undo)
            os.set_blocking(child_stacks, False)  # a signal handler writes there
            numbers = (child_control.fileno(), child_bulk.fileno(), child_stacks)
            environment = dict(os.environ if config.env is None else config.env)
            environment[MARKER] = marker
            self._popen = subprocess.Popen(
                [config.python, "-c", _BOOT, _SOURCE_ROOT, *map(str, (*numbers, os.getpid()))],
                stdin=subprocess.DEVNULL,
                stdout=child_out,
                stderr=child_err,
                pass_fds=numbers,
                cwd=config.cwd,
                env=environment,
                start_new_session=True,
            )
            undo.pop_all()
        for sock in (child_control, child_bulk):
            sock.close()
        for descriptor in (child_out, child_err, child_stacks):
            os.close(descriptor)
        self.pid = self._popen.pid
        self._watch_exit()

    def signal(self, signum: int) -> None:
        """Send a signal to the child alone; nothing happens if it is gone."""
        if not self.exited.done():
            with contextlib.suppress(OSError):
                os.kill(self.pid, signum)

    def kill_family(self) -> None:
        """Kill the child and all its descendants; `exited` follows."""
        if not self.exited.done():
            kill_family(self.pid)

    def vitals(self) -> tuple[str, float]:
        """The process state letter and the CPU seconds used, as the kernel sees them."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            ticks = int(fields[11]) + int(fields[12])
            return fields[0], ticks / os.sysconf("SC_CLK_TCK")
        except (OSError, IndexError, ValueError):
            return "", 0.0

    def close(self) -> None:
        """Release the descriptors. The child must have exited, or be about to."""
        for sock in (self.control, self.bulk):
            sock.close()
        for name in ("stdout", "stderr", "stacks"):
            descriptor = getattr(self, name)
            if descriptor >= 0:
                setattr(self, name, -1)
                os.close(descriptor)

    def _watch_exit(self) -> None:
        if sys.platform == "linux":
            self._pidfd = os.pidfd_open(self.pid)
            self._loop.add_reader(self._pidfd, self._reap)
        else:
            threading.Thread(target=self._wait_for_exit, daemon=True).start()

    def _wait_for_exit(self) -> None:
        self._popen.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._reap)

    def _reap(self) -> None:
        kill_orphans(self.pid, self._marker)  # first: a zombie's pid cannot be taken by another
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if not self.exited.done():
            self.exited.set_result(ExitStatus(self._popen.wait()))


def _socket_pair(undo: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    undo.callback(ours.close)
    undo.callback(theirs.close)
    ours.setblocking(False)
    return ours, theirs


def _pipe(undo: contextlib.ExitStack) -> tuple[int, int]:
    reading, writing = os.pipe()
    undo.callback(os.close, reading)
    undo.callback(os.close, writing)
    os.set_blocking(reading, False)
    return reading, writing
