"""What a workload says of its rewards and its validations. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dataflow.distribution import Distribution

Agent = Literal["continuous", "per-step"]
Pool = Literal["shared", "own"]


def logged_step(step: int, known: Iterable[int]) -> int:
    """Returns the logged step whose measurements a planned step takes: its own, or those of another one.

    The first logged step includes warm-up, so it never stands in for a later step.

    >>> [logged_step(step, {1, 2, 3}) for step in range(1, 7)]
    [1, 2, 3, 2, 3, 2]
    """
    first, *rest = order = sorted(known)
    if step in order or step < first:
        return max(step, first)
    rest = rest or order
    return rest[(step - 2) % len(rest)]


@dataclass(frozen=True)
class Rewards:
    """The reward service; ``latency`` is of one request, in seconds, ``concurrency`` the most requests in flight.

    Attributes:
        rpm: requests a minute at most; None for no limit.
        agent: ``continuous`` keeps all slots busy; ``per-step`` finishes one step's requests before it begins the next.
        scattered: the samples of a group are spread over the queue instead of side by side.
        steps: seconds of the requests of each logged step, group by group, which its plan takes in place of draws: a
            service is fast in one step and slow in another.
    """

    latency: Distribution
    concurrency: int
    rpm: float | None = None
    agent: Agent = "continuous"
    scattered: bool = False
    steps: Mapping[int, tuple[float, ...]] = field(default_factory=dict, hash=False)

    def latency_of(self, step: int, count: int) -> Distribution | tuple[float, ...]:
        """Returns the latency of a step's requests, or that of each if as many were logged."""
        if not self.steps:
            return self.latency
        known = self.steps[logged_step(step, self.steps)]
        return known if len(known) == count else Distribution("empirical", values=known)

    @property
    def seconds(self) -> float:
        """Seconds by which one request extends the work of the whole service."""
        each = self.latency.mean / self.concurrency
        return max(each, 60.0 / self.rpm) if self.rpm else each


@dataclass(frozen=True)
class Validation:
    """Held-out problems, generated and scored at regular steps and at the end.

    Attributes:
        every: steps from one to the next.
        samples: reward requests per validation; 0 if scoring is part of the stage's time.
        pool: ``shared`` with the training requests, at lower priority, or ``own`` servers.
        overlap: training continues during validation.
        latency: seconds of one of its requests; None for those of the training requests.
    """

    every: int
    samples: int = 0
    pool: Pool = "shared"
    overlap: bool = True
    latency: Distribution | None = None
