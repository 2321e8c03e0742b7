"""What a workload says of its rewards and its validations. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dataflow.distribution import Distribution
from dataflow.planning.servers.service_time import Servers

Agent = Literal["continuous", "per-step"]
Pool = Literal["shared", "own"]


@dataclass(frozen=True)
class Rewards:
    """The reward service.

    Attributes:
        latency: of one request, in seconds; with ``servers`` that of one alone on a server.
        concurrency: requests in flight at most.
        rpm: requests a minute at most; None for no limit.
        agent: ``continuous`` keeps all slots busy; ``per-step`` finishes one step's requests before it begins the next.
        scattered: the samples of a group are spread over the queue instead of side by side.
        servers: of the reward model that the run serves; None if the latency does not depend on the load.
    """

    latency: Distribution
    concurrency: int
    rpm: float | None = None
    agent: Agent = "continuous"
    scattered: bool = False
    servers: Servers | None = None

    @property
    def seconds(self) -> float:
        """Seconds by which one request extends the work of the whole service."""
        each = self.latency.mean / self.concurrency if self.servers is None else self.servers.seconds(self.concurrency)
        return max(each, 60.0 / self.rpm) if self.rpm else each

    def with_replicas(self, replicas: int) -> Rewards:
        """Returns the service with another number of servers."""
        assert self.servers is not None
        concurrency = replicas * self.servers.slots if self.servers.filled else self.concurrency
        return replace(self, servers=self.servers.with_replicas(replicas), concurrency=concurrency)


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
