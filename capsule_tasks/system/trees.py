"""Directories that foreign code wrote: measured and removed, without following it anywhere."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat

_ENTRY_BYTES = 512
"""About what the name and the inode of a file take."""


def remove_tree(path: str) -> None:
    """Remove a directory and all below it, also what was made unreadable. Follows no link."""
    shutil.rmtree(path, ignore_errors=True)
    if not os.path.isdir(path):
        return
    for directory, names, _ in os.walk(path):
        for name in names:
            entry = os.path.join(directory, name)
            if not os.path.islink(entry):
                with contextlib.suppress(OSError):
                    os.chmod(entry, stat.S_IRWXU)
    shutil.rmtree(path, ignore_errors=True)


def size_of_tree(path: str, enough: int) -> int:
    """Bytes that what is below a directory takes up, counted until it is more than `enough`.

    Each entry costs a little also if it is empty, so neither the count nor the way there is
    without bound. What cannot be read counts nothing.
    """
    total = 0
    pending = [path]
    while pending and total <= enough:
        try:
            with os.scandir(pending.pop()) as listing:
                for entry in listing:
                    total += _ENTRY_BYTES
                    with contextlib.suppress(OSError):
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(entry.path)
                    if total > enough:
                        break
        except OSError:
            continue  # it was removed meanwhile
    return total
