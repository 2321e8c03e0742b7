"""Downtimes, in which a run was not running, from a kill to its resume, and an axis that leaves them out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
        why: how the run resumed, in words.
        step: of the checkpoint from which it resumed.
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
        return self.length if self.step is None else f"{self.length}, resumed from step {self.step}"


def downtimes(meta: Mapping[str, Any]) -> tuple[Downtime, ...]:
    """Returns the downtimes that a trace's meta lists, in order of time.

    Those that overlap or touch become one, with the words of the later: a run that was killed again before its next
    checkpoint resumed twice from the same one.
    """
    listed = zip(meta.get("gaps") or (), meta.get("resumed") or (), strict=True)
    found = [Downtime(begin, end, why, step) for (begin, end, why), step in listed]
    merged: list[Downtime] = []
    for down in sorted(found, key=lambda down: (down.begin, down.end)):
        if merged and down.begin <= merged[-1].end:
            merged[-1] = replace(max(down, merged[-1], key=lambda d: d.end), begin=merged[-1].begin)
        elif down.begin < down.end:
            merged.append(down)
    return tuple(merged)


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
        self.downtimes = [down for down in all_downtimes if down.within(begin, end)]
        self.running = end - begin - sum(min(d.end, end) - max(d.begin, begin) for d in self.downtimes)
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
