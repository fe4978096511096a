"""Numbers of the system calls that a sandbox's filter checks, on x86-64 and on aarch64.

Newer calls have the same number on both; aarch64 lacks some old ones. `seccomp` says what the
filter does with each table.
"""

from __future__ import annotations

Numbers = tuple[int, int | None]

ALWAYS: dict[str, Numbers] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # Contexts are counted for the whole machine (fs.aio-max-nr).
    "io_setup": (206, 0),
    "io_destroy": (207, 1),
    "io_getevents": (208, 4),
    "io_submit": (209, 2),
    "io_cancel": (210, 3),
    "io_pgetevents": (333, 292),
    # Compiled filters share bpf_jit_limit; a Landlock ruleset is kernel memory without a limit.
    "seccomp": (317, 277),
    "landlock_create_ruleset": (444, 444),
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
    "open_tree_attr": (467, 467),
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
    # Owners and attributes of files, wherever the files are.
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
    # Memory that no limit counts; some of it outlives the session.
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
    "vmsplice": (278, 75),
    "splice": (275, 76),
    "tee": (276, 77),
    # Load on the disks and the memory of the whole machine.
    "sync": (162, 81),
    "syncfs": (306, 267),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "chown": (92, None),
    "lchown": (94, None),
    "inotify_init": (253, None),
}
WITHOUT_EFFECT: dict[str, Numbers] = {
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "utimensat": (280, 88),
    "fadvise64": (221, 223),
    "setsid": (112, 157),
    "chmod": (90, None),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
}
"""Answered with 0. `fadvise64` could drop a library from the page cache of the whole machine.
After `setsid` a process whose parents have ended could not be recognized as part of the session.
"""
FOR_ITSELF: dict[str, Numbers] = {
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
}
"""Allowed with process 0, which is the caller; refused for other processes of the user."""
SETPRIORITY: Numbers = (141, 140)
SOCKET: Numbers = (41, 198)
NETWORK: dict[str, Numbers] = {
    "socket": SOCKET,
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
}
SIGNALS: dict[str, Numbers] = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
SOCKETPAIR, SETSOCKOPT, FCNTL, IOCTL = (53, 199), (54, 208), (72, 25), (16, 29)
CLONE, CLONE3, PRCTL, MADVISE = (56, 220), (435, 435), (157, 167), (28, 233)
MMAP, SENDFILE = (9, 222), (40, 71)
PIDFD_SEND_SIGNAL: Numbers = (424, 424)
TRUNCATE, OPENAT, OPENAT2 = (76, 45), (257, 56), (437, 437)
OPEN: Numbers = (2, None)
