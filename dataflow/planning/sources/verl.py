"""Reads a workload from the log of a verl baseline: stage times from `timing_s/*`, the rest from the configuration.

verl's loop is sequential: generate, send the reward requests, log-probs, wait for the rewards (inside `adv`), update,
and at some steps validate (`testing`: generation and scoring) and save. The workload's assumptions list what is fitted.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from dataflow.distribution import Distribution, parse_distribution
from dataflow.drawing.duration import figure
from dataflow.errors import ConfigError, counted
from dataflow.planning.config import PlanConfig, ValidationPlan
from dataflow.planning.costs import fit_latency, makespan
from dataflow.planning.rewards import Rewards, Validation
from dataflow.planning.sources.guesses import examples, known_settings
from dataflow.planning.sources.handmade import TIMED
from dataflow.planning.sources.oddities import exception, oddities
from dataflow.planning.sources.overlaps import HIDDEN_S, TAKEN, Signs, blocks, mean, signs
from dataflow.planning.sources.scalars import Scalars, read_scalars
from dataflow.planning.sources.whatifs import changed, given_times
from dataflow.planning.workload import CRITIC, Logged, Measured, StageTime, Workload, after_rewards, grpo
from dataflow.policy import check_batch, divisors

# The waits of a published baseline give its known latency within 2%; those of its mini-batch run, 78% of it.
_QUICK = 0.9
_SETTLE = "Give log.latency=... to settle that: the waits agree with it or not."


def workload(path: Path, config: PlanConfig) -> Workload:
    """Returns the workload of a verl run.

    Raises:
        DataError: the log cannot be read, or lacks a column.
        ConfigError: a value that the log does not contain is missing.
    """
    found = read_scalars(path)
    planned = _workload(found, path, config)
    if planned.logged is None or not planned.logged.policy:
        return planned
    # verl's own loop, for as many steps as it logged: what the log itself took, to be compared with what is predicted.
    facts = {"log", "prompts", "responses", "mini_batches", "seed"}
    validation = ValidationPlan(samples=config.validation.samples, overlap=False, pool="own")
    steps = planned.logged.steps
    loop = _workload(
        found, path, PlanConfig(**{key: getattr(config, key) for key in facts}, steps=steps, validation=validation)
    )
    if blocks(found):
        loop = replace(loop, pipeline=after_rewards(loop.pipeline))
    return replace(planned, loop=loop)


def _workload(found: Scalars, path: Path, config: PlanConfig) -> Workload:
    testing, saving = _every(found, "testing"), _every(found, "save_checkpoint")
    log = _from_one(found)
    shown = signs(log)
    assumed = [*found.said, *oddities(log)]
    config = known_settings(path, config, assumed)
    needed, counted = examples(log, config)
    timed = bool(log.series("timing_s/adv")) or mean(log, "timing_s/reward") > HIDDEN_S
    if shown.overlap or not timed:
        needed["log.latency"] = "uniform:1:40"
        better = "of verl's own loop" if timed else "with timing_s/adv and timing_s/reward"
        counted += f", or plan from a log {better}"
    if config.reward.concurrency is not None and config.log.concurrency is None:
        counted += " (reward.concurrency says what to plan)"
    prompts, responses, mini_batches, concurrency, *_ = config.need(
        path, needed, counted, f"{shown.overlap} " if shown.overlap else ""
    )
    check_batch(prompts, mini_batches)
    if config.agents:
        raise ConfigError(f"agents.{next(iter(config.agents))}: a verl log is of one reward agent; leave it out.")
    shown = _settled(shown, log, config, concurrency, prompts, responses)
    if shown.baseline:
        assumed.insert(0, shown.baseline)
    scattered = config.balance_batch is not False
    logged_rewards, request = _rewards(log, config, concurrency, prompts, responses, assumed, fit=not shown.overlap)
    rewards = changed(replace(logged_rewards, scattered=scattered), config.reward, "reward")
    caution = shown.overlap or (f"{shown.doubt} {_SETTLE}" if shown.doubt else _too_quick(config, logged_rewards))
    caution = " ".join(filter(None, (caution, exception(log))))
    if scattered:
        assumed.append(
            "verl distributes the batch over its ranks by length before scoring (balance_batch=false if not)."
        )
    times: dict[str, StageTime | None] = {
        "rollout": _measured(log, "gen"),
        "reward_request": request,
        "old_log_prob": _measured(log, "old_log_prob"),
        "ref_log_prob": _measured(log, "ref"),
        "values": _measured(log, "values"),
        "actor_update": _measured(log, "update_actor"),
        "critic_update": _measured(log, "update_critic"),
    }
    validation = _validation(log, testing, config, logged_rewards, times, assumed)
    checkpoints = saving if config.checkpoint.every is None else config.checkpoint.every
    if checkpoints:
        times["checkpoint"] = _measured(log, "save_checkpoint")
    times |= given_times(config, TIMED)
    for stage, every, timing in (
        ("val_rollout", config.validation.every, "testing"),
        ("checkpoint", config.checkpoint.every, "save_checkpoint"),
    ):
        if every and times.get(stage) is None:
            key = f"{'validation' if stage == 'val_rollout' else stage}.every"
            raise ConfigError(
                f"{key}: the log holds no timing_s/{timing}; give stages.{stage}=SECONDS, or leave it out."
            )
    known = {name: time for name, time in times.items() if time is not None}
    steps = config.steps or len(log.series("timing_s/gen"))
    if "ref_log_prob" not in known:
        assumed.append("no reference log-probs: the log holds no timing_s/ref.")
    if "old_log_prob" not in known:
        assumed.append("no old log-probs: the log holds no timing_s/old_log_prob, as with verl's bypass_mode.")
    if config.reward.agent == "per-step":
        assumed.append("off-policy rows leave out the first rollout, as timing_s/step does.")
    logged = log.series("timing_s/step")
    total = math.fsum(logged.values())
    critic = any(name in known for name in CRITIC)
    if critic:
        assumed.append("the critic's update may run beside the next step's wait for rewards; verl's loop waits for it.")
        assumed.append(
            "a policy that splits a step whitens the advantages over mini-batches (algorithm.whiten=mini-batch), verl "
            "over the step."
        )
    how = {"critic": critic, "bypass": "old_log_prob" not in known, "stops": config.validation.overlap is False}
    pipeline = grpo("ref_log_prob" in known, validation, checkpoints or None, **how)
    return Workload(
        source=str(path),
        pipeline=pipeline,
        steps=steps,
        prompts=prompts,
        responses=responses,
        mini_batches=mini_batches,
        times=known,
        rewards=rewards,
        validation=validation,
        dispatch_s=dict.fromkeys(pipeline.by_name, config.dispatch or 0.0),
        uncounted=config.reward.agent == "per-step",
        assumptions=tuple(assumed),
        ran_with=" ".join(f"log.{key}={value}" for key, value in config.log if value is not None),
        logged=Logged("" if shown.overlap else "baseline", total, len(logged)) if total else None,
        caution=caution,
        seed=config.seed,
    )


def _from_one(log: Scalars) -> Scalars:
    """Returns the log renumbered from step 1; the log of a resumed run begins later."""
    first = min(log.series("timing_s/gen"), default=1)
    if first == 1:
        return log
    columns = {name: {step - first + 1: s for step, s in of.items()} for name, of in log.columns.items()}
    return Scalars(log.path, columns)


def _settled(shown: Signs, log: Scalars, config: PlanConfig, concurrency: int, groups: int, responses: int) -> Signs:
    """Returns the signs with a doubt settled by the latency that the user gave: the waits agree with it or not."""
    spec = config.log
    if not shown.doubt or spec.latency is None:
        return shown
    latency = parse_distribution(spec.latency, "log.latency")
    waits = mean(log, "timing_s/adv") + _beside(log)
    fitted = fit_latency(Rewards(latency, concurrency, spec.rpm), groups, responses, waits, config.seed)
    if quick := _too_quick(config, Rewards(fitted, concurrency, spec.rpm)):
        return Signs(overlap=f"{shown.doubt} Its latency settles that: {quick}")
    return Signs(baseline=f"{TAKEN}: its waits are as long as log.latency={spec.latency} makes them.")


def _beside(log: Scalars) -> float:
    """Returns the seconds of a step in which rewards arrive unseen."""
    return math.fsum(mean(log, f"timing_s/{name}") for name in ("old_log_prob", "ref", "values"))


def _too_quick(config: PlanConfig, rewards: Rewards) -> str:
    """Returns the sign that a log waits too short for the latency that the user gave; "" if it does not."""
    if config.log.latency is None:
        return ""
    given = parse_distribution(config.log.latency, "log.latency").mean
    if rewards.latency.mean >= _QUICK * given:
        return ""
    return (
        f"the log's waits are those of rewards that take {figure(rewards.latency.mean, 3)} s, not the "
        f"{figure(given, 3)} s of log.latency={config.log.latency}: its run may overlap rewards and updates "
        "already (mini-batch), or have had more requests in flight than log.concurrency."
    )


def _measured(log: Scalars, name: str, less: float = 0.0) -> Measured | None:
    series = log.series(f"timing_s/{name}")
    return Measured({step: (max(0.0, s - less),) for step, s in series.items()}) if series else None


def _every(log: Scalars, name: str) -> int:
    """Returns the interval of a stage that runs at multiples of it, and after the last step; 0 if it never runs.

    Args:
        log: as it was written: renumbered steps are no multiples.
        name: of the stage's timing.
    """
    ran = {step for step in log.series(f"timing_s/{name}") if step > 0}
    first, last = min(log.series("timing_s/gen"), default=1), max(log.series("timing_s/gen"), default=0)
    if len(ran) > 1:
        ran.discard(last)
    most, within = math.gcd(*ran), sum(first <= step <= last for step in ran)
    # A log of few steps allows several intervals; the shortest makes a plan run the stage as often as the log did.
    for every in divisors(most):
        due = last // every - (first - 1) // every
        if due <= within + (last % every == 0 and last not in ran):  # all that ran was due
            return every
    return most


def _rewards(
    log: Scalars, config: PlanConfig, concurrency: int, groups: int, responses: int, assumed: list[str], fit: bool
) -> tuple[Rewards, Measured | None]:
    """Returns the reward service that the log ran with, and the time to send the requests.

    The latency is fitted to the log's waits; with ``fit`` off it is the one that the user gave.
    """
    spec = config.log
    sent, rest = mean(log, "timing_s/reward"), mean(log, "timing_s/adv")
    apart = _beside(log)
    blocking = blocks(log)
    wait, visible = (sent, sent > HIDDEN_S) if blocking else (apart + rest, rest > HIDDEN_S)
    request = None if blocking else _measured(log, "reward")
    if blocking and visible:
        assumed.append(
            "the log waits for its rewards before the log-probs (timing_s/reward); dataflow does so after them."
        )
    distribution = parse_distribution(spec.latency, "log.latency") if spec.latency is not None else None
    if not fit and distribution is not None:
        assumed.append(f"log.latency={spec.latency} is taken as given: the waits in the log overlap other work.")
    elif not visible:
        if distribution is None:
            distribution = Distribution("constant")
            assumed.append("the log shows no wait for rewards: their latency is taken as 0 (log.latency=...).")
    else:
        shape = distribution or parse_distribution("uniform:0:2")
        rewards = Rewards(shape, concurrency, spec.rpm)
        distribution = fit_latency(rewards, groups, responses, wait, config.seed)
        seen = (
            f"the log's rewards take {wait:.1f} s a step; with {counted(concurrency, 'request')} in flight, that is "
            f"{distribution.mean:.2f} s a request on average"
        )
        assumed.append(
            f"{seen}, so log.latency={spec.latency} (average {shape.mean:.2f} s) is scaled to it: {distribution}."
            if spec.latency
            else f"{seen}; they are taken to spread evenly between 0 and {2 * distribution.mean:.1f} s "
            "(log.latency=... says how they do)."
        )
    return Rewards(distribution, concurrency, spec.rpm), request


def _validation(
    log: Scalars,
    logged_every: int,
    config: PlanConfig,
    rewards: Rewards,
    times: dict[str, StageTime | None],
    assumed: list[str],
) -> Validation | None:
    plan = config.validation
    every = logged_every if plan.every is None else plan.every
    if not every:
        return None
    overlap = plan.overlap if plan.overlap is not None else config.reward.agent == "continuous"
    samples = plan.samples or 0
    scoring = makespan(rewards, samples, 1, config.seed) if samples else 0.0
    times["val_rollout"] = _measured(log, "testing", scoring)
    logged = mean(log, "timing_s/testing")
    if samples:
        assumed.append(
            f"of a validation's {logged:.1f} s (timing_s/testing) {min(scoring, logged):.1f} s are scoring "
            f"{counted(samples, 'sample')}, the rest generation."
        )
    else:
        assumed.append("a validation's time is all generation (validation.samples=... tells its scoring apart).")
    if overlap:
        assumed.append("validation is scored while training continues (validation.overlap=false: it stops it).")
    return Validation(every, samples, plan.pool, overlap)
