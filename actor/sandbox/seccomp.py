"""The system calls that a program in the sandbox may not make, as a seccomp filter.

A program is one process with threads. It may not start others, open sockets, or reach another process by any call that takes
a process id. The rest of the list is what neither namespaces nor Landlock keep from it: memory outside its address space,
attributes of files, and the kernel's rarer interfaces. Calls that are newer than this list do not exist for it (ENOSYS).
"""

import errno
import platform
import signal
import struct
import sys

_X86_64, _AARCH64 = 0xC000003E, 0xC00000B7
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
"""Opcodes: load a word, jump if equal, if at least, if any bit is set; `and`; return."""
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`."""
_CLONE_THREAD = 0x10000
_SOCK_TYPE_MASK, _SOCK_STREAM = 0xF, 1
_OWNER_COMMANDS = (8, 10, 15)
"""`fcntl`: F_SETOWN, F_SETSIG, F_SETOWN_EX, which make the kernel send signals to any process of the user."""
_OWNER_REQUESTS = (0x8901, 0x8902, 0x5412)
"""`ioctl`: FIOSETOWN, SIOCSPGRP, which do the same; TIOCSTI, which types into a terminal."""
_RLIMIT_CPU = 0
_PR_SET_PDEATHSIG = 1
"""`prctl`: whoever could undo it would live on when its parent is killed."""
FIRST_UNKNOWN = 452
"""Number of the first system call that is newer than this list, on both architectures."""

DENIED: dict[str, tuple[int | None, int | None]] = {
    # Other processes.
    "fork": (57, None),
    "vfork": (58, None),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "kcmp": (312, 272),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "tkill": (200, 130),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    # A timer may send any signal, also SIGKILL to its own process.
    "timer_create": (222, 107),
    # Network. io_uring makes other calls past this filter.
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # Memory that RLIMIT_AS does not count, or that stays behind.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # Attributes of files, which Landlock does not guard.
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "truncate": (76, 45),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    # Namespaces and mounts.
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
    # The machine, and rarely used doors of the kernel.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "acct": (163, 89),
    "reboot": (169, 142),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "vhangup": (153, 58),
    "personality": (135, 92),
}
"""Numbers of the denied calls on x86_64 and aarch64; None where the architecture has no such call."""
_LOOKED_AT: dict[str, tuple[int, int]] = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "socketpair": (53, 199),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "setrlimit": (160, 164),
    "prlimit64": (302, 261),
    "prctl": (157, 167),
}
"""Calls that are allowed with some arguments only."""

_MACHINES = {"x86_64": 0, "aarch64": 1}


def is_known_machine() -> bool:
    """Return whether the numbers of this machine's system calls are known here."""
    return sys.platform == "linux" and platform.machine() in _MACHINES


def seccomp_filter(pid: int | None) -> bytes:
    """Return the filter as an array of `struct sock_filter`.

    `pid` is the only process that the program may send signals to and set limits of: its own. None: those of its namespace.
    """
    column = _MACHINES[platform.machine()]
    number = {name: numbers[column] for name, numbers in _LOOKED_AT.items()}
    denied = [numbers[column] for numbers in DENIED.values()]
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_EQUAL, (_X86_64, _AARCH64)[column], 1, 0),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
        # Also the numbers of the x32 interface.
        _line(_AT_LEAST, FIRST_UNKNOWN, 0, 1),
        _line(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    for one in filter(None, denied):
        lines += _when(one, [_refuse()])
    # The C library then takes clone, whose flags can be seen here.
    lines += _when(number["clone3"], [_line(_RETURN, _ERRNO | errno.ENOSYS)])
    lines += _when(number["clone"], [_argument(0), _line(_ANY_BIT, _CLONE_THREAD, 1, 0), _refuse(), _allow()])
    # A pair of streams, which event loops need, cannot be connected to anything else.
    stream = [_argument(1), _line(_AND, _SOCK_TYPE_MASK), _line(_EQUAL, _SOCK_STREAM, 1, 0), _refuse(), _allow()]
    lines += _when(number["socketpair"], stream)
    lines += _when(number["fcntl"], _unless_one_of(1, _OWNER_COMMANDS))
    lines += _when(number["prctl"], _unless_one_of(0, (_PR_SET_PDEATHSIG,)))
    lines += _when(number["ioctl"], _unless_one_of(1, _OWNER_REQUESTS))
    own = [] if pid is None else [_argument(0), _line(_EQUAL, pid, 1, 0), _refuse()]
    # A program that is killed by SIGKILL was killed from outside: it did not end itself in that way, or with such a status.
    killed = [_argument(0), _line(_AND, 0xFF), _line(_EQUAL, 128 + signal.SIGKILL, 0, 1), _line(_RETURN, _KILL), _allow()]
    lines += [*_when(number["exit"], killed), *_when(number["exit_group"], killed)]
    lines += _when(number["kill"], [*own, *_unless_one_of(1, (signal.SIGKILL,))])
    lines += _when(number["tgkill"], [*own, *_unless_one_of(2, (signal.SIGKILL,))])
    # Nothing happens, without an error: at a limit of CPU time of its own the kernel would send SIGKILL.
    done = _line(_RETURN, _ERRNO)
    lines += _when(number["setrlimit"], [_argument(0), _line(_EQUAL, _RLIMIT_CPU, 0, 1), done, _allow()])
    itself = [] if pid is None else [_argument(0), _line(_EQUAL, 0, 2, 0), _line(_EQUAL, pid, 1, 0), _refuse()]
    asked = [_argument(1), _line(_EQUAL, _RLIMIT_CPU, 0, 3), _argument(2), _line(_EQUAL, 0, 1, 0), done, _allow()]
    lines += _when(number["prlimit64"], [*itself, *asked])
    return b"".join([*lines, _allow()])


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _when(number: int, lines: list[bytes]) -> list[bytes]:
    """Return lines that are taken for one system call, and end with a verdict."""
    return [_line(_EQUAL, number, 0, len(lines)), *lines]


def _argument(index: int) -> bytes:
    """Return the line that loads the lower half of an argument; these are all of 32 bits."""
    return _line(_LOAD, _ARGUMENTS + 8 * index)


def _unless_one_of(index: int, values: tuple[int, ...]) -> list[bytes]:
    lines = [_argument(index)]
    for value in values:
        lines += [_line(_EQUAL, value, 0, 1), _refuse()]
    return [*lines, _allow()]


def _refuse() -> bytes:
    return _line(_RETURN, _ERRNO | errno.EPERM)


def _allow() -> bytes:
    return _line(_RETURN, _ALLOW)
