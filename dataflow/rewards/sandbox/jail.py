"""Runs one program within limits, and ends all its processes with it. Only the standard library: it starts in 30 ms.

    python -I -S jail.py OPTIONS     (JSON, see dataflow/rewards/sandbox/local.py)

Where the system lets a user make namespaces (Linux), the program has no network, sees no process but its own, no device
and no folder in which services have sockets, and can write to its working directory only, which is a file system in
memory; its processes end with the first of them, by the kernel. Elsewhere this process is the parent of all whose own
parent has ended, and kills those that are left. In both cases a filter forbids the system calls that connect to
services, or take memory that no limit counts.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000 | 0x00020000 | 0x08000000
"""CLONE_NEWUSER, NEWNET, NEWPID, NEWNS, NEWIPC."""
NOBODY = 65534
DEVICES = ("null", "zero", "full", "random", "urandom")
DENIED = {
    # socket, shmget, msgget, memfd_create, unshare, setns, mount, userfaultfd, bpf, perf_event_open, add_key,
    # request_key, keyctl, ptrace, process_vm_readv, process_vm_writev; the last is clone
    "x86_64": (0xC000003E, (41, 29, 68, 319, 272, 308, 165, 323, 321, 298, 248, 249, 250, 101, 310, 311), 56),
    "aarch64": (0xC00000B7, (198, 194, 186, 279, 97, 268, 40, 282, 280, 241, 217, 218, 219, 117, 270, 271), 220),
}
"""System calls that a program may not make: the architecture as a filter sees it, and their numbers on it."""
_DENIED_ALL = (425, 428, 429, 430, 432, 438, 442, 447)
"""On every one: io_uring_setup, open_tree, move_mount, fsopen, fsmount, pidfd_getfd, mount_setattr, memfd_secret."""
_CLONE3 = 435  # its flags lie in memory, where a filter cannot read them; without it, libraries call clone
_NEW_NAMESPACES = NAMESPACES | 0x04000000 | 0x02000000  # NEWUTS, NEWCGROUP
_PRIVATE, _RECURSIVE, _BIND, _READ_ONLY, _NOSUID, _NODEV, _NOEXEC = 1 << 18, 1 << 14, 1 << 12, 1, 2, 4, 8
_DEATH_SIGNAL, _DUMPABLE, _SECCOMP, _FILTER, _NO_NEW_PRIVILEGES, _SUBREAPER = 1, 4, 22, 2, 38, 36
_MOUNT_SETATTR, _AT_RECURSIVE, _DETACH = 442, 0x8000, 2
_PAUSE_S = 0.05
"""Seconds between two looks at the number of processes and their memory, of which the kernel reports no event."""
_KILL_S = 5.0
_LIBC = ctypes.CDLL(None, use_errno=True)


def check(result: int) -> None:
    """Raises the system's error if a call failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def separate(options: dict[str, Any]) -> None:
    """Puts this process's future children into namespaces of their own."""
    user, group = os.getuid(), os.getgid()
    check(_LIBC.unshare(NAMESPACES))
    for name, line in (
        ("setgroups", "deny"),
        # Not root inside: a program loses the rights over the namespaces when it is executed.
        ("uid_map", f"{NOBODY} {user} 1"),
        ("gid_map", f"{NOBODY} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    check(_LIBC.mount(None, b"/", None, _PRIVATE | _RECURSIVE, None))
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
        check(_LIBC.mount(f"/proc/self/fd/{opened}".encode(), path.encode(), None, _BIND | _RECURSIVE, None))
        os.close(opened)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
    os.symlink(options["work"], "/dev/shm")  # for locks between processes
    os.makedirs(options["work"], exist_ok=True)


def mount_memory(path: str, options: str) -> None:
    """Mounts an empty file system."""
    check(_LIBC.mount(b"tmpfs", path.encode(), b"tmpfs", _NOSUID | _NODEV, options.encode()))


def change(path: str, flags: int, add: int = 0, remove: int = 0) -> None:
    """Changes the attributes of a mount."""
    attributes = (ctypes.c_uint64 * 4)(add, remove, 0, 0)
    check(_LIBC.syscall(_MOUNT_SETATTR, -1, path.encode(), flags, attributes, ctypes.sizeof(attributes)))


def own_proc() -> None:
    """Shows the processes of this namespace only; none if the system forbids a second /proc."""
    # Read-only: root's own settings of the kernel are root's to write, in any namespace.
    flags = _NOSUID | _NODEV | _NOEXEC | _READ_ONLY
    if _LIBC.mount(b"proc", b"/proc", b"proc", flags, None) != 0:
        check(_LIBC.mount(b"tmpfs", b"/proc", b"tmpfs", flags, b"size=4k"))


def unfiltered() -> str:
    """Returns why system calls cannot be forbidden, or ""."""
    machine = os.uname().machine
    if machine not in DENIED or ctypes.sizeof(ctypes.c_void_p) != 8:
        return f"their numbers on {machine} are not known"
    # No filter at all: a system that has them reports a bad address.
    if _LIBC.prctl(_SECCOMP, _FILTER, None) != 0 and ctypes.get_errno() == errno.EFAULT:
        return ""
    return os.strerror(ctypes.get_errno())


def forbid() -> None:
    """Forbids this process and those that it starts some system calls, for good."""
    arch, denied, clone = DENIED[os.uname().machine]
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06  # operations of the kernel's filters
    kill, fail, allow = 0x80000000, 0x00050000, 0x7FFF0000
    lines = [
        *((load, 0, 0, 4), (equal, 1, 0, arch), (end, 0, 0, kill)),  # calls as another architecture makes them
        *((load, 0, 0, 0), (at_least, 0, 1, 1 << 30), (end, 0, 0, fail | errno.ENOSYS)),  # x32
    ]
    for number in denied + _DENIED_ALL:
        lines += [(equal, 0, 1, number), (end, 0, 0, fail | errno.EACCES)]
    lines += [
        *((equal, 0, 1, _CLONE3), (end, 0, 0, fail | errno.ENOSYS)),
        *((equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 0, 1, _NEW_NAMESPACES), (end, 0, 0, fail | errno.EACCES)),
        (end, 0, 0, allow),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(code)))
    check(_LIBC.prctl(_SECCOMP, _FILTER, program))


def descendants(alone: bool) -> list[int]:
    """Returns the ids of the processes below this one; in a namespace, those are all others."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if alone:
        return [pid for pid in pids if pid != os.getpid()]
    children: dict[int, list[int]] = {}
    for pid in pids:
        words = stat(pid)
        if words and words[0] != b"Z":
            children.setdefault(int(words[1]), []).append(pid)
    found: list[int] = []
    ahead = [os.getpid()]
    while ahead:
        below = children.pop(ahead.pop(), [])
        found += below
        ahead += below
    return found


def stat(pid: int) -> list[bytes]:
    """Returns what the kernel says of a process, from its state on; [] if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name of a program, in parentheses, may hold anything.
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def excess(options: dict[str, Any], alone: bool) -> str:
    """Returns which limit of all processes together is exceeded, or ""."""
    pids = descendants(alone)
    if len(pids) > options["processes"]:
        return "process_limit"
    found = [words for words in map(stat, pids) if words]
    if sum(int(words[17]) for words in found) > options["threads"]:  # root may start more than the system's limit
        return "process_limit"
    pages = sum(int(words[21]) for words in found)
    return "memory_limit" if pages * resource.getpagesize() > options["memory_mb"] << 20 else ""


def ended() -> Iterator[tuple[int, int]]:
    """Yields the children that have ended, with their wait status."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def end_all(alone: bool, program: int) -> None:
    """Kills all processes below this one."""
    until = time.monotonic() + _KILL_S
    while time.monotonic() < until:
        # First many at once: one by one, they may multiply faster than they are killed.
        many, others = (-1, []) if alone else (-program, descendants(alone))
        for pid in (many, *others):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        signal.sigtimedwait({signal.SIGCHLD}, _PAUSE_S)


def limit(options: dict[str, Any], alone: bool) -> None:
    """Limits this process and those that it starts, each for itself."""
    mb = 1 << 20
    seconds = int(options["timeout"]) + 2
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


def execute(options: dict[str, Any], alone: bool) -> NoReturn:
    """Becomes the program."""
    try:
        _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        _LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        os.setsid()
        os.chdir(options["work"])
        limit(options, alone)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        # Python ignores these, and a program would inherit that.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if not unfiltered():
            forbid()
        os.execve(options["command"][0], options["command"], options["environment"])
    except BaseException as error:
        report(options, {"end": "error", "why": f"{type(error).__name__}: {error}"})
    os._exit(1)


def report(options: dict[str, Any], what: dict[str, Any]) -> None:
    """Tells the process that started this one how the program ended; the first line counts."""
    os.write(options["report"], json.dumps(what).encode() + b"\n")


def supervise(options: dict[str, Any], alone: bool) -> str:
    """Starts the program, watches it, and reports its end, which it returns, when all its processes have ended."""
    if not alone:
        _LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)
    # Another process of this user may then not use the descriptors of this one, such as the report.
    _LIBC.prctl(_DUMPABLE, 0, 0, 0, 0)
    until = time.monotonic() + options["timeout"]
    program = os.fork()
    if program == 0:
        execute(options, alone)
    end: dict[str, Any] = {}
    while not end:
        left = until - time.monotonic()
        heard = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, max(0.0, min(left, _PAUSE_S)))
        for pid, status in ended():
            if pid == program:
                end = {"end": "exit", "code": os.waitstatus_to_exitcode(status)}
        if end:
            break
        # The program may send it, too; in a namespace only the program.
        if heard is not None and heard.si_signo == signal.SIGTERM and not alone and heard.si_pid == options["parent"]:
            end = {"end": "cancelled"}
        elif left <= 0:
            end = {"end": "timeout"}
        elif exceeded := excess(options, alone):
            end = {"end": exceeded}
    end_all(alone, program)
    with contextlib.suppress(BrokenPipeError):  # who started this has ended
        report(options, end)
    return str(end["end"])


def clear(options: dict[str, Any], parent: int, alone: bool) -> None:
    """Removes the program's folder."""
    place, work = os.path.split(options["work"])
    if not alone:
        import shutil  # it takes a while to import

        shutil.rmtree(place, ignore_errors=True)
        return
    # What the program wrote was in memory; the descriptor is of the folder outside, which is not read-only.
    _LIBC.umount2(options["work"].encode(), _DETACH)
    name = os.path.basename(place)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(f"{name}/{work}", dir_fd=parent)
        os.rmdir(name, dir_fd=parent)


def main() -> None:
    """Runs the program, in namespaces if the system lets it."""
    options = json.loads(sys.argv[1])
    os.set_inheritable(options["report"], False)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    # The end of whoever started this ends the program, too.
    _LIBC.prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    outside = os.open(os.path.dirname(os.path.dirname(options["work"])), os.O_RDONLY | os.O_DIRECTORY)
    alone, told = False, True
    try:
        if os.getppid() == options["parent"]:
            with open(options["code"], "rb") as file:
                code = file.read()
            alone = prepare(options)
            with open(os.path.join(options["work"], "main.py"), "wb") as file:
                file.write(code)
            told = start(options, alone, outside)
    finally:
        if told:  # perhaps by the end of whoever would remove the folder
            clear(options, outside, alone)


def prepare(options: dict[str, Any]) -> bool:
    """Makes the namespaces, reports what the system lacks, and returns whether they could be made."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # a machine out of memory ends the program before anything else
    alone, missing = True, ""
    try:
        if options["isolate"]:
            separate(options)
        else:
            alone, missing = False, "switched off"
    except OSError as error:
        alone, missing = False, str(error)
    report(options, {"missing": missing, "unfiltered": unfiltered()})
    return alone


def start(options: dict[str, Any], alone: bool, outside: int) -> bool:
    """Runs the program until it ends, or this process is told to end; returns whether it was."""
    if not alone:
        return supervise(options, alone) == "cancelled"
    first = os.fork()
    if first == 0:
        try:
            os.close(outside)
            _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            own_proc()
            supervise(options, alone)
        except BaseException as error:
            report(options, {"end": "error", "why": f"{type(error).__name__}: {error}"})
        os._exit(0)  # the kernel ends what is left in the namespace
    told = False
    while True:
        heard = signal.sigwaitinfo({signal.SIGCHLD, signal.SIGTERM})
        if heard.si_signo == signal.SIGTERM:
            told = True
            os.kill(first, signal.SIGKILL)
        if any(pid == first for pid, _status in ended()):
            return told


if __name__ == "__main__":
    main()
