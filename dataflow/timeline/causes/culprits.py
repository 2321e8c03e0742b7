"""What a wait was for: the task or, for rewards, the last group and what happened to its request. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataflow.errors import counted
from dataflow.timeline.agents import reward_causes_of
from dataflow.timeline.causes.attribution import Wait, exposed_waits, waits_after
from dataflow.timeline.spans import POOLS, Mark, Trace

_TASK = re.compile(r"^(?P<stage>.+)\[(?P<step>\d+)(?:\.(?P<part>\d+))?\]$")
_QUEUED_FOR = {"slot": "a free slot", "rate": "the rate limit", "pause": "the service's Retry-After"}
"""What a request queued for at the end of its time in the queue."""


@dataclass(frozen=True)
class Culprit:
    """What one wait was for.

    Attributes:
        wait: the interval.
        pool: the GPUs that waited.
        step: of the task that was waited for; None if there was none (start-up).
        request: for rewards, the last to end of the requests waited for, if the trace has it.
    """

    wait: Wait
    pool: str
    step: int | None = None
    request: Mark | None = field(default=None, hash=False)

    @property
    def words(self) -> str:
        """A description for people: ``step 12, group 17, 3 tries``."""
        if self.step is None:
            return ""
        words = [f"step {self.step}"]
        if self.request is None:
            if self.wait.cause not in ("rewards", "dispatch"):
                words.append(self.wait.by.partition("[")[0])
            return ", ".join(words)
        facts = self.request.args
        if facts.get("validation"):
            words.append("evaluation")
        if collector := facts.get("collector"):
            words.append(str(collector))
        words.append(f"group {facts.get('group')}")
        if facts.get("tries", 1) > 1:
            words.append(f"{facts['tries']} tries")
        if throttled := facts.get("throttled"):
            words.append(f"throttled {counted(throttled, 'time')}")
        if "queued_s" in facts:
            words.append(f"queued {facts['queued_s']:.1f} s")
            if (last := _QUEUED_FOR.get(facts.get("held_by", ""))) is not None:
                words[-1] += f", at last for {last}"
        if how := facts.get("how"):
            words.append(str(how))
        return ", ".join(words)

    def as_dict(self) -> dict[str, Any]:
        """Returns it JSON-able: ``seconds`` of the wait, and the facts of the request from the trace."""
        facts = {} if self.request is None else dict(self.request.args)
        wait = self.wait
        own = {"pool": self.pool, "cause": wait.cause, "seconds": wait.seconds, "begin_s": wait.begin}
        return {**own, "task": wait.task, "waited_for": wait.by, **facts, "step": self.step}


def culprits(trace: Trace, pools: Sequence[str] | None = None, *, after: bool = False) -> list[Culprit]:
    """Returns a culprit per wait of the GPUs (:func:`~.attribution.exposed_waits`), longest first.

    Args:
        trace: of a run.
        pools: of GPUs; None for all that the trace shows.
        after: whether to include waits after training, see :func:`~dataflow.timeline.causes.attribution.waits_after`.
    """
    last = _Last(trace.marks)
    collectors = dict.fromkeys(m.args["collector"] for m in trace.marks if "collector" in m.args)
    of_collector = {name: _Last(m for m in trace.marks if m.args.get("collector") == name) for name in collectors}
    evaluated, validates = last_requests(trace.marks, validation=True), trace.with_role("validates")
    asked = reward_causes_of(trace)
    found: list[Culprit] = []
    for pool in (trace.pools or POOLS[:1]) if pools is None else pools:
        for wait in [*exposed_waits(trace, pool), *(waits_after(trace, pool) if after else ())]:
            task = _TASK.match(wait.by)
            if task is None:
                found.append(Culprit(wait, pool))
                continue
            step, part = int(task["step"]), int(task["part"] or 1) - 1
            if task["stage"] in validates:
                request = evaluated.get((step, -1))
            else:
                request = of_collector.get(task["stage"], last).of(step, part)
            found.append(Culprit(wait, pool, step, request if wait.cause in asked else None))
    return sorted(found, key=lambda c: (-c.wait.seconds, c.wait.begin, c.pool))


def worst_waits(trace: Trace) -> list[dict[str, Any]]:
    """Returns the five longest waits of the GPUs, whatever their cause, JSON-able; see :meth:`Culprit.as_dict`."""
    return [c.as_dict() for c in culprits(trace)[:5]]


class _Last:
    """The last training requests to end, of all agents or of one."""

    def __init__(self, marks: Iterable[Mark]) -> None:
        self._of_part = last_requests(marks)
        self._of_step: dict[int, Mark] = {}
        for (step, _), mark in self._of_part.items():
            self._of_step[step] = max(self._of_step.get(step, mark), mark, key=lambda m: m.end)

    def of(self, step: int, part: int) -> Mark | None:
        """Returns the last one of a part; of the step, if its requests do not say to which part they belong."""
        return self._of_part.get((step, part)) or self._of_part.get((step, -1)) or self._of_step.get(step)


def last_requests(marks: Iterable[Mark], validation: bool = False) -> dict[tuple[int, int], Mark]:
    """Returns the last training request to end, by (step, part); the part is -1 if a step has a single one."""
    last: dict[tuple[int, int], Mark] = {}
    for mark in marks:
        step, part = mark.args.get("step"), mark.args.get("part", -1)
        if (
            not isinstance(step, int)
            or not isinstance(part, int)
            or bool(mark.args.get("validation")) is not validation
        ):
            continue
        if (known := last.get((step, part))) is None or mark.end > known.end:
            last[step, part] = mark
    return dict(sorted(last.items()))


def linked(trace: Trace) -> list[tuple[int, int]]:
    """Returns (step, group) of the requests that the page of a trace links to: first those that GPUs waited for."""
    waited = [c.request for c in culprits(trace, after=True) if c.request is not None]
    places = [place_of(mark) for mark in [*waited, *last_requests(trace.marks).values()]]
    return list(dict.fromkeys(place for place in places if place is not None))


def place_of(request: Mark) -> tuple[int, int] | None:
    """Returns step and group of a training request; None for one of an evaluation, or if the trace lacks them."""
    step, group = request.args.get("step"), request.args.get("group")
    if request.args.get("validation") or not isinstance(step, int) or not isinstance(group, int):
        return None
    return step, group
