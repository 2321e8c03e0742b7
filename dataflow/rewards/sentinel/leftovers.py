"""Processes that user code has started and left behind: what a program was asked in a thread that was given up."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection

from dataflow.rewards.sentinel.process import descendants

_TICK_S = 0.011  # the system tells when a process began in hundredths of a second, rounded down
# What Python and torch start for all of the process, and use again.
_SHARED = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver", b"compile_worker")


def end_children(since_s: float, but: Collection[int] = ()) -> list[int]:
    """Kills the children of this process that began some seconds ago or later, and what they have started.

    Args:
        since_s: seconds before now.
        but: children to leave alone.

    Returns:
        The ids of the processes that were killed; none where the system does not tell (on other systems than Linux).
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
    """Returns the fields of a process from its state on; none if it is gone."""
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
