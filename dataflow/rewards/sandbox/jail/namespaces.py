"""Namespaces: what a program sees of the system."""

import ctypes
import os
from typing import Any

from .kernel import LIBC, check

NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000 | 0x00020000 | 0x08000000
"""CLONE_NEWUSER, NEWNET, NEWPID, NEWNS, NEWIPC."""
NOBODY = 65534
DEVICES = ("null", "zero", "full", "random", "urandom")
_PRIVATE, _RECURSIVE, _BIND, _READ_ONLY, _NOSUID, _NODEV, _NOEXEC = 1 << 18, 1 << 14, 1 << 12, 1, 2, 4, 8
_MOUNT_SETATTR, _AT_RECURSIVE = 442, 0x8000


def separate(options: dict[str, Any]) -> None:
    """Puts this process's future children into namespaces of their own."""
    user, group = os.getuid(), os.getgid()
    check(LIBC.unshare(NAMESPACES))
    for name, line in (
        ("setgroups", "deny"),
        # Not root inside: a program loses the rights over the namespaces when it is executed.
        ("uid_map", f"{NOBODY} {user} 1"),
        ("gid_map", f"{NOBODY} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    check(LIBC.mount(None, b"/", None, _PRIVATE | _RECURSIVE, None))
    hide(options)
    change("/", _AT_RECURSIVE, add=_READ_ONLY | _NOSUID | _NODEV)
    for name in DEVICES:
        if os.path.exists(f"/dev/{name}"):
            change(f"/dev/{name}", 0, remove=_NODEV)
    mount_memory(options["work"], f"size={options['disk_mb']}m,nr_inodes=10000,mode=700")


def hide(options: dict[str, Any]) -> None:
    """Covers folders by empty ones, but for those that hold the program's Python; of the devices, a few are left."""
    kept = [(path, os.open(path, os.O_PATH)) for path in options["keep"]]
    kept += [(f"/dev/{name}", os.open(f"/dev/{name}", os.O_PATH)) for name in DEVICES if os.path.exists(f"/dev/{name}")]
    for folder in {os.path.realpath(folder) for folder in options["hidden"]}:
        if os.path.isdir(folder):
            mount_memory(folder, "size=1m,mode=755")
    for path, opened in kept:
        if path.startswith("/dev/"):
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        else:
            os.makedirs(path, exist_ok=True)
        check(LIBC.mount(f"/proc/self/fd/{opened}".encode(), path.encode(), None, _BIND | _RECURSIVE, None))
        os.close(opened)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
    os.symlink(options["work"], "/dev/shm")  # for locks between processes
    os.makedirs(options["work"], exist_ok=True)


def mount_memory(path: str, options: str) -> None:
    """Mounts an empty file system."""
    check(LIBC.mount(b"tmpfs", path.encode(), b"tmpfs", _NOSUID | _NODEV, options.encode()))


def change(path: str, flags: int, add: int = 0, remove: int = 0) -> None:
    """Changes the attributes of a mount."""
    attributes = (ctypes.c_uint64 * 4)(add, remove, 0, 0)
    check(LIBC.syscall(_MOUNT_SETATTR, -1, path.encode(), flags, attributes, ctypes.sizeof(attributes)))


def own_proc() -> None:
    """Shows the processes of this namespace only; none if the system forbids a second /proc."""
    # Read-only: root's own settings of the kernel are root's to write, in any namespace.
    flags = _NOSUID | _NODEV | _NOEXEC | _READ_ONLY
    if LIBC.mount(b"proc", b"/proc", b"proc", flags, None) != 0:
        check(LIBC.mount(b"tmpfs", b"/proc", b"tmpfs", flags, b"size=4k"))
