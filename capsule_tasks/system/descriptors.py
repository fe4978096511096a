"""Descriptors in a copy of a process: which of them it keeps, and which of them are our own."""

from __future__ import annotations

import contextlib
import os

_OPEN = "/proc/self/fd"
_own: set[int] = set()


def own_pipe() -> tuple[int, int]:
    """A pipe that no copy of this process keeps; each end is closed with `close_own`.

    A copy that held an end of a session's pipe would keep its reader from seeing the end of file.
    """
    ends = os.pipe()
    _own.update(ends)
    return ends


def own_open(path: str, flags: int) -> int:
    """A descriptor that no copy of this process keeps; it is closed with `close_own`.

    A copy that held a locked directory would keep its lock after the end of this process.
    """
    descriptor = os.open(path, flags)
    _own.add(descriptor)
    return descriptor


def close_own(descriptor: int) -> None:
    _own.discard(descriptor)  # first: another thread may get this number at once
    os.close(descriptor)


def targets(pid: int | None = None) -> dict[int, str]:
    """What each descriptor of a process refers to, by number; of this process without a pid."""
    directory = _OPEN if pid is None else f"/proc/{pid}/fd"
    found = {}
    for number in map(int, os.listdir(directory)):
        with contextlib.suppress(OSError):  # the one that the listing used
            found[number] = os.readlink(f"{directory}/{number}")
    return found


def is_kept(number: int, target: str) -> bool:
    """Whether a copy of this process keeps that descriptor: somebody's file, device or pipe.

    Sockets, and what has no name in the file system but a pipe, are not for two processes to use.
    """
    return number not in _own and target.startswith(("/", "pipe:"))
