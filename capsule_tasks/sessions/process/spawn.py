"""Starting a child: the descriptors that connect it, and the interface of what spawns it."""

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
"""The path goes last, for an interpreter that has no capsule_tasks of its own."""


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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
