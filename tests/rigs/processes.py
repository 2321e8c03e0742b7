"""The processes that a test looks at, any of which may end between two looks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import psutil


def below(root: psutil.Process | None = None) -> list[psutil.Process]:
    """Returns what a process has started, and what that has started; this process's by default."""
    return (root or psutil.Process()).children(recursive=True)


def command(process: psutil.Process) -> list[str]:
    """Returns the words of a process's command line; none if it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def commanded(word: str, timeout: float = 10.0) -> list[psutil.Process]:
    """Waits until processes below this one have a word in their command, and returns them; none after ``timeout``.

    A process that was started a moment ago has no command line yet.
    """

    def found() -> list[psutil.Process]:
        return [each for each in below() if word in command(each)]

    until(found, timeout)
    return found()


def environment(process: psutil.Process) -> dict[str, str]:
    """Returns the environment of a process; empty if it has ended."""
    try:
        return process.environ()
    except psutil.NoSuchProcess:
        return {}


def marked(name: str, value: str) -> Iterator[psutil.Process]:
    """Yields the processes of this machine that have this environment variable, whoever started them."""
    for process in psutil.process_iter():
        try:
            if environment(process).get(name) == value:
                yield process
        except psutil.AccessDenied:
            continue  # another user's


def until(true: Callable[[], object], timeout: float) -> bool:
    """Waits until something that no event tells of is true; returns False after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def left(processes: Iterable[psutil.Process | int], timeout: float) -> list[str]:
    """Waits until these have ended; returns the commands of those that have not after ``timeout`` seconds.

    Args:
        processes: or their ids.
        timeout: in seconds, for all of them.
    """
    there = []
    for each in processes:
        try:
            there.append(psutil.Process(each) if isinstance(each, int) else each)
        except psutil.NoSuchProcess:
            continue
    _gone, alive = psutil.wait_procs(there, timeout=timeout)
    return [" ".join(command(each)) or str(each) for each in alive if not _ended(each)]


def _ended(process: psutil.Process) -> bool:
    """Returns whether a process does nothing any more, even if its parent has not asked for its exit code."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
