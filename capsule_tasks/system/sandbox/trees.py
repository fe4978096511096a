"""Directories that foreign code wrote: measured and removed, without following it anywhere."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Iterator

ENTRY_BYTES = 4096
"""What a name costs at least: an inode, and its place in a directory."""
OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MOVED = "capsule-"
"""Names at the top of a tree that is being removed begin with this."""


def empty_tree(top: int) -> None:
    """Remove all below an open directory, also what was made unreadable. Follows no link.

    Every directory is first moved up to the top: however deep they were nested, no path is too
    long, and no descriptor is held for each level. What cannot be removed stays.
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
    """Remove a directory's files, move its directories to the top; their names there."""
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
    """Have the owner of a directory read and change it; a link in its place is left alone."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    try:
        os.chmod(f"/proc/self/fd/{handle}", stat.S_IRWXU)
    finally:
        os.close(handle)


def sizes_in_tree(path: str) -> Iterator[int]:
    """The bytes that each entry below a directory takes up, at least `ENTRY_BYTES`.

    OSError (ENAMETOOLONG) if directories are nested beyond what a path can say.
    """
    pending = [path]
    while pending:
        for entry in _entries(pending.pop()):
            with contextlib.suppress(FileNotFoundError):
                yield max(ENTRY_BYTES, entry.stat(follow_symlinks=False).st_blocks * 512)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)


def _entries(path: str) -> list[os.DirEntry[str]]:
    """What a directory holds; nothing if it was removed meanwhile."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        try:
            return _listing(path)
        except PermissionError:  # its owner may write there, and hide it from another look
            _open_up(path)
            return _listing(path)
    return []


def _listing(path: str) -> list[os.DirEntry[str]]:
    with os.scandir(path) as listing:
        return list(listing)
