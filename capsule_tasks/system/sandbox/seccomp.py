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
from collections.abc import Iterable

from capsule_tasks.system.portable import IS_LINUX
from capsule_tasks.system.prctl import forbid_new_privileges, libc
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
_JUMP_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K

_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENT = 0, 4, 16

_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, PID, NET
_CLONE_PARENT = 0x8000  # a child of the session's parent, which no limit counts
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x10000
_MAP_HUGETLB = 0x40000  # shared by the whole machine, and not counted in RSS
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_DATAGRAM_BIT = 2  # SOCK_DGRAM and SOCK_RAW, which can send to any address
_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP = 0x5412, 0x541C, 0x8901, 0x8902
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
_SOL_SOCKET = 1
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
    applied = ["no_new_privs", "syscalls"]
    if not network:
        applied.append("network")
    if signals:
        applied.append("signals")
    if truncation:
        applied.append("truncation")
    return applied


class _Assembler:
    """The instructions of the filter, in order."""

    def __init__(self) -> None:
        self.code: list[tuple[int, int, int, int]] = []

    def load(self, offset: int) -> None:
        self.code.append((_LOAD_WORD, 0, 0, offset))

    def unless(self, jump: int, value: int, answer: int) -> None:
        """Return `answer` if the comparison fails."""
        self.code += [(jump, 1, 0, value), (_RETURN, 0, 0, answer)]

    def when(self, jump: int, value: int, answer: int) -> None:
        """Return `answer` if the comparison holds."""
        self.code += [(jump, 0, 1, value), (_RETURN, 0, 0, answer)]

    def answer(self, numbers: Iterable[int], answer: int) -> None:
        """Return `answer` to these system calls."""
        for number in numbers:
            self.when(_JUMP_EQ, number, answer)

    def block(self, number: int, body: list[tuple[int, int, int, int]]) -> None:
        """Run `body`, which must end in a return, for one system call."""
        self.code += [(_JUMP_EQ, 0, len(body), number), *body]

    def bytes(self) -> bytes:
        return b"".join(struct.pack("=HBBI", *instruction) for instruction in self.code)


@functools.cache
def _program(machine: str, network: bool, only_pid: int | None, truncation: bool) -> bytes:
    arch, column = _ARCHITECTURES[machine]
    is_x86 = machine == "x86_64"
    program = _Assembler()
    program.load(_OFFSET_ARCH)
    program.unless(_JUMP_EQ, arch, _KILL_PROCESS)
    program.load(_OFFSET_NUMBER)
    if is_x86:
        program.when(_JUMP_GE, _X32, _REFUSE)
        program.answer(syscalls.ALWAYS_X86.values(), _REFUSE)
        program.answer(syscalls.WITHOUT_EFFECT_X86.values(), _NO_EFFECT)
    refused = syscalls.ALWAYS | ({} if network else syscalls.NETWORK)
    program.answer((numbers[column] for numbers in refused.values()), _REFUSE)
    program.answer((numbers[column] for numbers in syscalls.WITHOUT_EFFECT.values()), _NO_EFFECT)
    _confine_memory(program, column)
    _confine_processes(program, column)
    _confine_descriptors(program, column)
    if network:  # internet sockets, and netlink for addresses; not Unix sockets
        families = _one_of(0, (_AF_INET, _AF_INET6, _AF_NETLINK), _ALLOW, _REFUSE)
        program.block(syscalls.SOCKET[column], families)
    if only_pid is not None:
        _confine_signals(program, column, only_pid)
    if truncation:
        _confine_truncation(program, column, is_x86)
    program.code.append((_RETURN, 0, 0, _ALLOW))
    return program.bytes()


def _confine_memory(program: _Assembler, column: int) -> None:
    """Refuse memory that no limit counts; see also `_confine_descriptors`."""
    huge = _argument(3, (_JUMP_ANY_BIT, _MAP_HUGETLB), _REFUSE, _ALLOW)
    program.block(syscalls.MMAP[column], huge)
    program.block(syscalls.MADVISE[column], _one_of(2, _MADVISE_IGNORED, _NO_EFFECT, _ALLOW))
    # It pins a whole page for one byte in a pipe or a socket. Python copies without it.
    program.when(_JUMP_EQ, syscalls.SENDFILE[column], _NOT_THERE)


def _confine_processes(program: _Assembler, column: int) -> None:
    """Refuse changes to limits and priorities of other processes, and children of the parent."""
    for numbers in syscalls.FOR_ITSELF.values():
        program.block(numbers[column], _one_of(0, (0,), _ALLOW, _REFUSE))
    own_process = _argument(0, (_JUMP_EQ, 0), None, _REFUSE)  # PRIO_PROCESS
    own_process += _argument(1, (_JUMP_EQ, 0), _ALLOW, _REFUSE)
    program.block(syscalls.SETPRIORITY[column], own_process)
    program.when(_JUMP_EQ, syscalls.CLONE3[column], _NOT_THERE)  # its flags are out of reach
    flags = (_JUMP_ANY_BIT, _NEW_NAMESPACES | _CLONE_PARENT)
    # A thread with its own descriptors could open as many as the limit allows a whole process.
    own_files = _one_of(0, (_CLONE_THREAD,), _REFUSE, _ALLOW, mask=_CLONE_THREAD | _CLONE_FILES)
    program.block(syscalls.CLONE[column], _argument(0, flags, _REFUSE, None) + own_files)
    program.block(syscalls.PRCTL[column], _one_of(0, _PRCTL_REFUSED, _REFUSE, _ALLOW))


