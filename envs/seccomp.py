"""A filter of system calls for the sandbox, as the classic BPF program that the kernel takes (seccomp(2)).

A child may compute, read, write and start threads. It may not start processes, enter namespaces, mount, look
into other processes, or reach parts of the kernel that an environment has no use for and that were the way
out of other sandboxes. What is denied fails with EPERM, so that a library that only tried it goes on. Memory
that no limit of a process counts (memory files, System V segments) is denied as well.

An environment that has to start processes cannot run here.
"""

from __future__ import annotations

import errno
import platform
import struct
import sys
from typing import Final, NamedTuple

_LOAD: Final = 0x20
"""BPF_LD | BPF_W | BPF_ABS: a word of the call's description into the accumulator."""
_EQUAL: Final = 0x15
"""BPF_JMP | BPF_JEQ | BPF_K."""
_AT_LEAST: Final = 0x35
"""BPF_JMP | BPF_JGE | BPF_K."""
_AND: Final = 0x54
"""BPF_ALU | BPF_AND | BPF_K."""
_RETURN: Final = 0x06
"""BPF_RET | BPF_K."""

_ALLOW: Final = 0x7FFF0000
_KILL: Final = 0x80000000
_ERROR: Final = 0x00050000
"""Or an error number: what the call returns instead of being done."""

_NUMBER, _ARCHITECTURE = 0, 4
"""Offsets in `struct seccomp_data`; arguments follow."""
_X32: Final = 0x40000000
"""Numbers from here are calls of x86-64's second interface, which the list below does not know."""

_CLONE_THREAD: Final = 0x00010000
_CLONE_NEW: Final = 0x7E020000
"""All namespaces that clone(2) makes."""
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
"""Families of sockets. Others (vsock, packet, the kernel's own ciphers) lead out of any network namespace."""
_TERMINAL_INPUT: Final = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: type into a terminal."""


class _Machine(NamedTuple):
    """How a processor counts its system calls."""

    architecture: int
    """AUDIT_ARCH_*."""
    column: int
    """Of the table below."""
    clone: int
    clone3: int
    socket: int
    ioctl: int


_MACHINES: Final = {
    "x86_64": _Machine(0xC000003E, 0, 56, 435, 41, 16),
    "aarch64": _Machine(0xC00000B7, 1, 220, 435, 198, 29),
}

_NONE: Final = -1
"""There is no such call."""

_DENIED: Final = {
    # processes
    "fork": (57, _NONE),
    "vfork": (58, _NONE),
    # namespaces and mounts
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
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # large and often broken parts of the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "vmsplice": (278, 75),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    # memory that RLIMIT_AS does not count
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # the machine itself
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "vhangup": (153, 58),
    "iopl": (172, _NONE),
    "ioperm": (173, _NONE),
    "modify_ldt": (154, _NONE),
    "uselib": (134, _NONE),
}


def program(network: bool, machine: str | None = None) -> bytes | None:
    """The filter for a processor (default: this one's) as an array of `struct sock_filter`; None where its
    system calls are not known here.

    `network`: the child shares the machine's network. It then has no Unix sockets, which would lead to the
    services of the user's desktop, and has netlink, by which a resolver looks at addresses.
    """
    facts = _MACHINES.get(platform.machine() if machine is None else machine)
    if facts is None or sys.byteorder != "little" or sys.maxsize < 1 << 32:
        return None
    families = (_INET, _INET6, _NETLINK) if network else (_UNIX, _INET, _INET6)
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        *_unless_equal(facts.architecture, _KILL),
        _line(_LOAD, _NUMBER),
        _line(_AT_LEAST, _X32, 0, 1),
        _line(_RETURN, _KILL),
    ]
    for numbers in _DENIED.values():
        if (number := numbers[facts.column]) != _NONE:
            lines += _where(number, [_line(_RETURN, _ERROR | errno.EPERM)])
    lines += _where(facts.clone3, [_line(_RETURN, _ERROR | errno.ENOSYS)])  # libraries take clone then
    lines += _where(facts.clone, _threads_only())
    lines += _where(facts.socket, _families_only(families))
    lines += _where(facts.ioctl, _no_terminal_input())
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _threads_only() -> list[bytes]:
    return [
        _line(_LOAD, _argument(0)),
        _line(_AND, _CLONE_THREAD | _CLONE_NEW),
        *_unless_equal(_CLONE_THREAD, _ERROR | errno.EPERM),
        _line(_RETURN, _ALLOW),
    ]


def _families_only(families: tuple[int, ...]) -> list[bytes]:
    allowed = [_line(_LOAD, _argument(0))]
    for family in families:
        allowed += _where(family, [_line(_RETURN, _ALLOW)])
    return [*allowed, _line(_RETURN, _ERROR | errno.EAFNOSUPPORT)]


def _no_terminal_input() -> list[bytes]:
    denied = [_line(_LOAD, _argument(1))]
    for request in _TERMINAL_INPUT:
        denied += _where(request, [_line(_RETURN, _ERROR | errno.EPERM)])
    return [*denied, _line(_RETURN, _ALLOW)]


def _where(value: int, lines: list[bytes]) -> list[bytes]:
    """`lines`, which end in a return, where the accumulator is `value`; else what follows."""
    return [_line(_EQUAL, value, 0, len(lines)), *lines]


def _unless_equal(value: int, action: int) -> list[bytes]:
    return [_line(_EQUAL, value, 1, 0), _line(_RETURN, action)]


def _argument(index: int) -> int:
    """Offset of the lower half of an argument, on a little-endian machine."""
    return 16 + 8 * index


def _line(code: int, operand: int, true: int = 0, false: int = 0) -> bytes:
    """One `struct sock_filter`: how many lines to skip where a comparison holds, and where it does not."""
    return struct.pack("<HBBI", code, true, false, operand)
