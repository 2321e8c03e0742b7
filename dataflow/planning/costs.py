"""How long a workload's tasks take on the virtual clock, with the reward service modelled as a queue."""

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
"""Steps that a fit simulates; the makespan of 5,120 requests varies by under 1% from step to step."""


class WorkloadCosts(Costs):
    """The durations of a workload's tasks.

    Args:
        workload: the workload to run.
        graph: its task graph; the graph's policy decides how groups are collected.
        unlimited: give every request its own server, as for the critical path.
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
        self._latencies: tuple[int, list[float]] = (0, [])
        self.requests = 0
        self.requests_s = 0.0
        self._held: dict[RewardService, Delivery] = {}
        self.validation = service() if validation is not None and validation.pool == "own" else self.service

    @property
    def load_s(self) -> float:
        """Least seconds that the service needs for the training requests so far, with all slots busy."""
        spec = self.workload.rewards
        rated = (self.requests - max(1.0, spec.rpm / 60.0)) * 60.0 / spec.rpm if spec.rpm else 0.0
        return max(self.requests_s / spec.concurrency, rated)

    def begin(self, task: Task, now: float = 0.0) -> float:
        """Returns when the work of a task dispatched at ``now`` begins."""
        return now + self.workload.dispatch_s.get(task.id.stage, 0.0)

    def start(self, task: Task, groups: tuple[int, ...] | None, now: float) -> End | None:
        """Returns when the task ends; None for a task that waits for rewards."""
        load, i = self.workload, task.id
        begin = self.begin(task, now)
        roles = load.roles
        if i.stage == roles.collect:
            count = task.take or load.prompts
            self.service.wait(i.step, (i, begin), count, by_index=self.graph.order == "index")
            return None
        if i.stage == roles.score and load.validation is not None and load.validation.samples:
            key = f"val:{i.step}"
            # Lower priority than any training step.
            self.validation.submit(key, begin, load.val_requests(i.step), (1, i.step))
            self.validation.wait(key, (i, begin), load.validation.samples)
            return None
        end = begin + load.seconds(i.stage, i.step, i.part, i.parts)
        if i.stage == roles.request:
            requested = range(load.prompts) if groups is None else groups
            if self._latencies[0] != i.step:
                # Once per step, although a streaming rollout requests one chunk at a time.
                self._latencies = (i.step, load.latencies(i.step))
            samples = load.requests(i.step, requested, self._latencies[1])
            self.requests += len(samples)
            self.requests_s += sum(seconds for _group, seconds in samples)
            self.service.submit(i.step, end, samples, (0, i.step))
        if task.stage.collects:
            return End(end, begin, groups=groups)
        return End(end, begin, chunks=chunks_of(task, load.prompts, begin, end, load.ends))

    def advance(self, until: float) -> tuple[TaskId, End] | None:
        """Returns the next task whose rewards are complete by ``until``; None if there is none."""
        limit = until
        for service in dict.fromkeys((self.validation, self.service)):
            if service not in self._held and (found := service.advance(limit)):
                self._held[service] = found
            if service in self._held:
                # Serve nothing past a delivery: it may lead to new requests.
                limit = min(limit, self._held[service].at)
        if not self._held:
            return None
        service = min(self._held, key=lambda s: self._held[s].at)
        i, begin = self._held[service].waiter
        at = max(self._held[service].at, begin)
        if self._held[service].at > until:
            return None
        groups = self._held.pop(service).groups
        return i, End(at, begin, groups if i.stage == self.workload.roles.collect else None)


def makespan(rewards: Rewards, groups: int, responses: int, seed: int = 0, runs: int = FIT_RUNS) -> float:
    """Returns the mean seconds from a step's first request to its last reward, without other requests."""
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
    """Returns the latency scaled so that a step's rewards take ``seconds`` from first request to last reward.

    Raises:
        ConfigError: the limit of requests a minute makes that impossible with any latency.
    """
    distribution = rewards.latency
    for _ in range(8):
        # Without a limit of requests a minute the makespan is proportional to the latency, so that one round is enough.
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