def _confine_descriptors(program: _Assembler, column: int) -> None:
    """Allow calls on descriptors that affect this process only; refuse larger buffers."""
    program.block(syscalls.FCNTL[column], _one_of(1, _FCNTL_COMMANDS, _ALLOW, _REFUSE))
    program.block(syscalls.IOCTL[column], _ioctls())
    only_pairs = _argument(0, (_JUMP_EQ, _AF_UNIX), None, _REFUSE)
    only_pairs += _argument(1, (_JUMP_ANY_BIT, _DATAGRAM_BIT), _REFUSE, _ALLOW)
    program.block(syscalls.SOCKETPAIR[column], only_pairs)
    options = _argument(1, (_JUMP_EQ, _SOL_SOCKET), None, _ALLOW)
    for option in _SOCKET_FILTERS:
        options += _argument(2, (_JUMP_EQ, option), _REFUSE, None)
    options += _one_of(2, _BUFFER_SIZES, _NO_EFFECT, _ALLOW)
    program.block(syscalls.SETSOCKOPT[column], options)


def _confine_signals(program: _Assembler, column: int, only_pid: int) -> None:
    for name, numbers in syscalls.SIGNALS.items():
        if name == "pidfd_send_signal":
            program.when(_JUMP_EQ, numbers[column], _REFUSE)
        else:
            program.block(numbers[column], _one_of(0, (only_pid,), _ALLOW, _REFUSE))


def _confine_truncation(program: _Assembler, column: int, is_x86: bool) -> None:
    """Refuse to truncate files by path, and by opening them for anything but writing."""
    program.when(_JUMP_EQ, syscalls.TRUNCATE[column], _REFUSE)
    program.when(_JUMP_EQ, syscalls.OPENAT2[column], _NOT_THERE)  # its flags are out of reach
    cutting = (_O_TRUNC, _O_TRUNC | _O_ACCMODE)  # for reading, and for neither
    mask = _O_TRUNC | _O_ACCMODE
    program.block(syscalls.OPENAT[column], _one_of(2, cutting, _REFUSE, _ALLOW, mask))
    if is_x86:
        program.block(syscalls.OPEN_X86, _one_of(1, cutting, _REFUSE, _ALLOW, mask))


def _one_of(
    index: int, values: Iterable[int], holds: int, fails: int, mask: int = 0xFFFFFFFF
) -> list[tuple[int, int, int, int]]:
    """Answer `holds` if the low word of an argument, masked, is among the values."""
    body = [(_LOAD_WORD, 0, 0, _OFFSET_ARGUMENT + 8 * index), (_AND, 0, 0, mask)]
    for value in values:
        body += [(_JUMP_EQ, 0, 1, value), (_RETURN, 0, 0, holds)]
    return [*body, (_RETURN, 0, 0, fails)]


def _argument(
    index: int, comparison: tuple[int, int], holds: int | None, fails: int | None
) -> list[tuple[int, int, int, int]]:
    """Compare the low word of an argument; with None as the answer the next instruction runs."""
    jump, value = comparison
    body = [(_LOAD_WORD, 0, 0, _OFFSET_ARGUMENT + 8 * index)]
    if holds is None:
        assert fails is not None
        return [*body, (jump, 1, 0, value), (_RETURN, 0, 0, fails)]
    body += [(jump, 0, 1, value), (_RETURN, 0, 0, holds)]
    if fails is not None:
        body.append((_RETURN, 0, 0, fails))
    return body


def _ioctls() -> list[tuple[int, int, int, int]]:
    """Allow what belongs to descriptors, terminals and sockets.

    Input into a terminal, and choosing a process that gets signals, are refused. So are all other
    types: they are for file systems and devices, where the owner of a file has more rights than
    Landlock leaves to a reader.
    """
    body = [(_LOAD_WORD, 0, 0, _OFFSET_ARGUMENT + 8)]
    for request in (_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP):
        body += [(_JUMP_EQ, 0, 1, request), (_RETURN, 0, 0, _REFUSE)]
    body.append((_AND, 0, 0, _IOCTL_TYPE))
    for kind in _IOCTL_TYPES:
        body += [(_JUMP_EQ, 0, 1, kind), (_RETURN, 0, 0, _ALLOW)]
    body += [(_JUMP_EQ, 0, 1, _IOCTL_TYPE_OF_COPIES), (_RETURN, 0, 0, _NOT_SUPPORTED)]
    return [*body, (_RETURN, 0, 0, _REFUSE)]


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))


def _install(program: bytes) -> None:
    assert libc is not None
    unused = ctypes.c_ulong(0)
    forbid_new_privileges()
    filter_ = _Filter(len(program) // 8, program)
    mode = ctypes.c_ulong(_MODE_FILTER)
    if libc.prctl(_PR_SET_SECCOMP, mode, ctypes.byref(filter_), unused, unused) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"seccomp: {os.strerror(error)}")
