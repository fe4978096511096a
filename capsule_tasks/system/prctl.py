"""The prctl calls that sessions need. On other systems than Linux they return False."""

from __future__ import annotations

import ctypes
import os
import signal
import struct

from capsule_tasks.system.portable import IS_LINUX

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37
PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECUREBITS = 28
_NO_ROOT = 0b11_00_11_11  # NOROOT, NO_SETUID_FIXUP, NO_CAP_AMBIENT_RAISE, each of them locked
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_VERSION_3 = 0x20080522

DEATH_SIGNAL: int = getattr(signal, "SIGSTKFLT", signal.SIGHUP)
"""Sent to a child whose parent has exited. No program uses this signal for anything else."""

libc = ctypes.CDLL(None, use_errno=True) if IS_LINUX else None
"""Loaded once, so that forked children need not load it."""


def become_subreaper() -> bool:
    """Make this process the parent of every orphan among its descendants."""
    return _prctl(PR_SET_CHILD_SUBREAPER, 1)


def is_subreaper() -> bool:
    answer = ctypes.c_int()
    return libc is not None and (
        libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0) == 0 and answer.value == 1
    )


def die_with_parent(parent_pid: int) -> bool:
    """Have this process end when the thread that started it ends.

    The kernel sends a signal whose handler is libc's own `alarm`. Called with the signal's number,
    16, `alarm` sends SIGALRM after as many seconds. No Python runs, so it works while a C call has
    the GIL. Until then the control thread, which sees EOF at once, can kill the descendants, too.
    """
    if libc is None or not _prctl(PR_SET_PDEATHSIG, DEATH_SIGNAL):
        return False
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(DEATH_SIGNAL, ctypes.cast(libc.alarm, ctypes.c_void_p))
    if os.getppid() != parent_pid:  # the parent exited before the request
        os.kill(os.getpid(), DEATH_SIGNAL)
    return True


def forbid_new_privileges() -> bool:
    """Have no program that this thread starts gain rights by its file; Landlock requires this."""
    return _prctl(PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> bool:
    """Empty all sets of capabilities, for good; False if some capabilities are left.

    A root process keeps its uid without any privilege. Programs that it starts gain none back:
    neither because they are root's, nor from their file, as new privileges are forbidden, too.
    """
    if libc is None:
        return False
    forbid_new_privileges()
    libc.prctl(_PR_SET_SECUREBITS, _NO_ROOT, 0, 0, 0)  # fails without privileges, which is fine
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = struct.pack("=Ii", _VERSION_3, 0)
    if libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(bytes(24))) != 0:
        return False
    return _remaining() == 0


def _remaining() -> int:
    """The permitted and effective capabilities of this process, as one number."""
    with open("/proc/self/status", "rb") as status:
        fields = dict(line.split(b":", 1) for line in status if line.startswith(b"Cap"))
    remaining = int(fields[b"CapPrm"], 16) | int(fields[b"CapEff"], 16)
    return remaining | (int(fields[b"CapInh"], 16) if os.geteuid() == 0 else 0)


def _prctl(option: int, value: int) -> bool:
    if libc is None:
        return False
    return bool(libc.prctl(option, value, 0, 0, 0) == 0)


def os_error(what: str) -> OSError:
    """The error of the last call through `libc`."""
    error = ctypes.get_errno()
    return OSError(error, f"{what}: {os.strerror(error)}")
