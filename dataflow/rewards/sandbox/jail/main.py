"""Runs one program within limits, and ends all its processes with it."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from .kernel import LIBC
from .namespaces import own_proc, separate
from .rights import drop_privileges, forbid, limit, unfiltered
from .usage import descendants, ended_by_system, excess, late

_DEATH_SIGNAL, _DUMPABLE, _SUBREAPER, _DETACH = 1, 4, 36, 2
_PAUSE_S = 0.05
"""Seconds between two looks at the number of processes and their memory, of which the kernel reports no event."""
_KILL_S = 5.0
_BY_KILL = 0  # SI_USER: a program can send a signal with any sender's id, but then not with this code


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


def execute(options: dict[str, Any], alone: bool) -> NoReturn:
    """Becomes the program."""
    try:
        LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        around = [os.getppid()] if alone else [os.getppid(), -os.getppid(), *options["guarded"]]
        os.setsid()
        os.chdir(options["work"])
        limit(options, alone)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        # Python ignores these, and a program would inherit that.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        drop_privileges()
        if not unfiltered(options):
            forbid(options["calls"], around)
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
        LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)
    # Another process of this user may then not use the descriptors of this one, such as the report.
    LIBC.prctl(_DUMPABLE, 0, 0, 0, 0)
    before, began = ended_by_system(), time.monotonic()
    program = os.fork()
    if program == 0:
        execute(options, alone)
    end: dict[str, Any] = {}
    while not end:
        left = began + options["timeout"] - time.monotonic()
        received = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, min(left, _PAUSE_S) if left > 0 else _PAUSE_S)
        for pid, status in ended():
            if pid == program:
                end = {"end": "exit", "code": os.waitstatus_to_exitcode(status)}
                if end["code"] == -signal.SIGKILL and ended_by_system() > before:
                    end = {"end": "memory_limit"}
        if end:
            break
        # The program may send it, too; in a namespace only the program.
        if received is not None and not alone and ends_by(received, options["parent"]):
            end = {"end": "cancelled"}
        elif left <= 0 and late(options, alone, options["timeout"] - left):
            end = {"end": "timeout"}
        elif exceeded := excess(options, alone):
            end = {"end": exceeded}
    end_all(alone, program)
    with contextlib.suppress(BrokenPipeError):  # who started this has ended
        report(options, end)
    return str(end["end"])


def ends_by(received: signal.struct_siginfo, parent: int) -> bool:
    """Returns whether a signal is the order of the process that started this one."""
    return received.si_signo == signal.SIGTERM and received.si_code == _BY_KILL and received.si_pid == parent


def clear(options: dict[str, Any], parent: int, alone: bool) -> None:
    """Removes the program's folder."""
    place, work = os.path.split(options["work"])
    if not alone:
        import shutil  # it takes a while to import

        shutil.rmtree(place, ignore_errors=True)
        return
    # What the program wrote was in memory; the descriptor is of the folder outside, which is not read-only.
    LIBC.umount2(options["work"].encode(), _DETACH)
    name = os.path.basename(place)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(f"{name}/{work}", dir_fd=parent)
        os.rmdir(name, dir_fd=parent)


def main() -> None:
    """Runs the program, in namespaces if the system lets it."""
    options = json.loads(sys.argv[1])
    os.set_inheritable(options["report"], False)
    # A program may send any to the process around it.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    # The program ends with the process that started this one.
    LIBC.prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    outside = os.open(os.path.dirname(os.path.dirname(options["work"])), os.O_RDONLY | os.O_DIRECTORY)
    alone, stopped = False, True
    try:
        if os.getppid() == options["parent"]:
            with open(options["code"], "rb") as file:
                code = file.read()
            alone = prepare(options)
            with open(os.path.join(options["work"], "main.py"), "wb") as file:
                file.write(code)
            stopped = start(options, alone, outside)
    finally:
        if stopped:  # the process that would remove the folder may have ended
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
    report(options, {"missing": missing, "unfiltered": unfiltered(options)})
    return alone


def start(options: dict[str, Any], alone: bool, outside: int) -> bool:
    """Runs the program until it ends, or this process gets SIGTERM; returns whether it did."""
    if not alone:
        return supervise(options, alone) == "cancelled"
    first = os.fork()
    if first == 0:
        try:
            os.close(outside)
            LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            own_proc()
            supervise(options, alone)
        except BaseException as error:
            report(options, {"end": "error", "why": f"{type(error).__name__}: {error}"})
        os._exit(0)  # the kernel ends what is left in the namespace
    stopped = False
    while True:
        received = signal.sigwaitinfo({signal.SIGCHLD, signal.SIGTERM})
        if received.si_signo == signal.SIGTERM:
            stopped = True
            os.kill(first, signal.SIGKILL)
        if any(pid == first for pid, _status in ended()):
            return stopped
