"""Which descriptors a forked copy of this process keeps, and which are this package's own."""

from __future__ import annotations

import contextlib
import os

_OPEN = "/proc/self/fd"
_own: set[int] = set()


def own_pipe() -> tuple[int, int]:
    """A pipe that no copy of this process keeps; close each end with `close_own`.

    While a copy had the writing end of a session's pipe, its reader would see no end of file.
    """
    ends = os.pipe()
    _own.update(ends)
    return ends


def own_open(path: str, flags: int) -> int:
    """A descriptor that no copy of this process keeps; close it with `close_own`.

    A copy that had a locked directory open would keep its lock after the end of this process.
    """
    descriptor = os.open(path, flags)
    _own.add(descriptor)
    return descriptor


def close_own(descriptor: int) -> None:
    # Before `close`, after which another thread may be given this number.
    _own.discard(descriptor)
    os.close(descriptor)


def targets(pid: int | None = None) -> dict[int, str]:
    """The target of each descriptor of a process, by number. Without a pid: this process."""
    directory = _OPEN if pid is None else f"/proc/{pid}/fd"
    found = {}
    for number in map(int, os.listdir(directory)):
        with contextlib.suppress(OSError):  # the one that the listing used
            found[number] = os.readlink(f"{directory}/{number}")
    return found


def is_kept(number: int, target: str) -> bool:
    """Whether a copy of this process keeps a descriptor: a user's file, device or pipe.

    Two processes cannot use a socket, an epoll, an eventfd and the like together.
    """
    return number not in _own and target.startswith(("/", "pipe:"))
