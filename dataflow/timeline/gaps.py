"""The times in which a run was not running, between a kill and its resume, and an axis that leaves them out. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dataflow.drawing.duration import seconds

CUT = "time in which a run was not running is cut out"
"""The sentence about the cuts of a time axis."""


@dataclass(frozen=True)
class Gap:
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

    @property
    def length(self) -> str:
        """A name for its mark.

        >>> Gap(40, 11560).length
        'not running 3 h 12 min'
        """
        return f"not running {seconds(self.seconds)}"

    @property
    def words(self) -> str:
        """A description for people.

        >>> Gap(40, 11560, step=12).words
        'not running 3 h 12 min, resumed from step 12'
        """
        resumed = self.why if self.step is None else f"resumed from step {self.step}"
        return f"{self.length}, {resumed}" if resumed else self.length


def gaps(meta: Mapping[str, Any]) -> tuple[Gap, ...]:
    """Returns the gaps that a trace's meta lists, in order of time.

    Entries that are no interval are left out. Entries that overlap or touch become one gap, with the words of the
    later: a run that was killed again before its next checkpoint resumed twice from the same one.
    """
    listed = meta.get("gaps")
    if not isinstance(listed, list | tuple):
        return ()
    given = meta.get("resumed")
    # The two lists correspond, unless one of them was edited.
    steps = list(given) if isinstance(given, list | tuple) and len(given) == len(listed) else [None] * len(listed)
    found = [gap for one, step in zip(listed, steps, strict=True) if (gap := _gap(one, step)) is not None]
    merged: list[Gap] = []
    for gap in sorted(found, key=lambda g: (g.begin, g.end)):
        if merged and gap.begin <= merged[-1].end:
            last = merged[-1]
            later = gap if gap.end >= last.end else last
            merged[-1] = replace(later, begin=last.begin)
        else:
            merged.append(gap)
    return tuple(merged)


def resumed(meta: Mapping[str, Any]) -> list[int]:
    """Returns the steps of the checkpoints from which a run resumed, in the order in which it did."""
    given = meta.get("resumed")
    return [step for step in given if _is_step(step)] if isinstance(given, list | tuple) else []


def _gap(one: Any, step: Any) -> Gap | None:
    if not isinstance(one, list | tuple) or len(one) < 2:
        return None
    begin, end, *more = one
    if not (_is_time(begin) and _is_time(end) and begin < end):
        return None
    why = more[0] if more and isinstance(more[0], str) else ""
    return Gap(float(begin), float(end), why, step if _is_step(step) else None)


def _is_time(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Axis:
    """Places times on an axis without gaps: it counts the seconds in which the run was running.

    Args:
        all_gaps: of the run, in order of time.
        begin, end: the part of the run that is shown, in seconds from its first task.
        wide: length of the mark at each cut, in seconds of the axis.

    Attributes:
        gaps: those between shown tasks.
        running: seconds in which the run was running, from begin to end.
        length: of the axis, in seconds: the running time and the marks.
    """

    def __init__(self, all_gaps: Iterable[Gap], begin: float, end: float, wide: float = 0.0) -> None:
        self.begin, self.end, self.wide = begin, end, wide
        self.gaps: Sequence[Gap] = [g for g in all_gaps if g.begin < end and g.end > begin]
        self.running = end - begin - sum(min(g.end, end) - max(g.begin, begin) for g in self.gaps)
        self.length = self.running + wide * len(self.gaps)

    def at(self, time: float) -> float:
        """Returns the position of a time, in seconds of the axis; times within a gap are placed within its mark."""
        place = time - self.begin
        for gap in self.gaps:
            begin, end = max(gap.begin, self.begin), min(gap.end, self.end)
            if time <= begin:
                break
            passed = min(time, end) - begin
            place -= passed - self.wide * passed / (end - begin)
        return place

    def after(self, running: float) -> float:
        """Returns the position of the time at which the run has been running for ``running`` seconds since begin."""
        before = sum(self.at(gap.begin) - i * self.wide < running for i, gap in enumerate(self.gaps))
        return running + before * self.wide
