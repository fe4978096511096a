"""A seccomp filter, assembled here: classic BPF that answers EPERM to what a sandbox never needs.

The list names what is refused, so that Python and its libraries keep working with kernels of any
age; reads, writes and signals are confined by Landlock, this closes the roads around it.

Landlock leaves modes and times of files alone, wherever they are, and a filter sees no path. Every
file of this user would be open to it, so these calls do nothing, and say that they succeeded:
`shutil.copy` and the like end with them, and a sandbox can do without their effect.
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

_PR_SET_SECCOMP = 22
_MODE_FILTER = 2

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_KILL_PROCESS = 0x80000000

_LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQ = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_GE = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_JUMP_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K

_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENT = 0, 4, 16

_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, PID, NET
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_DATAGRAM_BIT = 2  # SOCK_DGRAM and SOCK_RAW; such a socket can be aimed at any address
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_IOCTL_TYPE = 0xFF00
_FILE_FLAGS = (ord("f") << 8, ord("X") << 8)  # chattr, fs-verity, encryption: the owner's rights

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
    # What belongs to files, wherever they are.
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    # Memory that no limit counts, some of which outlives the session.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmctl": (31, 195),
    "shmat": (30, 196),
    "semget": (64, 190),
    "semctl": (66, 191),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "ioprio_set": (251, 30),
}
_ALWAYS_X86: dict[str, int] = {
    "iopl": 172,
    "ioperm": 173,
    "modify_ldt": 154,
    "uselib": 134,
    "chown": 92,
    "lchown": 94,
    "inotify_init": 253,
}
_WITHOUT_EFFECT: dict[str, tuple[int, int]] = {
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "utimensat": (280, 88),
}
_WITHOUT_EFFECT_X86: dict[str, int] = {
    "chmod": 90,
    "utime": 132,
    "utimes": 235,
    "futimesat": 261,
}
_FOR_ITSELF: dict[str, tuple[int, int]] = {
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
}
"""Allowed with 0 as the process, which is the caller: the same user's others are out of reach."""
_SETPRIORITY = (141, 140)
_SOCKET = (41, 198)
_NETWORK: dict[str, tuple[int, int]] = {
    "socket": _SOCKET,
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

    `network` allows sockets of the internet; `signals` has it refuse all signals but those to this
    process, where Landlock cannot. Nothing is installed, and the answer is empty, on an
    architecture whose system calls are not listed here.
    """
    if not IS_LINUX or os.uname().machine not in _ARCHITECTURES:
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
def _program(machine: str, network: bool, only_pid: int | None) -> bytes:
    arch, column = _ARCHITECTURES[machine]
    refuse = _ERRNO | errno.EPERM
    program = _Assembler()
    program.load(_OFFSET_ARCH)
    program.unless(_JUMP_EQ, arch, _KILL_PROCESS)
    program.load(_OFFSET_NUMBER)
    if machine == "x86_64":
        program.when(_JUMP_GE, _X32, refuse)
        program.answer(_ALWAYS_X86.values(), refuse)
        program.answer(_WITHOUT_EFFECT_X86.values(), _ERRNO)
    refused = _ALWAYS | ({} if network else _NETWORK)
    program.answer((numbers[column] for numbers in refused.values()), refuse)
    program.answer((numbers[column] for numbers in _WITHOUT_EFFECT.values()), _ERRNO)
    for numbers in _FOR_ITSELF.values():
        program.block(numbers[column], _argument(0, (_JUMP_EQ, 0), _ALLOW, refuse))
    own_process = _argument(0, (_JUMP_EQ, 0), None, refuse)  # PRIO_PROCESS
    own_process += _argument(1, (_JUMP_EQ, 0), _ALLOW, refuse)
    program.block(_SETPRIORITY[column], own_process)
    program.when(_JUMP_EQ, _CLONE3[column], _ERRNO | errno.ENOSYS)  # its flags are out of reach
    program.block(_CLONE[column], _argument(0, (_JUMP_ANY_BIT, _NEW_NAMESPACES), refuse, _ALLOW))
    program.block(_IOCTL[column], _ioctls(refuse))
    only_pairs = _argument(0, (_JUMP_EQ, _AF_UNIX), None, refuse)
    only_pairs += _argument(1, (_JUMP_ANY_BIT, _DATAGRAM_BIT), refuse, _ALLOW)
    program.block(_SOCKETPAIR[column], only_pairs)
    if network:  # of the internet, and what asks for its addresses; not those of this machine
        internet = [
            step
            for family in (_AF_INET, _AF_INET6, _AF_NETLINK)
            for step in _argument(0, (_JUMP_EQ, family), _ALLOW, None)
        ]
        program.block(_SOCKET[column], [*internet, (_RETURN, 0, 0, refuse)])
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
    index: int, comparison: tuple[int, int], holds: int | None, fails: int | None
) -> list[tuple[int, int, int, int]]:
    """Compare the low word of an argument; where an answer is None execution goes on behind."""
    jump, value = comparison
    body = [(_LOAD_WORD, 0, 0, _OFFSET_ARGUMENT + 8 * index)]
    if holds is None:
        assert fails is not None
        return [*body, (jump, 1, 0, value), (_RETURN, 0, 0, fails)]
    body += [(jump, 0, 1, value), (_RETURN, 0, 0, holds)]
    if fails is not None:
        body.append((_RETURN, 0, 0, fails))
    return body


def _ioctls(refuse: int) -> list[tuple[int, int, int, int]]:
    """Refuse to type into a terminal, and what changes the flags of a file."""
    body = _argument(1, (_JUMP_EQ, _TIOCSTI), refuse, None)
    body += [(_JUMP_EQ, 0, 1, _TIOCLINUX), (_RETURN, 0, 0, refuse), (_AND, 0, 0, _IOCTL_TYPE)]
    for kind in _FILE_FLAGS:
        body += [(_JUMP_EQ, 0, 1, kind), (_RETURN, 0, 0, refuse)]
    return [*body, (_RETURN, 0, 0, _ALLOW)]


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
