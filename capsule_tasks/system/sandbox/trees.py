"""Directories that foreign code wrote: measured and removed, without following it anywhere."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Iterator

ENTRY_BYTES = 4096
"""The least that a name takes up: an inode, and an entry in a directory."""
OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MOVED = "capsule-"
"""Prefix of names at the top of a tree that is being removed."""


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
            directory = os.open(name, OPEN_DIRECTORY, dir_fd=top)
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
            place = f"{MOVED}{next(numbers)}"
            while os.access(place, os.F_OK, dir_fd=top, follow_symlinks=False):
                place = f"{MOVED}{next(numbers)}"
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
    """The bytes that each entry below a directory takes up, at least `ENTRY_BYTES`.

    OSError (ENAMETOOLONG) if directories are nested too deeply for a path.
    """
    pending = [path]
    while pending:
        for entry in _entries(pending.pop()):
            with contextlib.suppress(FileNotFoundError):
                yield max(ENTRY_BYTES, entry.stat(follow_symlinks=False).st_blocks * 512)
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
