"""Landlock: a process gives up rights, for itself and all its descendants.

Called through libc's `syscall`, since no wrapper exists. The numbers are the same on every
architecture that Linux supports.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from enum import IntFlag

from capsule_tasks.system.portable import IS_LINUX
from capsule_tasks.system.prctl import forbid_new_privileges, libc, os_error

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_RULE_PATH_BENEATH = 1


Access = IntFlag(
    "Access",
    "EXECUTE WRITE_FILE READ_FILE READ_DIR REMOVE_DIR REMOVE_FILE MAKE_CHAR MAKE_DIR MAKE_REG "
    "MAKE_SOCK MAKE_FIFO MAKE_BLOCK MAKE_SYM REFER TRUNCATE IOCTL_DEV",
)
"""Rights to files below a path, in the order of the kernel's bits."""

READ = Access.EXECUTE | Access.READ_FILE | Access.READ_DIR
WRITE = ~(Access.MAKE_CHAR | Access.MAKE_BLOCK | Access.IOCTL_DEV)
"""Everything but what concerns devices."""
_ON_FILES = (
    Access.EXECUTE | Access.WRITE_FILE | Access.READ_FILE | Access.TRUNCATE | Access.IOCTL_DEV
)
_NET_TCP = 0b11
_SCOPE_UNIX_SOCKETS, _SCOPE_SIGNALS = 1, 2

_NEEDS_ABI = {Access.REFER: 2, Access.TRUNCATE: 3, Access.IOCTL_DEV: 5}
_ABI_NET, _ABI_SCOPE = 4, 6


def abi() -> int:
    """The version of Landlock that the kernel offers; 0 if none."""
    if not IS_LINUX:
        return 0
    return max(0, _syscall(_CREATE_RULESET, None, 0, _ASK_VERSION))


def restrict(readable: Iterable[str], writable: Iterable[str], *, network: bool) -> list[str]:
    """Confine this thread, and processes that it starts, to these paths; what is confined now.

    Names in the result: `reads`, `writes`, `truncation`, `tcp` unless `network`, and `signals`. A
    path that does not exist is skipped. OSError if the kernel refuses.
    """
    version = abi()
    if version == 0 or not forbid_new_privileges():
        return []
    handled = _known(version)
    confines_net = version >= _ABI_NET and not network
    scoped = _SCOPE_UNIX_SOCKETS | _SCOPE_SIGNALS if version >= _ABI_SCOPE else 0
    attributes = struct.pack("QQQ", handled, _NET_TCP if confines_net else 0, scoped)
    size = 24 if version >= _ABI_SCOPE else 16 if version >= _ABI_NET else 8
    ruleset = _checked(_CREATE_RULESET, ctypes.c_char_p(attributes), size, 0)
    try:
        for paths, access in ((readable, READ), (writable, WRITE)):
            for path in paths:
                _allow(ruleset, path, access & handled)
        _checked(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    parts = {"truncation": handled & Access.TRUNCATE, "tcp": confines_net, "signals": scoped}
    return ["reads", "writes", *(name for name, confines in parts.items() if confines)]


def _known(version: int) -> int:
    """The rights that this version knows; it refuses a ruleset with other rights."""
    return sum(access for access in Access if _NEEDS_ABI.get(access, 1) <= version)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            access &= _ON_FILES
        rule = struct.pack("=Qi", access, descriptor)
        _checked(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.c_char_p(rule), 0)
    finally:
        os.close(descriptor)


def _checked(number: int, *arguments: object) -> int:
    answer = _syscall(number, *arguments)
    if answer < 0:
        raise os_error("landlock")
    return answer


def _syscall(number: int, *arguments: object) -> int:
    assert libc is not None
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return int(libc.syscall(ctypes.c_long(number), *converted))
