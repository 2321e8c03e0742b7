"""The clock of spans and reward requests: unix time that goes on evenly, whatever happens to the system's clock.

A process reads the system's clock once, and from then on adds what the monotonic clock has advanced. So a difference of
two times is a duration even if the system's clock was set meanwhile, and a trace can still be laid over other profiles.
The processes of one machine share its monotonic clock: the process that starts others hands them its :func:`anchor`, so
that they agree although the system's clock was set between their starts. A process on another machine keeps its own.
"""

from __future__ import annotations

import time
from typing import NamedTuple


class Anchor(NamedTuple):
    """Where the monotonic clock of a machine stands in unix time.

    Attributes:
        machine: names the monotonic clock, see :func:`machine`.
        offset_s: unix time minus the monotonic clock.
    """

    machine: str
    offset_s: float


def machine() -> str:
    """Returns a name of the monotonic clock that this process reads; "" where the system does not tell.

    It starts with the kernel, and a container may have one of its own (a time namespace).
    """
    import os

    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        return ""
    try:
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:  # a kernel without such namespaces
        return boot


_monotonic = time.monotonic  # looked up once: an agent reads the clock some times for each request


def _measured_s() -> float:
    """Returns unix time minus the monotonic clock; of three readings the one that was interrupted the least."""
    readings = []
    for _ in range(3):
        before, unix, after = time.monotonic(), time.time(), time.monotonic()
        readings.append((after - before, unix - after))
    return min(readings)[1]


_offset_s = _measured_s()


def now() -> float:
    """Returns the unix time in seconds; of two calls on one machine the later one never returns less."""
    return _offset_s + _monotonic()


def anchor() -> Anchor:
    """Returns this process's anchor, for processes that it starts."""
    return Anchor(machine(), _offset_s)


def adopt(other: Anchor) -> None:
    """Takes the anchor of another process, if both run on one machine. Call it before anything reads the clock."""
    global _offset_s
    if other.machine and other.machine == machine():
        _offset_s = other.offset_s
