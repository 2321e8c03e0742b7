"""The times of a simulated run, without its tasks. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dataflow.timeline.causes.attribution import pool_waits
from dataflow.timeline.spans import POOLS, Span, Trace, covered


@dataclass
class Account:
    """Accumulates the times of a simulated run, so that memory does not grow with its length.

    Attributes:
        trace: of the run; counted spans are dropped unless the whole trace is kept.
        steps: number of steps; optional tasks (validation) may end after the training of the last one.
        begin, end: the counted interval, in seconds.
        busy_s: seconds of it in which the GPU pool works; with several pools, the mean.
        waits_s: cause -> seconds of it in which the GPU pool waits.
        stages_s: stage -> (seconds, tasks).
        work_s: pool -> seconds of GPU work that training depends on.
    """

    trace: Trace
    steps: int
    begin: float = 0.0
    end: float = 0.0
    busy_s: float = 0.0
    waits_s: dict[str, float] = field(default_factory=dict)
    stages_s: dict[str, tuple[float, int]] = field(default_factory=dict)
    work_s: dict[str, float] = field(default_factory=dict)
    _to: float | None = None

    @property
    def pools(self) -> list[str]:
        """The run's GPU pools, including those without a span in the trace."""
        return [name for name in self.trace.meta["resources"] if name in POOLS]

    def add(self, span: Span) -> None:
        """Adds a task."""
        took = span.end - span.begin
        seconds, tasks = self.stages_s.get(span.stage, (0.0, 0))
        self.stages_s[span.stage] = (seconds + took, tasks + 1)
        if not span.optional:
            self.end = max(self.end, span.end)
        # The next weight sync waits for a validation's rollout; nothing waits for that of the last step.
        if span.resource in POOLS and not (span.optional and span.step == self.steps):
            self.work_s[span.resource] = self.work_s.get(span.resource, 0.0) + took

    def leave_out(self, span: Span) -> None:
        """Restarts the count at the end of this task."""
        self.begin = span.end
        self.work_s.clear()

    def fold(self, until: float, keep: float = -math.inf) -> None:
        """Counts waits up to a time before which no further task can begin; drops tasks that ended before ``keep``."""
        begin = self.begin if self._to is None else self._to
        if until <= begin:
            return
        pools = self.pools
        for cause, seconds in pool_waits(self.trace, (begin, until), pools).items():
            self.waits_s[cause] = self.waits_s.get(cause, 0.0) + seconds
        for pool in pools:
            busy = covered(((s.begin, s.end) for s in self.trace.spans if s.resource == pool), begin, until)
            self.busy_s += busy / len(pools)
        self._to = until
        self.trace.spans[:] = [s for s in self.trace.spans if s.end >= keep]
