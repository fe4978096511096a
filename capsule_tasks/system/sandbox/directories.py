"""The private directories of sandboxes: made with a lock, measured, removed, or swept.

    capsule-sandbox-XXXX/        locked (flock) by the process that made it, for as long as it lives
        home/                    the only directory that code in the sandbox can write to

The kernel releases the lock with the last process that has it, however that process ends. A process
id would prove nothing: another process may have it by now. Code in the sandbox cannot open the
locked directory, and what it wrote is measured and removed without following it anywhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Iterator

from capsule_tasks.system.descriptors import close_own, own_open

log = logging.getLogger("capsule_tasks.sessions")

_PREFIX = "capsule-sandbox-"
_HOME = "home"
_ENTRY_BYTES = 4096
"""The least that a name takes up: an inode, and an entry in a directory."""
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOVED = "capsule-"
"""Prefix of names at the top of a tree that is being removed."""


class SandboxDirectory:
    """One private directory, which exists until `remove`."""

    def __init__(self) -> None:
        self._top, self._lock = _locked_directory()
        self.home = os.path.join(self._top, _HOME)
        try:
            os.mkdir(self.home, stat.S_IRWXU)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the directory with all files in it, which may take long."""
        _remove(self._top, self._lock)
        close_own(self._lock)


def _locked_directory() -> tuple[str, int]:
    """A new directory, and the descriptor of its lock.

    Between `mkdtemp` and the lock a sweep of another process may remove it: then try again.
    """
    while True:
        path = tempfile.mkdtemp(prefix=_PREFIX)
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as undo:
            lock = own_open(path, _OPEN_DIRECTORY)
            undo.callback(close_own, lock)
            if _is_locked(lock) and os.path.samestat(os.stat(path), os.fstat(lock)):
                undo.pop_all()
                return path, lock


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: a sweep cannot lock it either
        return True
    return True


@functools.cache
def sweep_once() -> None:
    """Sweep on a thread of its own, once per process."""
    threading.Thread(target=sweep, name="capsule-sweep", daemon=True).start()


def sweep() -> None:
    """Remove the directories that killed processes of this user left behind."""
    base = tempfile.gettempdir()
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(base) if name.startswith(_PREFIX)]
        swept = sum(_sweep(os.path.join(base, name)) for name in names)
        if swept:
            log.info("removed %d sandbox directories of dead processes from %s", swept, base)


def _sweep(path: str) -> bool:
    """Remove a directory that this module made, if no process has its lock. Follows no link."""
    with contextlib.suppress(OSError):
        top = os.open(path, _OPEN_DIRECTORY)
        try:
            if not _is_ours(top):
                return False
            fcntl.flock(top, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path, top)
            return not os.path.exists(path)
        finally:
            os.close(top)
    return False


def _is_ours(top: int) -> bool:
    """Whether the directory is private to this user and contains only names of this module."""
    status = os.fstat(top)
    is_private = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == stat.S_IRWXU
    return is_private and all(
        name == _HOME or name.startswith(_MOVED)  # a removal was interrupted
        for name in os.listdir(top)
    )


def _remove(path: str, top: int) -> None:
    with contextlib.suppress(OSError):
        empty_tree(top)
        os.rmdir(path)


def empty_tree(top: int) -> None:
    """Remove everything below an open directory, unreadable directories too. Follows no link.

    Each directory is first moved to the top. So no path is too long, and no descriptor is needed
    for each level, however deeply directories are nested. Files that cannot be removed stay.
    """
    numbers = itertools.count()
    pending = _strip(top, top, numbers)
    while pending:
        name = pending.pop()
        with contextlib.suppress(OSError):
            directory = os.open(name, _OPEN_DIRECTORY, dir_fd=top)
            try:
                pending += _strip(directory, top, numbers)
            finally:
                os.close(directory)
            os.rmdir(name, dir_fd=top)


def _strip(directory: int, top: int, numbers: Iterator[int]) -> list[str]:
    """Remove a directory's files and move its directories to the top; their names there."""
    moved: list[str] = []
    for name in os.listdir(directory):
        with contextlib.suppress(OSError):
            if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=directory)
                continue
            _open_up(name, directory)
            place = f"{_MOVED}{next(numbers)}"
            while os.access(place, os.F_OK, dir_fd=top, follow_symlinks=False):
                place = f"{_MOVED}{next(numbers)}"
            os.rename(name, place, src_dir_fd=directory, dst_dir_fd=top)
            moved.append(place)
    return moved


def _open_up(name: str, directory: int | None = None) -> None:
    """Give the owner of a directory all rights to it. OSError for a link in its place."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    try:
        os.chmod(f"/proc/self/fd/{handle}", stat.S_IRWXU)
    finally:
        os.close(handle)


def sizes_in_tree(path: str) -> Iterator[int]:
    """The bytes that each entry below a directory takes up, at least `_ENTRY_BYTES`.

    OSError (ENAMETOOLONG) if directories are nested too deeply for a path.
    """
    pending = [path]
    while pending:
        for entry in _entries(pending.pop()):
            with contextlib.suppress(FileNotFoundError):
                yield max(_ENTRY_BYTES, entry.stat(follow_symlinks=False).st_blocks * 512)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)


def _entries(path: str) -> list[os.DirEntry[str]]:
    """The entries of a directory; none if it was removed meanwhile."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        try:
            return _listing(path)
        except PermissionError:  # code in the sandbox made it unreadable
            _open_up(path)
            return _listing(path)
    return []


def _listing(path: str) -> list[os.DirEntry[str]]:
    with os.scandir(path) as listing:
        return list(listing)
