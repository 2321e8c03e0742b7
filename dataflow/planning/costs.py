"""How long a workload's tasks take on the virtual clock, with the reward service modelled as a queue."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from dataflow.distribution import Distribution
from dataflow.errors import ConfigError
from dataflow.executors.virtual import Costs, End, chunks_of, groups_by_index
from dataflow.graph import Task, TaskGraph, TaskId
from dataflow.planning.reward_service import Delivery, Requests, RewardService
from dataflow.planning.workload import Rewards, Workload

FIT_RUNS = 40
"""Steps that a fit simulates; the makespan of 5,120 requests varies by under 1% from step to step."""


class WorkloadCosts(Costs):
    """The durations of a workload's tasks; the graph's policy decides how groups are collected.

    With ``unlimited``, every request has its own server, as for the critical path.
    """

    def __init__(self, workload: Workload, graph: TaskGraph, unlimited: bool = False) -> None:
        self.workload = workload
        self.graph = graph
        validation, roles = workload.validation, workload.roles

        def service(spec: Rewards) -> RewardService:
            if unlimited:
                return RewardService(None)
            return RewardService(spec.concurrency, spec.rpm, spec.agent == "per-step")

        self.service = service(workload.rewards)
        self._held: dict[RewardService, Delivery] = {}
        own = validation is not None and validation.pool == "own"
        self.validation = service(workload.rewards) if own else self.service
        self._agents: list[_Agent] = []
        for name, collect in workload.agents.items():
            main = collect not in workload.beside
            request = roles.request if main else roles.beside[collect]
            spec = workload.service_of(name)
            self._agents.append(_Agent(name, request, collect, spec, self.service if main else service(spec)))
        self._services = tuple(dict.fromkeys((self.validation, *(agent.service for agent in self._agents))))
        self._by_request = {agent.request: agent for agent in self._agents}
        self._by_collect = {agent.collect: agent for agent in self._agents}

    @property
    def load_s(self) -> dict[str, float]:
        """Least seconds that each agent's service needs for the training requests so far, with all slots busy."""
        return {agent.name: agent.load_s for agent in self._agents}

    def begin(self, task: Task, now: float = 0.0) -> float:
        """Returns when the work of a task dispatched at ``now`` begins."""
        return now + self.workload.dispatch_s.get(task.id.stage, 0.0)

    def start(self, task: Task, groups: tuple[int, ...] | None, now: float) -> End | None:
        """Returns when the task ends; None for a task that waits for rewards."""
        load, i = self.workload, task.id
        begin = self.begin(task, now)
        roles = load.roles
        if (agent := self._by_collect.get(i.stage)) is not None:
            if i.stage == roles.collect:
                groups = groups_by_index(task, load.prompts) if self.graph.order == "index" else None
            agent.service.wait(i.step, (i, begin), task.take or load.prompts if groups is None else groups)
            return None
        if i.stage == roles.score and load.validation is not None and load.validation.samples:
            key = f"val:{i.step}"
            # Lower priority than any training step.
            self.validation.submit(key, begin, load.val_requests(i.step), (1, i.step))
            self.validation.wait(key, (i, begin), load.validation.samples)
            return None
        end = begin + load.seconds(i.stage, i.step, i.part, i.parts)
        if (agent := self._by_request.get(i.stage)) is not None:
            agent.submit(load, i.step, range(load.prompts) if groups is None else groups, end)
        if task.stage.collects:
            # None if it forms the parts without an agent, such as a teacher.
            return End(end, begin, groups=groups_by_index(task, load.prompts) if groups is None else groups)
        return End(end, begin, chunks=chunks_of(task, load.prompts, begin, end, load.ends))

    def advance(self, until: float) -> tuple[TaskId, End] | None:
        """Returns the next task whose rewards are complete by ``until``; None if there is none."""
        limit = until
        for service in self._services:
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
        return i, End(at, begin, groups if i.stage in self._by_collect else None)


@dataclass
class _Agent:
    """A reward agent on the virtual clock; its training requests so far take ``requests_s`` of service."""

    name: str
    request: str | None
    collect: str
    spec: Rewards
    service: RewardService
    requests: int = 0
    requests_s: float = 0.0

    @property
    def load_s(self) -> float:
        """Least seconds that the service needs for the requests, with all slots busy."""
        rpm = self.spec.rpm
        rated = (self.requests - max(1.0, rpm / 60.0)) * 60.0 / rpm if rpm else 0.0
        return max(self.requests_s / self.spec.concurrency, rated)

    def submit(self, load: Workload, step: int, groups: Sequence[int], at: float) -> None:
        """Sends the requests of some groups of a step."""
        requests = load.requests(step, groups, self.name)
        self.requests += len(requests.seconds)
        self.requests_s += sum(requests.seconds)
        self.service.submit(step, at, requests, (0, step))


@functools.lru_cache(maxsize=64)
def makespan(rewards: Rewards, groups: int, responses: int, seed: int = 0, runs: int = FIT_RUNS) -> float:
    """Returns the mean seconds from a step's first request to its last reward, without other requests."""
    total, count = 0.0, groups * responses
    for run in range(runs):
        drawn = rewards.latency.draws(Random(f"{seed}/fit/{run}"), count)
        service = RewardService(min(rewards.concurrency, count), rewards.rpm)
        service.submit(run, 0.0, Requests(drawn, {count - 1: (0, range(count))}))
        service.wait(run, None, 1)
        found = service.advance(math.inf)
        assert found is not None
        total += found.at
    return total / runs


@functools.lru_cache(maxsize=16)
def fit_latency(rewards: Rewards, groups: int, responses: int, seconds: float, seed: int = 0) -> Distribution:
    """Returns the latency scaled so that a step's rewards take ``seconds`` from first request to last reward.

    ConfigError if the limit of requests a minute makes that impossible with any latency, or the latency is 0.
    """
    distribution = rewards.latency
    if not distribution.mean:
        raise ConfigError(
            f"log.latency: a latency of 0 cannot be scaled to the {seconds:.0f} s that the log waited; leave it out, "
            "or give reward.latency=0 to plan with it."
        )
    for _ in range(8):
        took = makespan(replace(rewards, latency=distribution), groups, responses, seed)
        if abs(took / seconds - 1) < 1e-4:
            return distribution
        distribution = distribution.scaled(seconds / took)
        if rewards.rpm is None:
            # The makespan is proportional to the latency.
            return distribution
    if makespan(replace(rewards, latency=distribution), groups, responses, seed) > seconds * 1.02:
        count = groups * responses
        raise ConfigError(
            f"log.rpm={rewards.rpm:g}: {count} requests a step cannot be answered in the {seconds:.0f} s that the "
            "log waited; give a higher limit or leave it out."
        )
    return distribution
