"""Ends the processes that abandoned calls of user code have started."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection

from dataflow.usercode.sentinel.process import descendants

_TICK_S = 0.011  # start times of processes are in hundredths of a second, rounded down
# Helpers of Python and torch that the whole process shares.
_SHARED = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver", b"compile_worker")


def end_children(since_s: float, but: Collection[int] = ()) -> list[int]:
    """Kills the children of this process that started within the last ``since_s`` seconds, and their descendants.

    Args:
        since_s: seconds before now.
        but: ids of children to spare.

    Returns:
        The ids of the killed processes; on other systems than Linux always none.
    """
    if sys.platform != "linux":
        return []
    begin_s = time.clock_gettime(time.CLOCK_BOOTTIME) - since_s
    killed = []
    for child in _children():
        if child in but or _started_s(child) < begin_s - _TICK_S or any(name in _command(child) for name in _SHARED):
            continue
        for pid in [child, *descendants(child)]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
    return killed


def _children() -> list[int]:
    mine = [str(os.getpid())]
    return [int(name) for name in filter(str.isdigit, os.listdir("/proc")) if _stat(int(name))[1:2] == mine]


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the state on; none if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _started_s(pid: int) -> float:
    fields = _stat(pid)
    return int(fields[19]) / os.sysconf("SC_CLK_TCK") if len(fields) > 19 and fields[0] != "Z" else float("-inf")


def _command(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""
