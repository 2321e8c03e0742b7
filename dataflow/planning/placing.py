"""Whether a reward model had better share the GPUs of trainer and engine, or have some of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dataflow.distribution import Distribution
from dataflow.drawing.duration import figure
from dataflow.errors import ConfigError, counted
from dataflow.graph import Pipeline
from dataflow.planning.planner import FEW
from dataflow.planning.simulation.outcomes import Outcomes
from dataflow.planning.workload import Measured, Modelled, StageTime, Workload
from dataflow.policy import PRESETS, preset
from dataflow.stages.sampling.sleep import VALIDATION, awake_between, sleep_rewards, wake_rewards

POOL = "gpu"
MOST = 8
"""Divisions of the GPUs that are tried."""
_SLEEPING = {f"{prefix}{s.name}" for prefix in ("", VALIDATION) for s in (wake_rewards, sleep_rewards)}


@dataclass(frozen=True)
class Placing:
    """One way to use the GPUs.

    Attributes:
        shared: the reward model shares the GPUs of trainer and engine.
        training: GPUs of trainer and engine.
        servers: of the reward model.
        policy: the fastest.
        step_s: seconds a step under it.
    """

    shared: bool
    training: int
    servers: int
    policy: str
    step_s: float

    @property
    def words(self) -> str:
        """What it is, in a few words."""
        servers = counted(self.servers, "server")
        where = "the same GPUs as" if self.shared else "other GPUs than"
        return f"{servers} on {where} the {self.training} of training"


def placings(workload: Workload, gpus: int, outcomes: Outcomes | None = None) -> list[Placing]:
    """Returns ways to use a number of GPUs, the fastest first.

    Stages on the GPUs are assumed to take time in inverse proportion to their number.

    Raises:
        ConfigError: the workload has not one reward model on one pool of GPUs, or there are too few GPUs.
    """
    served = {agent: of for agent in workload.agents if (of := workload.service_of(agent).servers) is not None}
    if len(served) != 1 or POOL not in workload.pipeline.resources:
        raise ConfigError(
            f"gpus={gpus}: the run has {counted(len(served), 'served reward model')}"
            + ("" if POOL in workload.pipeline.resources else " and a pool of GPUs each for trainer and engine")
            + "; a plan divides the GPUs between one model and one pool; leave gpus out."
        )
    servers = next(iter(served.values()))
    if not servers.training_gpus:
        raise ConfigError(f"gpus={gpus}: the trace does not say how many GPUs the trainer had; make the run again.")
    if gpus <= servers.gpus:
        raise ConfigError(f"gpus={gpus}: a server takes {servers.gpus} and the trainer 1 or more; give more.")
    tried = _tried(workload, next(iter(served)), gpus, outcomes or Outcomes())
    return sorted(tried, key=lambda each: each.step_s)


def sentences(workload: Workload, gpus: int, outcomes: Outcomes | None = None) -> list[str]:
    """Returns what is faster for a number of GPUs, and by how much."""
    found = placings(workload, gpus, outcomes)
    shared = next(each for each in found if each.shared)
    own = next(each for each in found if not each.shared)
    best, other = (shared, own) if shared.step_s <= own.step_s else (own, shared)
    name = "placement=colocated" if best.shared else "placement=own"
    return [
        f"with {counted(gpus, 'GPU')} {name} is faster: {figure(best.step_s)} s a step ({best.policy}; {best.words}) "
        f"against {figure(other.step_s)} s ({other.policy}; {other.words}), if stages speed up as their GPUs get more."
    ]


def _tried(workload: Workload, agent: str, gpus: int, outcomes: Outcomes) -> Iterator[Placing]:
    servers = workload.service_of(agent).servers
    assert servers is not None
    each = servers.gpus
    shared = _sharing(workload, agent)
    yield _placing(shared, agent, True, gpus, gpus // each, outcomes)
    most = (gpus - 1) // each
    for replicas in range(1, most + 1, -(-most // MOST)):
        yield _placing(_apart(workload), agent, False, gpus - replicas * each, replicas, outcomes)


def _placing(workload: Workload, agent: str, shared: bool, training: int, replicas: int, outcomes: Outcomes) -> Placing:
    rewards = workload.service_of(agent)
    assert rewards.servers is not None
    factor = rewards.servers.training_gpus / training
    on = {s.name for s in workload.pipeline.stages if s.on == POOL} - _SLEEPING
    times = {name: _scaled(time, factor) if name in on else time for name, time in workload.times.items()}
    few = replace(workload, times=times, steps=min(workload.steps, FEW))
    few = few.with_service(agent, rewards.with_replicas(replicas))
    took = {name: outcomes.of(few, preset(name, few.mini_batches)).total_s / few.steps for name in PRESETS}
    policy = min(took, key=lambda name: took[name])
    return Placing(shared, training, replicas, policy, took[policy])


def _scaled(time: StageTime, factor: float) -> StageTime:
    if isinstance(time, Modelled):
        return Modelled(time.distribution.scaled(factor))
    return Measured({step: tuple(s * factor for s in parts) for step, parts in time.steps.items()})


def _sharing(workload: Workload, agent: str) -> Workload:
    """Returns the workload with the reward model awake between rollout and last rewards alone."""
    pipeline = workload.pipeline
    if _SLEEPING.intersection(pipeline.by_name):
        return workload
    servers, roles = workload.service_of(agent).servers, workload.roles
    assert servers is not None
    collect = workload.agents[agent]
    request = roles.request if collect == roles.collect else roles.beside[collect]
    stages = list(pipeline.stages)
    assert request is not None
    awake_between(stages, [pipeline.by_name[request]], [pipeline.by_name[collect]], POOL)
    if collect == roles.collect and roles.score is not None:
        score = pipeline.by_name[roles.score]
        awake_between(stages, [score], [score], POOL, prefix=VALIDATION)
    took = Modelled(Distribution("constant", servers.wake_s))
    times = {**workload.times, **dict.fromkeys(sorted(_SLEEPING), took)}
    return replace(workload, pipeline=Pipeline(stages, pipeline.inputs, pipeline.resources), times=times)


def _apart(workload: Workload) -> Workload:
    """Returns the workload with a reward model that is always awake."""
    pipeline = workload.pipeline
    stages = [
        replace(s, after=tuple(name for name in s.after if name not in _SLEEPING))
        for s in pipeline.stages
        if s.name not in _SLEEPING
    ]
    return replace(workload, pipeline=Pipeline(stages, pipeline.inputs, pipeline.resources))
