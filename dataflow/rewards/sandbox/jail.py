"""Runs one program within limits, and ends all its processes with it. Only the standard library: it starts in 30 ms.

    python -I -S jail.py OPTIONS     (JSON, see dataflow/rewards/sandbox/local.py)

Where the system lets a user make namespaces (Linux), the program has no network, sees no process but its own, and can
write to its working directory only, which is a file system in memory; its processes end with the first of them, by the
kernel. Elsewhere this process is the parent of all whose own parent has ended, and kills those that are left.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000 | 0x00020000 | 0x08000000
"""CLONE_NEWUSER, NEWNET, NEWPID, NEWNS, NEWIPC."""
NOBODY = 65534
_PRIVATE, _RECURSIVE, _NOSUID, _NODEV, _NOEXEC = 1 << 18, 1 << 14, 2, 4, 8
_DEATH_SIGNAL, _NO_NEW_PRIVILEGES, _SUBREAPER = 1, 38, 36
_MOUNT_SETATTR, _AT_RECURSIVE, _READ_ONLY = 442, 0x8000, 1
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
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    check(_LIBC.syscall(_MOUNT_SETATTR, -1, b"/", _AT_RECURSIVE, attributes, ctypes.sizeof(attributes)))
    size = f"size={options['disk_mb']}m,nr_inodes=10000,mode=700".encode()
    check(_LIBC.mount(b"tmpfs", options["work"].encode(), b"tmpfs", _NOSUID | _NODEV, size))


def own_proc() -> None:
    """Shows the processes of this namespace only; none if the system forbids a second /proc."""
    flags = _NOSUID | _NODEV | _NOEXEC
    if _LIBC.mount(b"proc", b"/proc", b"proc", flags, None) != 0:
        check(_LIBC.mount(b"tmpfs", b"/proc", b"tmpfs", flags, b"size=4k"))


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
    pages = sum(int(words[21]) for words in map(stat, pids) if words)
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
        limits.append((resource.RLIMIT_NPROC, options["processes"]))
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
        os.execve(options["command"][0], options["command"], options["environment"])
    except BaseException as error:
        report(options, {"end": "error", "why": f"{type(error).__name__}: {error}"})
    os._exit(1)


def report(options: dict[str, Any], what: dict[str, Any]) -> None:
    """Tells the process that started this one how the program ended; the first line counts."""
    os.write(options["report"], json.dumps(what).encode() + b"\n")


def supervise(options: dict[str, Any], alone: bool) -> None:
    """Starts the program, watches it, and reports its end when all its processes have ended."""
    if not alone:
        _LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)
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
        if heard is not None and heard.si_signo == signal.SIGTERM:
            end = {"end": "cancelled"}
        elif left <= 0:
            end = {"end": "timeout"}
        elif exceeded := excess(options, alone):
            end = {"end": exceeded}
    end_all(alone, program)
    report(options, end)


def main() -> None:
    """Runs the program, in namespaces if the system lets it."""
    options = json.loads(sys.argv[1])
    os.set_inheritable(options["report"], False)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    # The end of whoever started this ends the program, too.
    _LIBC.prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != options["parent"]:
        return
    with open(options["code"], "rb") as file:
        code = file.read()
    alone, missing = True, ""
    try:
        if options["isolate"]:
            separate(options)
        else:
            alone, missing = False, "switched off"
    except OSError as error:
        alone, missing = False, str(error)
    report(options, {"missing": missing})
    with open(os.path.join(options["work"], "main.py"), "wb") as file:
        file.write(code)
    if not alone:
        supervise(options, alone)
        return
    first = os.fork()
    if first == 0:
        try:
            _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            own_proc()
            supervise(options, alone)
        except BaseException as error:
            report(options, {"end": "error", "why": f"{type(error).__name__}: {error}"})
        os._exit(0)  # the kernel ends what is left in the namespace
    while True:
        heard = signal.sigwaitinfo({signal.SIGCHLD, signal.SIGTERM})
        if heard.si_signo == signal.SIGTERM:
            os.kill(first, signal.SIGKILL)
        if any(pid == first for pid, _status in ended()):
            return


if __name__ == "__main__":
    main()
