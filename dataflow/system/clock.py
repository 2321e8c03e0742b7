"""The clock of spans and reward requests: unix time that advances evenly even if the system's clock is set.

A process reads the system's clock once and then adds the advance of the monotonic clock. So a difference of two times
is a duration, and traces can be compared with other profiles.
"""

from __future__ import annotations

import time

_monotonic = time.monotonic  # bound once, as an agent reads the clock several times per request
_offset_s = time.time() - time.monotonic()


def now() -> float:
    """Returns the unix time in seconds; it never decreases in a process."""
    return _offset_s + _monotonic()
