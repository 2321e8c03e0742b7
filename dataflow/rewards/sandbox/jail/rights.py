"""Rights and limits of a program: system calls, privileges, and what each of its processes may use."""

import ctypes
import errno
import os
import resource
import struct
from typing import Any

from .kernel import LIBC, check

_SECCOMP, _FILTER, _DROP, _NO_NEW_PRIVILEGES = 22, 2, 24, 38


def unfiltered(options: dict[str, Any]) -> str:
    """Returns why system calls cannot be forbidden, or ""."""
    if options["calls"] is None:
        return f"their numbers on {os.uname().machine} are not known"
    # No filter at all: a system that has them reports a bad address.
    if LIBC.prctl(_SECCOMP, _FILTER, None) != 0 and ctypes.get_errno() == errno.EFAULT:
        return ""
    return os.strerror(ctypes.get_errno())


def forbid(calls: dict[str, Any], guarded: list[int]) -> None:
    """Forbids this process and those that it starts some system calls, for good.

    Args:
        calls: see calls.py.
        guarded: ids of processes that get no signals; negative ones are of groups.
    """
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06  # operations of the kernel's filters
    kill, unknown, allow = 0x80000000, 0x00050000 | errno.ENOSYS, 0x7FFF0000
    lines = [
        *((load, 0, 0, 4), (equal, 1, 0, calls["arch"]), (end, 0, 0, kill)),  # calls as another architecture makes them
        *((load, 0, 0, 0), (at_least, 0, 1, 1 << 30), (end, 0, 0, unknown)),  # x32
    ]
    for number, position, tests, otherwise in calls["rules"]:
        inner = [(load, 0, 0, 16 + 8 * position)]
        for test, values, action in tests:
            values = guarded if values is None else values
            # Each jumps to the action if it fits; the last one over it if not.
            for left, value in zip(range(len(values) - 1, -1, -1), values, strict=True):
                inner.append((test, left, int(left == 0), value & 0xFFFFFFFF))
            inner.append((end, 0, 0, action))
        inner.append((end, 0, 0, otherwise))
        lines += [(equal, 0, len(inner), number), *inner]
    lines.append((end, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(code)))
    check(LIBC.prctl(_SECCOMP, _FILTER, program))


def drop_privileges() -> None:
    """Takes root's privileges from this process and those that it starts, but for owning root's files."""
    LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if os.getuid() != 0:  # then it has none once it is executed
        return
    number = 0
    while LIBC.prctl(_DROP, number, 0, 0, 0) == 0:  # until there is no such privilege
        number += 1
    header, none = struct.pack("II", 0x20080522, 0), bytes(24)  # of this process, in the third version of this call
    check(LIBC.capset(header, none))


def limit(options: dict[str, Any], alone: bool) -> None:
    """Limits this process and those that it starts, each for itself."""
    mb = 1 << 20
    # More than it can use until it is ended: a limit for one that has ended the process around it.
    seconds = (int(options["latest"]) + 2) * min(os.cpu_count() or 1, options["threads"])
    limits = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, options["memory_mb"] * mb),
        (resource.RLIMIT_FSIZE, options["disk_mb"] * mb),
        (resource.RLIMIT_NOFILE, options["files"]),
    ]
    if alone:  # elsewhere it would count all processes of the user
        limits.append((resource.RLIMIT_NPROC, options["threads"]))
    for what, most in limits:
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
