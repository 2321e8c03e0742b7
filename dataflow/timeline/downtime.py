"""Downtimes, in which a run was not running, from a kill to its resume, and an axis that leaves them out. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dataflow.drawing.duration import seconds

CUT = "time in which a run was not running is cut out"
"""The sentence about the cuts of a time axis."""


@dataclass(frozen=True)
class Downtime:
    """An interval in which a run was not running.

    Attributes:
        begin, end: seconds from the run's first task: the end of the last task that the run kept, and the resume.
        why: how the run resumed, in words; "" if the trace does not say.
        step: of the checkpoint from which it resumed; None if the trace does not say.
    """

    begin: float
    end: float
    why: str = ""
    step: int | None = None

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin

    def within(self, begin: float, end: float) -> bool:
        """Whether a part of it is within ``begin..end``."""
        return self.begin < end and self.end > begin

    @property
    def length(self) -> str:
        """A name for its mark.

        >>> Downtime(40, 11560).length
        'not running 3 h 12 min'
        """
        return f"not running {seconds(self.seconds)}"

    @property
    def words(self) -> str:
        """A description for people.

        >>> Downtime(40, 11560, step=12).words
        'not running 3 h 12 min, resumed from step 12'
        """
        resumed = self.why if self.step is None else f"resumed from step {self.step}"
        return f"{self.length}, {resumed}" if resumed else self.length


def downtimes(meta: Mapping[str, Any]) -> tuple[Downtime, ...]:
    """Returns the downtimes that a trace's meta lists, in order of time.

    Entries that are no interval are left out. Entries that overlap or touch become one downtime, with the words of the
    later: a run that was killed again before its next checkpoint resumed twice from the same one.
    """
    listed = meta.get("gaps")
    if not isinstance(listed, list | tuple):
        return ()
    given = meta.get("resumed")
    # The two lists correspond, unless one of them was edited.
    steps = list(given) if isinstance(given, list | tuple) and len(given) == len(listed) else [None] * len(listed)
    found = [down for one, step in zip(listed, steps, strict=True) if (down := _downtime(one, step)) is not None]
    merged: list[Downtime] = []
    for down in sorted(found, key=lambda g: (g.begin, g.end)):
        if merged and down.begin <= merged[-1].end:
            last = merged[-1]
            later = down if down.end >= last.end else last
            merged[-1] = replace(later, begin=last.begin)
        else:
            merged.append(down)
    return tuple(merged)


def resumed(meta: Mapping[str, Any]) -> list[int]:
    """Returns the steps of the checkpoints from which a run resumed, in the order in which it did."""
    given = meta.get("resumed")
    return [step for step in given if _is_step(step)] if isinstance(given, list | tuple) else []


def _downtime(one: Any, step: Any) -> Downtime | None:
    if not isinstance(one, list | tuple) or len(one) < 2:
        return None
    begin, end, *more = one
    if not (_is_time(begin) and _is_time(end) and begin < end):
        return None
    why = more[0] if more and isinstance(more[0], str) else ""
    return Downtime(float(begin), float(end), why, step if _is_step(step) else None)


def _is_time(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Axis:
    """Places times on an axis without downtimes: it counts the seconds in which the run was running.

    Args:
        all_downtimes: of the run, in order of time.
        begin, end: the part of the run that is shown, in seconds from its first task.
        wide: length of the mark at each cut, in seconds of the axis.

    Attributes:
        downtimes: those between shown tasks.
        running: seconds in which the run was running, from begin to end.
        length: of the axis, in seconds: the running time and the marks.
    """

    def __init__(self, all_downtimes: Iterable[Downtime], begin: float, end: float, wide: float = 0.0) -> None:
        self.begin, self.end, self.wide = begin, end, wide
        self.downtimes: Sequence[Downtime] = [g for g in all_downtimes if g.within(begin, end)]
        self.running = end - begin - sum(min(g.end, end) - max(g.begin, begin) for g in self.downtimes)
        self.length = self.running + wide * len(self.downtimes)

    def at(self, time: float) -> float:
        """Returns the position of a time, in seconds of the axis; one within a downtime is placed within its mark."""
        place = time - self.begin
        for down in self.downtimes:
            begin, end = max(down.begin, self.begin), min(down.end, self.end)
            if time <= begin:
                break
            passed = min(time, end) - begin
            place -= passed - self.wide * passed / (end - begin)
        return place

    def after(self, running: float) -> float:
        """Returns the position of the time at which the run has been running for ``running`` seconds since begin."""
        before = sum(self.at(down.begin) - i * self.wide < running for i, down in enumerate(self.downtimes))
        return running + before * self.wide
