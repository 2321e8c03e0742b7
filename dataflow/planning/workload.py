"""A workload: a training job independent of the scheduling policy. The planner runs it on the virtual clock.

Pure: times are measured or drawn from distributions, with random generators seeded by the workload's seed.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from random import Random
from typing import Literal, NamedTuple

from dataflow.config.placement import Placement, placed
from dataflow.distribution import Distribution
from dataflow.graph import Carried, Latest, Pipeline, Stage, stage
from dataflow.planning.reward_service import Places, Requests, places_of
from dataflow.policy import SchedulingPolicy
from dataflow.timeline.spans import POOLS

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


@dataclass(frozen=True)
class Roles:
    """The stages that send reward requests, collect them and score a validation; None if there is none."""

    request: str | None
    collect: str | None
    """Of the agent whose groups form the parts; so is ``request``."""
    score: str | None
    """The validation's, scored by that agent."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Of the other agents, the stage that sends requests by the stage that collects them."""

    @classmethod
    def of(cls, pipeline: Pipeline) -> Roles:
        """Returns the roles of a pipeline's stages; a validation is scored on the resource that collects rewards.

        A collecting stage to which nothing sends requests is no agent: it takes its measured time.
        """
        collector = pipeline.collector
        # Requests to a reward model on the GPUs of the engine end in the time of the stage that sends them.
        pools = {s.on for s in pipeline.with_role("samples")}
        asking = [s for s in pipeline.with_role("requests") if s.on not in pools]
        first = asking[0].name if asking else None
        if collector is None or first is None:
            return cls(first, None, None)
        if any(_feeds(r, collector) for r in pipeline.with_role("requests") if r not in asking):
            return cls(None, None, None)
        of = {s.name: next((r.name for r in asking if _feeds(r, s)), None) for s in pipeline.collectors}
        score = next((s.name for s in pipeline.with_role("validates") if s.on == collector.on), None)
        beside = {name: request for name, request in of.items() if request is not None and name != collector.name}
        return cls(of[collector.name] or first, collector.name, score, beside)


def _feeds(request: Stage, collector: Stage) -> bool:
    return not {read.field for read in collector.reads}.isdisjoint(request.writes)


@dataclass(frozen=True)
class Measured:
    """Logged seconds of a stage's tasks, of each part of each step in which the stage ran."""

    steps: Mapping[int, tuple[float, ...]]

    @cached_property
    def _order(self) -> list[int]:
        return sorted(self.steps)

    def seconds(self, step: int, part: int, parts: int) -> float:
        """Returns the seconds of one task; a step that was not logged takes the time of one that was.

        If the logged step had another number of parts, its total is split evenly.
        """
        known = self.steps[step if step in self.steps else logged_step(step, self._order)]
        return known[part] if len(known) == parts else math.fsum(known) / parts

    @property
    def mean(self) -> float:
        """Mean seconds per step, all parts together."""
        return math.fsum(map(math.fsum, self.steps.values())) / len(self.steps)


@dataclass(frozen=True)
class Modelled:
    """Seconds of a stage per step, all parts together, drawn from a distribution."""

    distribution: Distribution

    def seconds(self, name: str, step: int, parts: int, seed: int) -> float:
        """Returns the seconds of one task; a step takes the same time under every policy."""
        if self.distribution.kind == "constant":
            return self.distribution.mean / parts
        return self.distribution.draw(Random(f"{seed}/{name}/{step}")) / parts

    @property
    def mean(self) -> float:
        """Mean seconds per step, all parts together."""
        return self.distribution.mean


StageTime = Measured | Modelled


class Logged(NamedTuple):
    """A source's own run: how long its steps took, and the policy; None if it changed during the run."""

    policy: str
    seconds: float
    steps: int
    under: SchedulingPolicy | None


