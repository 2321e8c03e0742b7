"""The clock of spans and reward requests: unix time that advances evenly even if the system's clock is set.

A process reads the system's clock once and then adds the advance of the monotonic clock. So a difference of two times
is a duration, and traces can be compared with other profiles. The processes of one machine share its monotonic clock: a
process passes its :func:`anchor` to those that it starts, so that they agree even if the system's clock is set between
their starts. A process on another machine uses its own.
"""

from __future__ import annotations

import time
from typing import NamedTuple


class Anchor(NamedTuple):
    """The offset of a machine's monotonic clock to unix time.

    Attributes:
        machine: identifies the monotonic clock, see :func:`machine`.
        offset_s: unix time minus the monotonic clock.
    """

    machine: str
    offset_s: float


def machine() -> str:
    """Returns an identifier of this process's monotonic clock; "" if the system provides none.

    The clock starts with the kernel; a container may have its own (a time namespace).
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


_monotonic = time.monotonic  # bound once, as an agent reads the clock several times per request


def _measured_s() -> float:
    """Returns unix time minus the monotonic clock, from the fastest of three readings."""
    readings = []
    for _ in range(3):
        before, unix, after = time.monotonic(), time.time(), time.monotonic()
        readings.append((after - before, unix - after))
    return min(readings)[1]


_offset_s = _measured_s()


def now() -> float:
    """Returns the unix time in seconds; it never decreases on one machine."""
    return _offset_s + _monotonic()


def anchor() -> Anchor:
    """Returns this process's anchor, to be passed to processes that it starts."""
    return Anchor(machine(), _offset_s)


def adopt(other: Anchor) -> None:
    """Uses the anchor of another process if both run on one machine; call it before the first :func:`now`."""
    global _offset_s
    if other.machine and other.machine == machine():
        _offset_s = other.offset_s
