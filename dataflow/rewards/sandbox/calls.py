"""System calls that a program may not make, by their numbers, for the filter that the jail gives to the kernel."""

from __future__ import annotations

import errno
import sys
from collections.abc import Mapping
from typing import Any

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machines, in the order of the numbers below, as a filter sees them."""
_ALLOWED, _DENIED, _UNKNOWN = 0x7FFF0000, 0x00050000 | errno.EACCES, 0x00050000 | errno.ENOSYS
_GRANTED = 0x00050000
"""The call reports success, and has no effect."""
_EQUAL, _ANY_BIT = 0x15, 0x45  # tests of the kernel's filters
_NONE = -1

_FORBIDDEN: Mapping[str, tuple[int, int]] = {
    # They connect to services, or leave something that outlives the program.
    "socket": (41, 198),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # They take memory that is not counted, or from a number of objects that all processes of a user share.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "inotify_init": (253, _NONE),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    # They make namespaces, or change what lies in which folder.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    # They reach into other processes, or put them behind others.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
}
_OWN_ONLY: Mapping[str, tuple[int, int]] = {
    "prlimit64": (302, 261),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
}
"""Their first argument is a process: 0, which is the caller, is allowed."""
_SIGNALS: Mapping[str, tuple[int, int]] = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
}
"""Their first argument is a process, or a group of them: the one around the program and others are denied."""
_FLOCK, _FCNTL, _IOCTL, _CLONE, _CLONE3 = (73, 32), (72, 25), (16, 29), (56, 220), (435, 435)
# F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW
_LOCKS = (6, 7, 37, 38)
# F_SETLEASE, F_NOTIFY; F_SETOWN, F_SETSIG, F_SETOWN_EX and as ioctl FIOSETOWN, SIOCSPGRP: the owner gets signals
_LEASES, _OWNERS = (1024, 1026, 8, 10, 15), (0x8901, 0x8902)
# CLONE_NEWUSER, NEWNET, NEWPID, NEWNS, NEWIPC, NEWUTS, NEWCGROUP
_NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000 | 0x00020000 | 0x08000000 | 0x04000000 | 0x02000000


Test = tuple[int, tuple[int, ...] | None, int]
"""A test, the values of which one must fit, None for the processes that get no signals, and what the call then does."""


def filter_of(machine: str) -> dict[str, Any] | None:
    """Returns what a filter needs on a machine, as JSON has it; None if the numbers of its calls are not known.

    ``arch`` is the machine as a filter sees it. Each of ``rules`` is a call's number, the position of the argument that
    is tested, the tests, and what becomes of the call if none fits.
    """
    if machine not in _ARCHITECTURES or sys.maxsize < 1 << 32:
        return None
    at = [*_ARCHITECTURES].index(machine)
    rules: list[tuple[int, int, tuple[Test, ...], int]] = [
        *((numbers[at], 0, (), _DENIED) for numbers in _FORBIDDEN.values()),
        *((numbers[at], 0, ((_EQUAL, (0,), _ALLOWED),), _DENIED) for numbers in _OWN_ONLY.values()),
        *((numbers[at], 0, ((_EQUAL, None, _DENIED),), _ALLOWED) for numbers in _SIGNALS.values()),
        # A lock would keep other programs of this machine from a file that this one may only read. Of its own
        # processes, the only ones that may write its files, few use the same: SQLite, which needs locks, works.
        (_FLOCK[at], 0, (), _GRANTED),
        (_FCNTL[at], 1, ((_EQUAL, _LOCKS, _GRANTED), (_EQUAL, _LEASES, _DENIED)), _ALLOWED),
        (_IOCTL[at], 1, ((_EQUAL, _OWNERS, _DENIED),), _ALLOWED),
        (_CLONE[at], 0, ((_ANY_BIT, (_NAMESPACES,), _DENIED),), _ALLOWED),
        # Its flags lie in memory, where a filter cannot read them; without it, libraries call clone.
        (_CLONE3[at], 0, (), _UNKNOWN),
    ]
    return {"arch": _ARCHITECTURES[machine], "rules": [rule for rule in rules if rule[0] != _NONE]}