@dataclass(frozen=True)
class Workload:
    """One training job.

    Attributes:
        pipeline: its stages; their functions are never called.
        prompts, responses, mini_batches: groups in a step, samples in a group, and optimizer steps in a step.
        rewards: the reward service; of several agents, that of the one whose groups form the parts.
        beside: the services of the other agents, by the stage that collects their rewards.
        dispatch_s: stage -> seconds from when a task is ready until its worker begins; 0 for stages left out.
        ends: the share of a rollout's time after which each of its groups ends, in order; () for even spacing.
        uncounted: leave the rollouts of the first ``max_staleness`` steps out of the total, as verl's logs do.
        assumptions: sentences on values that the source does not contain.
        ran_with: the source's own reward service, as keys; "" for costs by hand.
        logged: the source's own run; None if its time is not known.
        loop: the source's own run, where that differs: keys change what is planned, and verl's loop stops for
            validations and checkpoints.
    """

    source: str
    pipeline: Pipeline
    steps: int
    prompts: int
    responses: int
    mini_batches: int
    times: Mapping[str, StageTime]
    rewards: Rewards
    validation: Validation | None = None
    beside: Mapping[str, Rewards] = field(default_factory=dict)
    dispatch_s: Mapping[str, float] = field(default_factory=dict)
    ends: tuple[float, ...] = ()
    uncounted: bool = False
    assumptions: tuple[str, ...] = ()
    ran_with: str = ""
    logged: Logged | None = None
    loop: Workload | None = None
    seed: int = 0

    @cached_property
    def roles(self) -> Roles:
        """The stages that use the reward service."""
        return Roles.of(self.pipeline)

    @property
    def measured_steps(self) -> int:
        """Number of steps whose times were measured; 0 if they are drawn from distributions."""
        return max((len(time.steps) for time in self.times.values() if isinstance(time, Measured)), default=0)

    @cached_property
    def agents(self) -> dict[str, str]:
        """The reward agents: the stage that collects, by name of the agent; the first forms the parts.

        An agent has the name of its resource, or that of the stage if another one collects there as well.
        """
        found: dict[str, str] = {}
        for collect in (self.roles.collect, *self.beside):
            if collect is not None:
                on = self.pipeline.by_name[collect].on
                found[collect if on in found else on] = collect
        return found or {"reward": ""}

    def service_of(self, agent: str) -> Rewards:
        """Returns the reward service of an agent."""
        return self.beside.get(self.agents[agent], self.rewards)

    def with_service(self, agent: str, rewards: Rewards) -> Workload:
        """Returns the workload with another reward service of an agent."""
        collect = self.agents[agent]
        if collect in self.beside:
            return replace(self, beside={**self.beside, collect: rewards})
        return replace(self, rewards=rewards)

    def placed(self, placement: Placement) -> Workload:
        """Returns the workload with engine and trainer on the same or on separate GPUs; stage times stay."""
        said = f"placement={placement}: each stage takes as long as it did, wherever the engine samples."
        pipeline = placed(self.pipeline, placement)
        return replace(self, pipeline=pipeline, assumptions=(*self.assumptions, said), logged=None, loop=None)

    def work_s(self) -> dict[str, float]:
        """GPU seconds of each stage per step; a stage that does not run every step counts its average.

        If engine and trainer have separate pools, the numbers are those of the busier pool.
        """
        of = {s.on: [each for each in self.pipeline.stages if each.on == s.on] for s in self.pipeline.stages}
        shares = [
            {s.name: self.times[s.name].mean / (s.every or 1) for s in stages if s.name in self.times}
            for pool, stages in of.items()
            if pool in POOLS
        ]
        return max(shares, key=lambda share: math.fsum(share.values()), default={})

    def mean_s(self) -> float:
        """GPU seconds per step."""
        return math.fsum(self.work_s().values())

    def seconds(self, name: str, step: int, part: int, parts: int) -> float:
        """Returns the seconds of one task of a stage other than those that wait for rewards."""
        time = self.times.get(name)
        if time is None:
            return 0.0
        if isinstance(time, Measured):
            return time.seconds(step, part, parts)
        return time.seconds(name, step, parts, self.seed)

    def latencies(self, step: int, agent: str = "reward") -> Sequence[float]:
        """Returns the seconds of all requests of a step to an agent, group by group; the same under every policy."""
        count, seed = self.prompts * self.responses, f"{self.seed}/{agent}/{step}"
        latency = self.beside.get(self.agents.get(agent, ""), self.rewards).latency_of(step, count)
        if isinstance(latency, tuple):
            return latency
        return _drawn(latency, seed, count)

    def requests(self, step: int, groups: Sequence[int], agent: str = "reward") -> Requests:
        """Returns the requests of some groups of a step to an agent; ``groups`` is a range or a tuple."""
        drawn = self.latencies(step, agent)
        samples, places = _sent(groups, self.responses, f"{self.seed}/order/{step}" if self.rewards.scattered else "")
        return Requests([drawn[sample] for sample in samples], places)

    def val_requests(self, step: int) -> Requests:
        """Returns a validation's reward requests, each a group of its own."""
        assert self.validation is not None
        count, latency = self.validation.samples, self.validation.latency or self.rewards.latency
        return Requests(_drawn(latency, f"{self.seed}/validation/{step}", count), places_of(range(count)))


@lru_cache(maxsize=512)
def _drawn(latency: Distribution, seed: str, count: int) -> array[float]:
    """Draws latencies; the simulations of a plan have them in common."""
    return array("d", latency.draws(Random(seed), count))


