"""What the processes of a program use: memory, time, and the number of them."""

import contextlib
import os
import resource
from typing import Any


def descendants(alone: bool) -> list[int]:
    """Returns the ids of the processes below this one; in a namespace, those are all others."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if alone:
        return [pid for pid in pids if pid != os.getpid()]
    children: dict[int, list[int]] = {}
    for pid in pids:
        words = stat(pid)
        # The main thread of a process may have ended before others.
        if words and (words[0] != b"Z" or int(words[17]) > 1):
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
    found = {pid: words for pid in pids if (words := stat(pid))}
    if sum(int(words[17]) for words in found.values()) > options["threads"]:  # root may start more than the limit
        return "process_limit"
    living = [thread(pid, words) for pid, words in found.items()]
    most = options["memory_mb"] << 20
    # What processes share is in the memory of each of them, unless it is divided, which takes longer.
    return "memory_limit" if sum(map(memory, living)) > most and sum(map(part, living)) > most else ""


def thread(pid: int, words: list[bytes]) -> str:
    """Returns the folder of a thread that has the memory of a process: not of its main thread if that has ended."""
    if words[0] == b"Z":
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/task"):
                if int(name) != pid and memory(path := f"/proc/{pid}/task/{name}"):
                    return path
    return f"/proc/{pid}"


def memory(path: str) -> int:
    """Returns the bytes that a process has in memory."""
    with contextlib.suppress(OSError), open(f"{path}/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return 0


def part(path: str) -> int:
    """Returns the bytes that a process has in memory, of those that several share its part only."""
    with contextlib.suppress(OSError), open(f"{path}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) << 10
    return memory(path)


def late(options: dict[str, Any], alone: bool, spent: float) -> bool:
    """Returns whether a program has had its seconds, of which it has spent more since it was started.

    Those in which it could run, and other programs had the cores, do not count, unless its processes have used as many.
    """
    if spent >= options["latest"]:
        return True
    pids = descendants(alone)
    ticks = sum(int(each) for words in map(stat, pids) for each in words[11:15])
    used = ticks / os.sysconf("SC_CLK_TCK")
    return bool(used >= options["timeout"] or spent - waited(pids) >= options["timeout"])


def waited(pids: list[int]) -> float:
    """Returns the seconds that the thread of these processes that has waited longest for a core has."""
    longest = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or this system does not measure it
            for name in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{name}/schedstat", "rb") as file:
                    longest = max(longest, int(file.read().split()[1]))
    return longest / 1e9


def ended_by_system() -> int:
    """Returns how many processes this system has ended for want of memory."""
    with contextlib.suppress(OSError), open("/proc/vmstat", "rb") as file:
        for line in file:
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    return 0
