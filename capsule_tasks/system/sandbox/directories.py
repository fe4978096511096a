"""The private directories of sandboxes: made with a lock, removed, or swept after a crash.

    capsule-sandbox-XXXX/        locked (flock) by the process that made it, for as long as it lives
        home/                    the only directory that code in the sandbox can write to

The kernel releases the lock with the last process that has it, however that process ends. A process
id would prove nothing: another process may have it by now. Code in the sandbox cannot open the
locked directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import stat
import tempfile
import threading

from capsule_tasks.system.descriptors import close_own, own_open
from capsule_tasks.system.sandbox.trees import MOVED, OPEN_DIRECTORY, empty_tree

log = logging.getLogger("capsule_tasks.sessions")

_PREFIX = "capsule-sandbox-"
_HOME = "home"


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
            lock = own_open(path, OPEN_DIRECTORY)
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
        top = os.open(path, OPEN_DIRECTORY)
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
        name == _HOME or name.startswith(MOVED)  # a removal was interrupted
        for name in os.listdir(top)
    )


def _remove(path: str, top: int) -> None:
    with contextlib.suppress(OSError):
        empty_tree(top)
        os.rmdir(path)
