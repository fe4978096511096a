"""A seccomp filter, assembled here: classic BPF that answers EPERM to what a sandbox never needs.

The list names what is refused, so that Python and its libraries keep working with kernels of any
age; reads, writes and signals are confined by Landlock, this closes the roads around it.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
import sys

from capsule_tasks.system.prctl import forbid_new_privileges, libc

_PR_SET_SECCOMP = 22
_MODE_FILTER = 2

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_KILL_PROCESS = 0x80000000

_LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQ = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_GE = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_JUMP_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K

_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENT = 0, 4, 16

_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, PID, NET
_AF_UNIX = 1
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

_ALWAYS: dict[str, tuple[int, int]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "personality": (135, 92),
    "vhangup": (153, 58),
    "nfsservctl": (180, 42),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
_ALWAYS_X86: dict[str, int] = {"iopl": 172, "ioperm": 173, "modify_ldt": 154, "uselib": 134}
_NETWORK: dict[str, tuple[int, int]] = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
}
_SIGNALS: dict[str, tuple[int, int]] = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
_SOCKETPAIR, _CLONE, _CLONE3, _IOCTL = (53, 199), (56, 220), (435, 435), (16, 29)
_FORKS: tuple[int, ...] = (57, 58)  # fork, vfork: only x86-64 has them


def confine(*, network: bool, signals: bool) -> list[str]:
    """Install the filter for this thread and whatever it starts; what it confines.

    `network` leaves sockets alone; `signals` has it refuse all signals but those to this process,
    where Landlock cannot. Nothing is installed, and the answer is empty, on an architecture whose
    system calls are not listed here.
    """
    if sys.platform != "linux" or os.uname().machine not in _ARCHITECTURES:
        return []
    only_pid = os.getpid() if signals else None
    program = _program(os.uname().machine, network, only_pid)
    _install(program)
    applied = ["no_new_privs", "syscalls"]
    if not network:
        applied.append("network")
    if signals:
        applied.append("signals")
    return applied


class _Assembler:
    """Instructions in order; every comparison jumps at most over the next one or two."""

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

    def block(self, number: int, body: list[tuple[int, int, int, int]]) -> None:
        """Run `body`, which must end in a return, for one system call."""
        self.code += [(_JUMP_EQ, 0, len(body), number), *body]

    def bytes(self) -> bytes:
        return b"".join(struct.pack("=HBBI", *instruction) for instruction in self.code)


@functools.cache
def _program(machine: str, network: bool, only_pid: int | None) -> bytes:
    arch, column = _ARCHITECTURES[machine]
    refuse = _ERRNO | errno.EPERM
    program = _Assembler()
    program.load(_OFFSET_ARCH)
    program.unless(_JUMP_EQ, arch, _KILL_PROCESS)
    program.load(_OFFSET_NUMBER)
    if machine == "x86_64":
        program.when(_JUMP_GE, _X32, refuse)
        for number in _ALWAYS_X86.values():
            program.when(_JUMP_EQ, number, refuse)
    refused = _ALWAYS | ({} if network else _NETWORK)
    for numbers in refused.values():
        program.when(_JUMP_EQ, numbers[column], refuse)
    program.when(_JUMP_EQ, _CLONE3[column], _ERRNO | errno.ENOSYS)  # its flags are out of reach
    program.block(_CLONE[column], _argument(0, (_JUMP_ANY_BIT, _NEW_NAMESPACES), refuse, _ALLOW))
    for request in (_TIOCSTI, _TIOCLINUX):
        program.block(_IOCTL[column], _argument(1, (_JUMP_EQ, request), refuse, None))
        program.load(_OFFSET_NUMBER)
    if not network:
        only_unix = _argument(0, (_JUMP_EQ, _AF_UNIX), _ALLOW, refuse)
        program.block(_SOCKETPAIR[column], only_unix)
    if only_pid is not None:
        own = (_JUMP_EQ, only_pid)
        for name, numbers in _SIGNALS.items():
            if name == "pidfd_send_signal":
                program.when(_JUMP_EQ, numbers[column], refuse)
            else:
                program.block(numbers[column], _argument(0, own, _ALLOW, refuse))
    program.code.append((_RETURN, 0, 0, _ALLOW))
    return program.bytes()


def _argument(
    index: int, comparison: tuple[int, int], holds: int, fails: int | None
) -> list[tuple[int, int, int, int]]:
    """Compare the low word of an argument; without `fails` execution goes on behind."""
    jump, value = comparison
    body = [
        (_LOAD_WORD, 0, 0, _OFFSET_ARGUMENT + 8 * index),
        (jump, 0, 1, value),
        (_RETURN, 0, 0, holds),
    ]
    if fails is not None:
        body.append((_RETURN, 0, 0, fails))
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
        error = ctypes.get_errno()
        raise OSError(error, f"seccomp: {os.strerror(error)}")
