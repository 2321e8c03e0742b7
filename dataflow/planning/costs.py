"""Cost models: how long a workload's tasks take on the virtual clock, with the reward service as a queue."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from dataflow.distribution import Distribution
from dataflow.errors import ConfigError
from dataflow.executors.virtual import Costs, End, chunks_of
from dataflow.graph import Task, TaskGraph, TaskId
from dataflow.planning.reward_service import Delivery, RewardService
from dataflow.planning.workload import Rewards, Workload

FIT_RUNS = 40
"""Steps that a fit simulates: the makespan of 5,120 requests varies by under 1% from step to step."""


class WorkloadCosts(Costs):
    """What a workload's tasks cost.

    Args:
        workload: whose.
        graph: that is run; its policy decides how groups are collected.
        unlimited: as if every request had a server of its own: the critical path of the rewards.
    """

    def __init__(self, workload: Workload, graph: TaskGraph, unlimited: bool = False) -> None:
        self.workload = workload
        self.graph = graph
        spec, validation = workload.rewards, workload.validation
        per_step = spec.agent == "per-step" and not unlimited

        def service() -> RewardService:
            if unlimited:
                return RewardService(None)
            return RewardService(spec.concurrency, spec.rpm, per_step)

        self.service = service()
        self._drawn: tuple[int, list[float]] = (0, [])
        self.requests = 0
        self.requests_s = 0.0
        self._held: dict[RewardService, Delivery] = {}
        self.validation = service() if validation is not None and validation.pool == "own" else self.service

    @property
    def load_s(self) -> float:
        """Seconds that the service needs at least for the training requests so far, all its slots busy."""
        spec = self.workload.rewards
        rated = (self.requests - max(1.0, spec.rpm / 60.0)) * 60.0 / spec.rpm if spec.rpm else 0.0
        return max(self.requests_s / spec.concurrency, rated)

    def begin(self, task: Task, now: float = 0.0) -> float:
        """Returns when the work of a task that starts at ``now`` begins."""
        return now + self.workload.dispatch_s.get(task.id.stage, 0.0)

    def start(self, task: Task, groups: tuple[int, ...] | None, now: float) -> End | None:
        """Returns when the task ends; None for one that waits for rewards."""
        load, i = self.workload, task.id
        begin = self.begin(task, now)
        roles = load.roles
        if i.stage == roles.collect:
            count = task.take or load.prompts
            self.service.wait(i.step, (i, begin), count, by_index=self.graph.order == "index")
            return None
        if i.stage == roles.score and load.validation is not None and load.validation.samples:
            key = f"val:{i.step}"
            # Behind every training step.
            self.validation.submit(key, begin, load.val_requests(i.step), (1, i.step))
            self.validation.wait(key, (i, begin), load.validation.samples)
            return None
        end = begin + load.seconds(i.stage, i.step, i.part, i.parts)
        if i.stage == roles.request:
            asked = range(load.prompts) if groups is None else groups
            if self._drawn[0] != i.step:
                # Once a step, though a streaming rollout asks for it piece by piece.
                self._drawn = (i.step, load.latencies(i.step))
            samples = load.requests(i.step, asked, self._drawn[1])
            self.requests += len(samples)
            self.requests_s += sum(seconds for _group, seconds in samples)
            self.service.submit(i.step, end, samples, (0, i.step))
        return End(end, begin, chunks=chunks_of(task, load.prompts, begin, end, load.ends))

    def advance(self, until: float) -> tuple[TaskId, End] | None:
        """Returns the next task that its rewards have come for."""
        limit = until
        for service in dict.fromkeys((self.validation, self.service)):
            if service not in self._held and (found := service.advance(limit)):
                self._held[service] = found
            if service in self._held:
                # Nothing is served past a delivery: it may bring new requests.
                limit = min(limit, self._held[service].at)
        if not self._held:
            return None
        service = min(self._held, key=lambda s: self._held[s].at)
        i, begin = self._held[service].who
        at = max(self._held[service].at, begin)
        if self._held[service].at > until:
            return None
        groups = self._held.pop(service).groups
        return i, End(at, begin, groups if i.stage == self.workload.roles.collect else None)


def makespan(rewards: Rewards, groups: int, responses: int, seed: int = 0, runs: int = FIT_RUNS) -> float:
    """Returns the mean seconds from a step's request to its last reward, with nothing else to serve."""
    total = 0.0
    for run in range(runs):
        service = RewardService(rewards.concurrency, rewards.rpm)
        drawn = rewards.latency.draws(Random(f"{seed}/fit/{run}"), groups * responses)
        service.submit(0, 0.0, [(n // responses, s) for n, s in enumerate(drawn)])
        service.wait(0, None, groups)
        found = service.advance(float("inf"))
        assert found is not None
        total += found.at
    return total / runs


def fit_latency(rewards: Rewards, groups: int, responses: int, seconds: float, seed: int = 0) -> Distribution:
    """Returns the latencies, stretched so that a step's rewards take ``seconds`` from request to last reward.

    Raises:
        ConfigError: the service cannot be that fast, whatever the latency (its limit of requests a minute).
    """
    distribution = rewards.latency
    for _ in range(8):
        # Without a limit of requests a minute the makespan is proportional to the latency: one round does.
        took = makespan(replace(rewards, latency=distribution), groups, responses, seed)
        if abs(took / seconds - 1) < 1e-4:
            return distribution
        distribution = distribution.scaled(seconds / took)
    if makespan(replace(rewards, latency=distribution), groups, responses, seed) > seconds * 1.02:
        count = groups * responses
        raise ConfigError(
            f"reward.rpm={rewards.rpm:g}: {count} requests a step cannot be answered in the {seconds:.0f} s that the "
            "log waited; give a higher limit or leave it out."
        )
    return distribution