@lru_cache(maxsize=4096)
def _sent(groups: Sequence[int], each: int, seed: str) -> tuple[array[int], Places]:
    """Returns the samples of some groups in the order they are sent, by a seed if any, and where each group's are."""
    samples = [group * each + at for group in groups for at in range(each)]
    if seed:
        draw = Random(seed).random
        drawn = [draw() for _ in samples]
        samples = [samples[at] for at in sorted(range(len(samples)), key=drawn.__getitem__)]
    return array("q", samples), places_of(sample // each for sample in samples)


# --- the stages of GRPO and PPO as the planner models them: those of pipelines/ without engines -----------------------


@stage(writes="responses", on="gpu", role="samples", streams=True)
def rollout(prompts: object, weights_version: Carried) -> None: ...


@stage(writes="reward_ticket", on="controller", role="requests", per_chunk=True)
def reward_request(responses: object) -> None: ...


@stage(writes="old_log_probs", on="gpu")
def old_log_prob(responses: object, actor: Latest) -> None: ...


@stage(writes="ref_log_probs", on="gpu")
def ref_log_prob(responses: object) -> None: ...


@stage(writes="values", on="gpu")
def values(responses: object, critic: Latest) -> None: ...


@stage(writes="rewards", on="reward", role="collects")
def reward_collect(reward_ticket: object) -> None: ...


@stage(writes="advantages", on="controller", splittable=True)
def advantage(responses: object, rewards: object) -> None: ...


@stage(writes="actor", on="gpu", role="trains", per_mini_batch=True)
def actor_update(responses: object, old_log_probs: object, advantages: object, actor: Latest) -> None: ...


@stage(writes="critic", on="gpu", role="trains", per_mini_batch=True)
def critic_update(responses: object, values: object, advantages: object, critic: Latest) -> None: ...


@stage(writes="actor_weights", on="gpu", role="syncs")
def gather_weights(actor: object) -> None:
    """Takes no time: logs have one for both. After it the trainer goes on, also while the engine still samples."""


@stage(writes="weights_version", on="gpu", role="syncs")
def sync_weights(actor_weights: object) -> None: ...


@stage(writes="val_responses", on="gpu", role="validates")
def val_rollout(weights_version: object) -> None: ...


@stage(writes="val_scores", on="reward", role="validates")
def val_score(val_responses: object) -> None: ...


@stage(on="gpu", role="saves")
def checkpoint(actor: object) -> None: ...


@stage(writes="turn", on="controller")
def end_step(actor: object) -> None:
    """Ends a step of a loop that validates and saves before it continues; the next step reads ``turn``."""


STAGES = (
    rollout, reward_request, old_log_prob, ref_log_prob, values, reward_collect, advantage, actor_update, critic_update,
    sync_weights, val_rollout, val_score, checkpoint,
)  # fmt: skip
TIMED = [s.name for s in STAGES if s.on != "reward"]
"""Stages that take time of their own."""
CRITIC = (values.name, critic_update.name)
"""The stages of a critic, which only some pipelines have."""
_BESIDE = ("old_log_prob", "ref_log_prob", "values")
"""Stages that need no rewards."""


def after_rewards(pipeline: Pipeline) -> Pipeline:
    """Returns the pipeline of a loop that begins its log-probs once it has all rewards of the step."""
    stages = [s.bind(after=[*s.after, reward_collect.name]) if s.name in _BESIDE else s for s in pipeline.stages]
    return Pipeline(stages, inputs=pipeline.inputs, resources=pipeline.resources)


def grpo(
    reference: bool = True,
    validation: Validation | None = None,
    checkpoint_every: int | None = None,
    *,
    critic: bool = False,
    bypass: bool = False,
    stops: bool = False,
) -> Pipeline:
    """Returns the stages of a GRPO step, or of one of PPO with a critic.

    Args:
        validation: without its ``overlap``, it and the checkpoints stop training, as in verl's loop.
        checkpoint_every: steps from one checkpoint to the next; None for no checkpoints.
        bypass: leave out the old log-probs; the update takes the rollout's own (``algorithm.bypass_mode``).
        stops: checkpoints stop training where there is no validation, too.
    """
    stops = stops if validation is None else not validation.overlap
    stages: list[Stage] = [rollout, reward_request]
    if not bypass:
        stages.append(old_log_prob)
    if reference:
        stages.append(ref_log_prob)
    stages += [values, reward_collect, advantage.also_reads("values")] if critic else [reward_collect, advantage]
    update = actor_update.bind(renamed={"old_log_probs": "responses"}) if bypass else actor_update
    stages.append(update.also_reads("ref_log_probs") if reference else update)
    if critic:
        stages.append(critic_update)
    stages += [gather_weights, sync_weights]
    if validation is not None:
        stages += [val_rollout.bind(every=validation.every), val_score.bind(every=validation.every)]
    if checkpoint_every is not None:
        stages.append(checkpoint.bind(every=checkpoint_every, after=["val_score"] if stops and validation else []))
    if stops:
        stages.append(end_step.bind(after=["sync_weights", *(s.name for s in stages if s.every)]))
        # The next rollout and log-probs (without these, the next update) wait for the end of this step.
        first = actor_update.name if bypass else old_log_prob.name
        for at, s in enumerate(stages):
            if s.role == "samples":
                stages[at] = s.also_reads("turn", "carried")
            elif s.name == first:
                stages[at] = s.also_reads("turn", "latest")
    return Pipeline(stages, inputs=["prompts"], resources={"gpu": 1, "reward": None, "controller": 1, "io": 1})
