"""Dropping all capabilities, for good."""

from __future__ import annotations

import ctypes
import os
import struct

from capsule_tasks.system.prctl import forbid_new_privileges, libc

_PR_SET_SECUREBITS = 28
_NO_ROOT = 0b11_00_11_11  # NOROOT, NO_SETUID_FIXUP, NO_CAP_AMBIENT_RAISE, each of them locked
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_VERSION_3 = 0x20080522


def drop_all() -> bool:
    """Empty all sets; False if some capabilities are left.

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
