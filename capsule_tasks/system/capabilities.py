"""Giving up every capability, for good."""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_VERSION_3 = 0x20080522
_MOST = 64


def drop_all() -> bool:
    """Empty all sets, the bounding set too where that is allowed; False if some are left.

    A root process keeps the uid, but not one privilege of it; what it starts gains none back.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(_MOST):
        if libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) == 1:
            libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = struct.pack("=Ii", _VERSION_3, 0)
    if libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(bytes(24))) != 0:
        return False
    return _held() == 0


def _held() -> int:
    """The permitted and effective capabilities of this process, as one number."""
    with open("/proc/self/status", "rb") as status:
        fields = dict(line.split(b":", 1) for line in status if line.startswith(b"Cap"))
    held = int(fields[b"CapPrm"], 16) | int(fields[b"CapEff"], 16)
    return held | (int(fields[b"CapInh"], 16) if os.geteuid() == 0 else 0)
