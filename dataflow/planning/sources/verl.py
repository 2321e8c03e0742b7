"""Reads a workload from the log of a verl baseline: stage times from `timing_s/*`, the rest from the configuration.

verl's loop is sequential: generate, send the reward requests, log-probs, wait for the rewards (inside `adv`), update,
and at some steps validate (`testing`: generation and scoring) and save. The workload's assumptions list what is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from dataflow.distribution import Distribution, parse_distribution
from dataflow.errors import ConfigError, counted
from dataflow.planning.config import PlanConfig, ValidationPlan
from dataflow.planning.costs import fit_latency, makespan
from dataflow.planning.sources.logs import SECONDS, Scalars, printed_settings, read_scalars
from dataflow.planning.workload import (
    CRITIC,
    TIMED,
    Logged,
    Measured,
    Rewards,
    StageTime,
    Validation,
    Workload,
    after_rewards,
    grpo,
)
from dataflow.policy import SchedulingPolicy, check_batch

_STAGES = {
    "rollout": "gen",
    "reward_request": "reward",
    "old_log_prob": "old_log_prob",
    "ref_log_prob": "ref",
    "values": "values",
    "actor_update": "update_actor",
    "critic_update": "update_critic",
}
"""Stage -> what verl times of it in each step."""
_HIDDEN_S = 1.0
"""After a shorter wait the latency cannot be fitted: the rewards arrived during the log-probs."""


def workload(path: Path, config: PlanConfig) -> Workload:
    """Returns the workload of a verl run."""
    read = read_scalars(path)
    before = min(read.series(f"{SECONDS}gen")) - 1  # the log of a resumed run begins later
    log = Scalars({name: {step - before: value for step, value in of.items()} for name, of in read.items()})
    planned = _workload(log, path, config)
    if planned.logged is None:
        return planned
    # verl's own loop, for as many steps as it logged: what the log itself took, to be compared with what is predicted.
    facts = {key: getattr(config, key) for key in ("log", "prompts", "responses", "mini_batches", "seed")}
    validation = ValidationPlan(samples=config.validation.samples, overlap=False, pool="own")
    loop = _workload(log, path, PlanConfig(**facts, steps=planned.logged.steps, validation=validation))
    return replace(planned, loop=replace(loop, pipeline=after_rewards(loop.pipeline)) if _blocks(log) else loop)


def _workload(log: Scalars, path: Path, config: PlanConfig) -> Workload:
    assumed = [
        "the log is taken for that of a baseline, whose loop waits for all rewards of a step before the update; a run "
        "that updates on mini-batches as they arrive looks like one with quicker rewards."
    ]
    config = _with_settings(path, config, assumed)
    needed: dict[str, object] = {"prompts": 1024, "responses": 5, "mini_batches": 4, "log.concurrency": 256}
    timed = bool(log.series(f"{SECONDS}adv")) or log.mean(f"{SECONDS}reward") > _HIDDEN_S
    if not timed:
        needed["log.latency"] = "uniform:1:40"
    hint = "" if timed else ", or plan from a log with timing_s/adv and timing_s/reward"
    prompts, responses, mini_batches, concurrency, *_ = config.need(path, needed, hint)
    check_batch(prompts, mini_batches)
    if config.agents:
        raise ConfigError(f"agents.{next(iter(config.agents))}: a verl log is of one reward agent; leave it out.")
    scattered = config.balance_batch is not False
    own = replace(_rewards(log, config, concurrency, (prompts, responses), assumed), scattered=scattered)
    if scattered:
        assumed.append(
            "verl distributes the batch over its ranks by length before scoring (balance_batch=false if not)."
        )
    times: dict[str, StageTime | None] = {stage: _measured(log, timing) for stage, timing in _STAGES.items()}
    if _blocks(log):
        del times["reward_request"]
    validation = _validation(log, config, own, times, assumed)
    saves = _every(log, "save_checkpoint") if config.checkpoint.every is None else config.checkpoint.every
    if saves:
        times["checkpoint"] = _measured(log, "save_checkpoint")
    times |= config.times(TIMED)
    for stage, section, timing in (
        ("val_rollout", "validation", "testing"), ("checkpoint", "checkpoint", "save_checkpoint"),
    ):  # fmt: skip
        if getattr(config, section).every and times.get(stage) is None:
            raise ConfigError(
                f"{section}.every: the log holds no timing_s/{timing}; give stages.{stage}=SECONDS, or leave it out."
            )
    known = {name: time for name, time in times.items() if time is not None}
    critic = any(name in known for name in CRITIC)
    if "ref_log_prob" not in known:
        assumed.append("no reference log-probs: the log holds no timing_s/ref.")
    if "old_log_prob" not in known:
        assumed.append("no old log-probs: the log holds no timing_s/old_log_prob, as with verl's bypass_mode.")
    if config.reward.agent == "per-step":
        assumed.append("off-policy rows leave out the first rollout, as timing_s/step does.")
    if critic:
        assumed.append("the critic's update may run beside the next step's wait for rewards; verl's loop waits for it.")
    how = {"critic": critic, "bypass": "old_log_prob" not in known, "stops": config.validation.overlap is False}
    pipeline = grpo("ref_log_prob" in known, validation, saves or None, **how)
    whole = log.series(f"{SECONDS}step")
    return Workload(
        source=str(path),
        pipeline=pipeline,
        steps=config.steps or len(log.series(f"{SECONDS}gen")),
        prompts=prompts,
        responses=responses,
        mini_batches=mini_batches,
        times=known,
        rewards=config.reward.change(own, "reward"),
        validation=validation,
        dispatch_s=dict.fromkeys(pipeline.by_name, config.dispatch or 0.0),
        uncounted=config.reward.agent == "per-step",
        assumptions=tuple(assumed),
        ran_with=" ".join(f"log.{key}={value}" for key, value in config.log if value is not None),
        logged=Logged("baseline", math.fsum(whole.values()), len(whole), SchedulingPolicy()) if whole else None,
        seed=config.seed,
    )


def _with_settings(path: Path, config: PlanConfig, assumed: list[str]) -> PlanConfig:
    """Returns the configuration with the settings that verl printed into the log, where the user gave none.

    The user cannot give another size of a step than the times of the log are of.
    """
    printed = printed_settings(path)

    def of(key: str) -> Any:
        value: Any = printed
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    prompts, small = of("data.train_batch_size"), of("actor_rollout_ref.actor.ppo_mini_batch_size")
    found = {"prompts": prompts, "responses": of("actor_rollout_ref.rollout.n")}
    found["mini_batches"] = prompts // small if prompts and small and prompts % small == 0 else None
    for key in ("prompts", "responses"):
        if found[key] is not None and getattr(config, key) not in (None, found[key]):
            raise ConfigError(
                f"{key}={getattr(config, key)}: the log's configuration of verl has {found[key]}; leave it out."
            )
    new = {key: value for key, value in found.items() if value is not None and getattr(config, key) is None}
    if new:
        listed = " ".join(f"{key}={value}" for key, value in new.items())
        assumed.append(f"{listed}: from the configuration of verl that the log holds.")
    if config.balance_batch is None and (balance := of("trainer.balance_batch")) is not None:
        new["balance_batch"] = balance
    return config.model_copy(update=new)


def _blocks(log: Scalars) -> bool:
    """Returns whether the loop waits for its rewards before the log-probs.

    A reward function that is not launched asynchronously is timed in `reward` itself.
    """
    return log.mean(f"{SECONDS}reward") > log.mean(f"{SECONDS}adv")


def _measured(log: Scalars, name: str, less: float = 0.0) -> Measured | None:
    series = log.series(SECONDS + name)
    return Measured({step: (max(0.0, s - less),) for step, s in series.items()}) if series else None


def _every(log: Scalars, name: str) -> int:
    """Returns the interval of what runs now and then, and after the last step; 0 if it never runs."""
    last = max(log.series(f"{SECONDS}gen"))
    ran = [step for step in log.series(SECONDS + name) if step > 0]
    regular = [step for step in ran if step != last] or ran
    return min((b - a for a, b in pairwise(regular)), default=regular[0] if regular else 0)


def _rewards(log: Scalars, config: PlanConfig, concurrency: int, size: tuple[int, int], assumed: list[str]) -> Rewards:
    """Returns the reward service that the log ran with; its latency is fitted to the log's waits."""
    spec = config.log
    sent, rest = log.mean(f"{SECONDS}reward"), log.mean(f"{SECONDS}adv")
    unseen = math.fsum(log.mean(SECONDS + name) for name in ("old_log_prob", "ref", "values"))
    blocking = _blocks(log)
    wait, visible = (sent, sent > _HIDDEN_S) if blocking else (unseen + rest, rest > _HIDDEN_S)
    given = parse_distribution(spec.latency, "log.latency") if spec.latency is not None else None
    if not visible:
        assumed.append(
            "the log shows no wait for rewards: their latency is taken as 0 (log.latency=...)."
            if given is None
            else f"log.latency={spec.latency} is taken as given: the log's waits do not show it."
        )
        return Rewards(given or Distribution("constant"), concurrency, spec.rpm)
    if blocking:
        assumed.append(
            "the log waits for its rewards before the log-probs (timing_s/reward); dataflow does so after them."
        )
    shape = given or parse_distribution("uniform:0:2")
    fitted = fit_latency(Rewards(shape, concurrency, spec.rpm), *size, wait, config.seed)
    seen = (
        f"the log's rewards take {wait:.1f} s a step; with {counted(concurrency, 'request')} in flight, that is "
        f"{fitted.mean:.2f} s a request on average"
    )
    assumed.append(
        f"{seen}, so log.latency={spec.latency} (average {shape.mean:.2f} s) is scaled to it: {fitted}."
        if given
        else f"{seen}; they are taken to spread evenly between 0 and {2 * fitted.mean:.1f} s "
        "(log.latency=... says how they do)."
    )
    return Rewards(fitted, concurrency, spec.rpm)


def _validation(
    log: Scalars, config: PlanConfig, rewards: Rewards, times: dict[str, StageTime | None], assumed: list[str]
) -> Validation | None:
    """Returns the validation, and adds the time of its generation and what is assumed of it."""
    plan = config.validation
    every = _every(log, "testing") if plan.every is None else plan.every
    if not every:
        return None
    overlap = plan.overlap if plan.overlap is not None else config.reward.agent == "continuous"
    samples = plan.samples or 0
    scoring = makespan(rewards, samples, 1, config.seed) if samples else 0.0
    times["val_rollout"] = _measured(log, "testing", scoring)
    if samples:
        logged = log.mean(f"{SECONDS}testing")
        assumed.append(
            f"of a validation's {logged:.1f} s (timing_s/testing) {min(scoring, logged):.1f} s are scoring "
            f"{counted(samples, 'sample')}, the rest generation."
        )
    else:
        assumed.append("a validation's time is all generation (validation.samples=... tells its scoring apart).")
    if overlap:
        assumed.append("validation is scored while training continues (validation.overlap=false: it stops it).")
    return Validation(every, samples, plan.pool, overlap)
