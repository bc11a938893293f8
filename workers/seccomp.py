"""System-call filter for sandboxed programs, as a program of the kernel's packet filter (BPF).

Namespaces hide the machine's files, processes and network. The filter also closes the kernel
interfaces that programs do not need, and ways to hold memory that `/proc` does not show. A refused
call fails with EPERM, so programs can fall back. Calls newer than this file fail with ENOSYS.
"""

from __future__ import annotations

import errno
import platform
import struct

_X86, _ARM = 0, 1
_MACHINES = {"x86_64": (_X86, 0xC000003E), "aarch64": (_ARM, 0xC00000B7)}
"""Machine -> its column below, and the kernel's number of its system-call table."""

# Call -> numbers on x86_64 and aarch64; None if the machine lacks the call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # mounts and namespaces
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
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "fanotify_init": (300, 262),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # the kernel itself
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "acct": (163, 89),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    # keys of the user who started the sandbox
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # memory outside of processes and of the scratch directory
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
_CLONE, _CLONE3, _SOCKET, _SETPRIORITY = (56, 220), (435, 435), (41, 198), (141, 140)
_OF_OTHERS = ((302, 261), (203, 122), (144, 119), (142, 118), (314, 274))
"""prlimit64, sched_setaffinity, sched_setscheduler, sched_setparam and sched_setattr: their first
argument is a process, 0 for the caller."""
_LAST = 462
"""mseal, the newest call that this file knows."""
_NEW_NAMESPACES = 0x7E020000
"""Flags of clone that make namespaces."""
_AF_UNIX = 1

# Instructions: load a word, jump if equal, if greater, if any bit is set, and return.
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER, _TABLE, _FIRST, _SECOND = 0, 4, 16, 24
"""Offsets: the number of the call, its table, and the low words of its first two arguments."""
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


def filter_program(machine: str = platform.machine()) -> bytes:
    """Return the filter for `bwrap --seccomp`.

    Raises:
        KeyError: the machine is neither x86_64 nor aarch64.

    >>> len(filter_program("x86_64")) % 8, filter_program("x86_64") == filter_program("aarch64")
    (0, False)
    """
    column, table = _MACHINES[machine]
    refused = _ERROR | errno.EPERM
    program = [
        (_LOAD, 0, 0, _TABLE),
        (_EQUAL, 1, 0, table),
        (_RETURN, 0, 0, _KILL),  # a call by another machine's table, such as 32-bit x86
        (_LOAD, 0, 0, _NUMBER),
        (_GREATER, 0, 1, _LAST),  # includes the x32 table, whose numbers have bit 30 set
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
    ]
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, refused)]
    # The flags of clone3 are in memory, which a filter cannot read; the C library falls back to clone.
    program += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    checks = [(_CLONE, _FIRST, _ANY_BIT, _NEW_NAMESPACES, True, errno.EPERM)]
    checks += [(_SOCKET, _FIRST, _EQUAL, _AF_UNIX, False, errno.EAFNOSUPPORT)]
    checks += [(numbers, _FIRST, _EQUAL, 0, False, errno.EPERM) for numbers in _OF_OTHERS]
    checks += [(_SETPRIORITY, offset, _EQUAL, 0, False, errno.EPERM) for offset in (_FIRST, _SECOND)]
    for numbers, offset, test, value, refuse_if, error in checks:
        program += [
            (_EQUAL, 0, 4, numbers[column]),
            (_LOAD, 0, 0, offset),
            (test, *((0, 1) if refuse_if else (1, 0)), value),
            (_RETURN, 0, 0, _ERROR | error),
            (_LOAD, 0, 0, _NUMBER),
        ]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
