"""Directories that foreign code wrote: measured and removed, without following it anywhere."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat

_MAX_ENTRIES = 100_000


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


def size_of_tree(path: str) -> int:
    """Bytes that the files below a directory take up; what cannot be read counts nothing."""
    total = entries = 0
    pending = [path]
    while pending and entries < _MAX_ENTRIES:
        try:
            with os.scandir(pending.pop()) as listing:
                for entry in listing:
                    entries += 1
                    with contextlib.suppress(OSError):
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(entry.path)
        except OSError:
            continue  # it was removed meanwhile
    return total
