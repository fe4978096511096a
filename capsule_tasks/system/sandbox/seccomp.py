"""A seccomp filter in classic BPF that answers EPERM to system calls a sandbox never needs.

The tables list the calls that are refused, not those that are allowed, so that Python and its
libraries work with kernels of any age. Landlock confines reads, writes and signals; the filter
refuses the calls by which code could evade Landlock.

Landlock does not confine changes of modes and times of files, and a filter sees no path, so code in
a sandbox could change every file of this user. These calls do nothing and return success: they are
the last step of `shutil.copy` and the like, and a sandbox does not need their effect.

Calls with many commands behind one number (`fcntl`, `ioctl`) are allowed by command: a kernel newer
than this list may have commands that affect other processes, as leases and notifications do.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
from collections.abc import Iterator, Mapping

from capsule_tasks.system.portable import IS_LINUX
from capsule_tasks.system.prctl import forbid_new_privileges, libc, os_error
from capsule_tasks.system.sandbox import syscalls

_PR_SET_SECCOMP = 22
_MODE_FILTER = 2

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_KILL_PROCESS = 0x80000000
_NO_EFFECT = _ERRNO  # error 0: the call returns 0 and does nothing
_REFUSE = _ERRNO | errno.EPERM
_NOT_THERE = _ERRNO | errno.ENOSYS
_NOT_SUPPORTED = _ERRNO | errno.EOPNOTSUPP

_LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQ = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_GE = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K

_Instruction = tuple[int, int, int, int]
_Rule = tuple[syscalls.Numbers, list[_Instruction]]

_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENT = 0, 4, 16

_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, PID, NET
_CLONE_PARENT = 0x8000  # a child of the session's parent, which no limit counts
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x10000
_MAP_HUGETLB = 0x40000  # shared by the whole machine, and not counted in RSS
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_DATAGRAM_BIT = 2  # SOCK_DGRAM and SOCK_RAW, which can send to any address
_IOCTLS_REFUSED = (0x5412, 0x541C, 0x8901, 0x8902)  # TIOCSTI, TIOCLINUX, FIOSETOWN, SIOCSPGRP
_IOCTL_TYPE = 0xFF00
_IOCTL_TYPES = (ord("T") << 8, 0x8900)  # descriptors and terminals; sockets
_IOCTL_TYPE_OF_COPIES = 0x9400  # FICLONE and the like, after whose refusal Python copies
_FCNTL_COMMANDS = (
    *(0, 1, 2, 3, 4, 1030, 1027, 1028),  # F_DUPFD … F_SETFL, DUPFD_CLOEXEC, the two queries
    *(5, 6, 7, 36, 37, 38),  # locks, of processes and of open files
    *(9, 11, 16, 1025, 1032, 1034, 1035, 1037),  # F_GETOWN and others that only read
)
"""Not among them: F_SETLEASE, which delays other processes that open the file, F_NOTIFY,
F_SETPIPE_SZ, and F_SETOWN with F_SETSIG, which send any signal to any process of this user."""
_PRCTL_REFUSED = (1, 22, 36, 62)
"""PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SCHED_CORE."""
_MADVISE_IGNORED = (20, 21)  # MADV_COLD, MADV_PAGEOUT: also for libraries of other processes
_SOL_SOCKET, _PRIO_PROCESS = 1, 0
_BUFFER_SIZES = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and their FORCE forms
_SOCKET_FILTERS = (26, 50, 51, 52)  # SO_ATTACH_FILTER, _BPF, and both for REUSEPORT
_O_TRUNC, _O_ACCMODE = 0x200, 3

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}


def confine(*, network: bool, signals: bool, truncation: bool) -> list[str]:
    """Install the filter for this thread and processes that it starts; what the filter confines.

    `network` allows internet sockets. `signals` and `truncation` are for kernels whose Landlock
    cannot confine these: the filter refuses all signals but those to this process, and calls that
    truncate a file without opening it for writing. On an architecture whose system calls are not
    listed nothing is installed, and the result is empty.
    """
    if not IS_LINUX or os.uname().machine not in _ARCHITECTURES:
        return []
    only_pid = os.getpid() if signals else None
    program = _program(os.uname().machine, network, only_pid, truncation)
    _install(program)
    parts = {"network": not network, "signals": signals, "truncation": truncation}
    return ["no_new_privs", "syscalls", *(name for name, confines in parts.items() if confines)]


@functools.cache
def _program(machine: str, network: bool, only_pid: int | None, truncation: bool) -> bytes:
    """Each rule's body, which ends in a return, is run for its system call; others are allowed."""
    arch, column = _ARCHITECTURES[machine]
    code = [
        (_LOAD_WORD, 0, 0, _OFFSET_ARCH),
        (_JUMP_EQ, 1, 0, arch),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD_WORD, 0, 0, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        code += [(_JUMP_GE, 0, 1, _X32), (_RETURN, 0, 0, _REFUSE)]
    for numbers, body in _rules(network, only_pid, truncation):
        if (number := numbers[column]) is not None:
            code += [(_JUMP_EQ, 0, len(body), number), *body]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _rules(network: bool, only_pid: int | None, truncation: bool) -> Iterator[_Rule]:
    refused = syscalls.ALWAYS | ({} if network else syscalls.NETWORK)
    yield from ((numbers, _answer(_REFUSE)) for numbers in refused.values())
    yield from ((numbers, _answer(_NO_EFFECT)) for numbers in syscalls.WITHOUT_EFFECT.values())
    yield from _memory_rules()
    yield from _process_rules()
    yield from _descriptor_rules()
    if network:  # internet sockets, and netlink for addresses; not Unix sockets
        families = dict.fromkeys((_AF_INET, _AF_INET6, _AF_NETLINK), _ALLOW)
        yield syscalls.SOCKET, _check(0, families, _REFUSE)
    if only_pid is not None:
        yield syscalls.PIDFD_SEND_SIGNAL, _answer(_REFUSE)
        for numbers in syscalls.SIGNALS.values():
            yield numbers, _check(0, {only_pid: _ALLOW}, _REFUSE)
    if truncation:  # by path, and by opening files for anything but writing
        yield syscalls.TRUNCATE, _answer(_REFUSE)
        # Its flags are in memory, which a filter cannot read.
        yield syscalls.OPENAT2, _answer(_NOT_THERE)
        mask = _O_TRUNC | _O_ACCMODE
        truncating = dict.fromkeys((_O_TRUNC, mask), _REFUSE)  # for reading, and for neither
        yield syscalls.OPENAT, _check(2, truncating, _ALLOW, mask)
        yield syscalls.OPEN, _check(1, truncating, _ALLOW, mask)


def _memory_rules() -> Iterator[_Rule]:
    """Refuse memory that no limit counts; see also `_descriptor_rules`."""
    yield syscalls.MMAP, _check(3, {0: _ALLOW}, _REFUSE, mask=_MAP_HUGETLB)
    yield syscalls.MADVISE, _check(2, dict.fromkeys(_MADVISE_IGNORED, _NO_EFFECT), _ALLOW)
    # sendfile pins a whole page for one byte in a pipe or a socket. Python copies without it.
    yield syscalls.SENDFILE, _answer(_NOT_THERE)


def _process_rules() -> Iterator[_Rule]:
    """Refuse changes to limits and priorities of other processes, and children of the parent."""
    for numbers in syscalls.FOR_ITSELF.values():
        yield numbers, _check(0, {0: _ALLOW}, _REFUSE)
    own_process = _check(0, {_PRIO_PROCESS: None}, _REFUSE) + _check(1, {0: _ALLOW}, _REFUSE)
    yield syscalls.SETPRIORITY, own_process
    # Its flags are in memory, which a filter cannot read.
    yield syscalls.CLONE3, _answer(_NOT_THERE)
    flags = _check(0, {0: None}, _REFUSE, mask=_NEW_NAMESPACES | _CLONE_PARENT)
    # A thread with its own descriptors could open as many as the limit allows a whole process.
    flags += _check(0, {_CLONE_THREAD: _REFUSE}, _ALLOW, mask=_CLONE_THREAD | _CLONE_FILES)
    yield syscalls.CLONE, flags
    yield syscalls.PRCTL, _check(0, dict.fromkeys(_PRCTL_REFUSED, _REFUSE), _ALLOW)


def _descriptor_rules() -> Iterator[_Rule]:
    """Allow calls on descriptors that affect this process only; refuse larger buffers."""
    yield syscalls.FCNTL, _check(1, dict.fromkeys(_FCNTL_COMMANDS, _ALLOW), _REFUSE)
    # Input into a terminal, and choosing a process that gets signals, are refused. So are types
    # that are not for descriptors, terminals and sockets: they are for file systems and devices,
    # where the owner of a file has more rights than Landlock leaves to a reader.
    types = {**dict.fromkeys(_IOCTL_TYPES, _ALLOW), _IOCTL_TYPE_OF_COPIES: _NOT_SUPPORTED}
    requests = _check(1, dict.fromkeys(_IOCTLS_REFUSED, _REFUSE), None)
    yield syscalls.IOCTL, requests + _check(1, types, _REFUSE, mask=_IOCTL_TYPE)
    only_pairs = _check(0, {_AF_UNIX: None}, _REFUSE)
    yield syscalls.SOCKETPAIR, only_pairs + _check(1, {0: _ALLOW}, _REFUSE, mask=_DATAGRAM_BIT)
    answers = dict.fromkeys(_SOCKET_FILTERS, _REFUSE) | dict.fromkeys(_BUFFER_SIZES, _NO_EFFECT)
    options = _check(1, {_SOL_SOCKET: None}, _ALLOW) + _check(2, answers, _ALLOW)
    yield syscalls.SETSOCKOPT, options


def _answer(answer: int) -> list[_Instruction]:
    return [(_RETURN, 0, 0, answer)]


def _check(
    index: int, answers: Mapping[int, int | None], default: int | None, mask: int = 0xFFFFFFFF
) -> list[_Instruction]:
    """Answer by the low word of an argument, masked.

    With None as an answer, which must be the last, or as the default, the next instruction runs.
    """
    body = [(_LOAD_WORD, 0, 0, _OFFSET_ARGUMENT + 8 * index), (_AND, 0, 0, mask)]
    for value, answer in answers.items():
        if answer is None:
            body.append((_JUMP_EQ, 1, 0, value))
        else:
            body += [(_JUMP_EQ, 0, 1, value), (_RETURN, 0, 0, answer)]
    if default is not None:
        body.append((_RETURN, 0, 0, default))
    return body


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))


def _install(program: bytes) -> None:
    assert libc is not None
    unused = ctypes.c_ulong(0)
    forbid_new_privileges()
    filter_ = _Filter(len(program) // 8, program)
    mode = ctypes.c_ulong(_MODE_FILTER)
    if libc.prctl(_PR_SET_SECCOMP, mode, ctypes.byref(filter_), unused, unused) != 0:
        raise os_error("seccomp")
