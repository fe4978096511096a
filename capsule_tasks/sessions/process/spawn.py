"""How a child comes into the world: behind one interface, so that a session need not know."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import capsule_tasks
from capsule_tasks.settings import SessionConfig
from capsule_tasks.system.descriptors import close_own, own_pipe
from capsule_tasks.system.family import MARKER

SOURCE_ROOT = str(Path(capsule_tasks.__file__).parent.parent)
_BOOT = (
    "import sys; root, *numbers = sys.argv[1:]; sys.path.append(root); "
    "from capsule_tasks.child.main import main; main(*map(int, numbers))"
)
"""The path goes last: it serves only an interpreter that has no capsule_tasks of its own."""


class ChildDescriptors:
    """Everything that connects parent and child: two socket pairs and three pipes.

    Both ends are made here. Whoever spawns hands the child's ends on; `close_theirs` follows.
    """

    def __init__(self) -> None:
        with contextlib.ExitStack() as undo:
            self.control, self.child_control = _socket_pair(undo)
            self.bulk, self.child_bulk = _socket_pair(undo)
            self.stdout, self.child_stdout = _pipe(undo)
            self.stderr, self.child_stderr = _pipe(undo)
            self.stacks, self.child_stacks = _pipe(undo)
            os.set_blocking(self.child_stacks, False)  # a signal handler writes there
            undo.pop_all()

    @property
    def child_numbers(self) -> tuple[int, int, int]:
        """The descriptors that a child is told by number: control, bulk, stacks."""
        return self.child_control.fileno(), self.child_bulk.fileno(), self.child_stacks

    def close_theirs(self) -> None:
        """The child has its ends; from now on its death shows here."""
        for sock in (self.child_control, self.child_bulk):
            sock.close()
        for name in ("child_stdout", "child_stderr", "child_stacks"):
            self._close(name)

    def close(self) -> None:
        """Release both ends, in whatever state they are."""
        self.close_theirs()
        for sock in (self.control, self.bulk):
            sock.close()
        for name in ("stdout", "stderr", "stacks"):
            self._close(name)

    def _close(self, name: str) -> None:
        descriptor = getattr(self, name)
        if descriptor >= 0:
            setattr(self, name, -1)
            close_own(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Spawned(NamedTuple):
    """A live process, and how its return code is collected once it has exited."""

    pid: int
    collect: Callable[[], int]


class Spawner(Protocol):
    """Starts `capsule_tasks.child.main` at the child's ends of some wires.

    The process is a child of this one, leads a POSIX session and carries the marker in its
    environment. If `spawn` raises, or is cancelled, there is no process.
    """

    async def spawn(
        self, wires: ChildDescriptors, config: SessionConfig, marker: str
    ) -> Spawned: ...


class ColdSpawner:
    """A fresh interpreter for each child."""

    async def spawn(self, wires: ChildDescriptors, config: SessionConfig, marker: str) -> Spawned:
        environment = dict(os.environ if config.env is None else config.env)
        environment[MARKER] = marker
        numbers = (*wires.child_numbers, os.getpid())
        popen = subprocess.Popen(  # noqa: ASYNC220 - it returns within a millisecond
            [config.python, "-c", _BOOT, SOURCE_ROOT, *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            stdout=wires.child_stdout,
            stderr=wires.child_stderr,
            pass_fds=wires.child_numbers,
            cwd=config.cwd,
            env=environment,
            start_new_session=True,
        )
        return Spawned(popen.pid, popen.wait)


def _socket_pair(undo: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    undo.callback(ours.close)
    undo.callback(theirs.close)
    ours.setblocking(False)
    theirs.setblocking(True)  # not so under a default timeout, which Celery sets to stop
    return ours, theirs


def _pipe(undo: contextlib.ExitStack) -> tuple[int, int]:
    reading, writing = own_pipe()
    undo.callback(close_own, reading)
    undo.callback(close_own, writing)
    os.set_blocking(reading, False)
    return reading, writing
