"""Reads a workload from a dataflow run: its trace holds the time of each task and each reward request."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from dataflow.distribution import Distribution, parse_distribution
from dataflow.errors import ConfigError, DataError, nearest
from dataflow.graph import Pipeline
from dataflow.planning.config import AgentPlan, PlanConfig
from dataflow.planning.planner import name_of
from dataflow.planning.workload import Logged, Measured, Rewards, Roles, StageTime, Validation, Workload
from dataflow.policy import SchedulingPolicy
from dataflow.stage import SAMPLED
from dataflow.timeline import perfetto
from dataflow.timeline.agents import concurrency_of, rpm_of
from dataflow.timeline.spans import Mark, Span, Trace


def workload(path: Path, config: PlanConfig) -> Workload:
    """Returns the workload of a run, which needs a complete step."""
    trace = perfetto.read(path / "trace.json" if path.is_dir() else path)
    planned = of_trace(trace, str(path), config)
    own = PlanConfig(seed=config.seed, log=config.log)
    if config.model_copy(update={"policy": None}) == own:
        return planned
    # What is to be compared with the trace is the run as it was, without what the keys change.
    return replace(planned, loop=of_trace(trace, str(path), own))


def of_trace(trace: Trace, source: str, config: PlanConfig) -> Workload:
    """Returns the workload of a trace, which needs a complete step; a key must not contradict what was measured."""
    job = trace.meta.get("job")
    if not isinstance(job, dict) or not {"pipeline", "prompts", "mini_batches"} <= job.keys():
        raise DataError(
            f"trace {source} does not say what its pipeline and its steps were; give a run, not a simulation, or plan "
            "from costs.yaml."
        )
    held = {"prompts": config.prompts, "responses": config.responses, "validation.samples": config.validation.samples}
    if given := [key for key, value in held.items() if value is not None]:
        raise ConfigError(
            f"{given[0]}: the trace of {source} says what it was; leave it out, or plan from a costs.yaml."
        )
    pipeline = Pipeline.from_facts(job["pipeline"])
    pipeline = _repeated(pipeline, "saves", "checkpoint", config.checkpoint.every, trace, source)
    pipeline = _repeated(pipeline, "validates", "validation", config.validation.every, trace, source)
    roles = Roles.of(pipeline)
    if roles.collect is None and config.reward != AgentPlan():
        raise ConfigError(
            f"reward.{min(config.reward.model_fields_set)}: no stage of {source} sends reward requests; stages.NAME= "
            "says how long the stage takes that gets its rewards itself."
        )
    asked: dict[str, list[Mark]] = {}  # resource -> its reward requests
    for m in trace.marks:
        # A resumed run asks again for what it had: those answers, from the ledger, are no latencies of the service.
        if m.name == "reward" and not (trace.resumed and m.args.get("how") == "ledger"):
            asked.setdefault(m.resource, []).append(m)
    agent = pipeline.collector.on if pipeline.collector is not None else "reward"
    own = _service(trace, agent, roles.collect, asked, config)
    known = len(own.latency.values)
    if roles.collect is not None and not known:
        # The run's own stages asked a judge of the user's.
        why = f"the trace has no reward request, as the run's own stages asked for those of '{roles.collect}': "
        latency, slots = config.need(source, {"log.latency": "uniform:1:4", "log.concurrency": 64}, why=why)
        own = replace(own, latency=parse_distribution(latency, "log.latency"), concurrency=slots)
        own = replace(own, rpm=config.log.rpm or own.rpm)
    else:
        config.refuse_log(f"the trace of {source}", "says what it was")
    beside = _beside(trace, pipeline, roles, asked, config)
    times = _times(trace, pipeline, {roles.collect, roles.score, *beside}, config, source)
    prompts, responses = _sizes(job, trace, pipeline)
    measured = {stage: s for stage, s in _dispatch(trace).items() if stage in pipeline.by_name}
    ends = _ends(trace, next((s.name for s in pipeline.stages if s.streams), None))
    assumed = [f"stage times and {known} reward latencies are those of the run."]
    assumed += [f"agent '{pipeline.by_name[at].on}': its latencies are those of the run." for at in beside]
    if cut := trace.meta.get("cut"):
        assumed.append(f"the run is {cut}.")
    if measured and config.dispatch is None:
        mean = 1000 * statistics.fmean(measured.values())
        assumed.append(
            f"a task begins {mean:.1f} ms after it could, as in the run, more or less by stage (dispatch=SECONDS)."
        )
    if pipeline.streaming and not ends:
        assumed.append("a streaming rollout's groups would end evenly over its time.")
    said_by = agent if known else "log" if config.log.concurrency else ""
    validation = _validation(pipeline, roles.score, asked.get(agent, []), config)
    return Workload(
        source=source,
        pipeline=pipeline,
        steps=config.steps or trace.trained[1],
        prompts=prompts,
        responses=responses,
        mini_batches=config.mini_batches or int(job["mini_batches"]),
        times=times,
        rewards=config.reward.change(own, "reward"),
        beside=beside,
        validation=validation,
        dispatch_s=measured if config.dispatch is None else dict.fromkeys(pipeline.by_name, config.dispatch),
        ends=ends,
        assumptions=tuple(assumed),
        ran_with=f"{said_by}.concurrency={own.concurrency}" if said_by else "",
        logged=_logged(trace, int(job["mini_batches"])),
        seed=config.seed,
    )


def _times(
    trace: Trace, pipeline: Pipeline, waits: Collection[str | None], config: PlanConfig, source: str
) -> dict[str, StageTime]:
    """Returns the time of each stage but of those that wait for a reward service."""
    # A checkpoint that was left out, as the disk was busy, took no time.
    left_out = {s.step for s in trace.spans if s.args.get("left_out")}
    skipped = {(s.name, step) for s in pipeline.with_role("saves") if s.ahead_of is None for step in left_out}
    spans: dict[str, dict[int, list[Span]]] = {}
    for s in sorted(trace.spans, key=lambda s: s.part):
        if s.stage not in waits and (s.stage, s.step) not in skipped and s.stage in pipeline.by_name:
            spans.setdefault(s.stage, {}).setdefault(s.step, []).append(s)
    times: dict[str, StageTime] = {}
    for name, steps in spans.items():
        whole = {step: parts for step, parts in steps.items() if len(parts) == parts[0].parts}
        # The time of a task that ran again has that in it which its process took to be rebuilt.
        usual = {step: parts for step, parts in whole.items() if not any(s.args.get("restarted") for s in parts)}
        if seconds := {step: tuple(s.end - s.begin for s in parts) for step, parts in (usual or whole).items()}:
            times[name] = Measured(seconds)
    if missing := [s.name for s in pipeline.stages if s.every is None and s.name not in times and s.name not in waits]:
        raise DataError(f"trace {source} holds no whole step of '{missing[0]}'; give a run that trained a step.")
    return times | config.times([s.name for s in pipeline.stages if s.name not in waits])


def _beside(
    trace: Trace, pipeline: Pipeline, roles: Roles, asked: Mapping[str, list[Mark]], config: PlanConfig
) -> dict[str, Rewards]:
    """Returns the services of the agents whose groups do not form the parts, by the stage that collects.

    An agent whose requests the trace does not have takes the measured time of its tasks.
    """
    names = {pipeline.by_name[collect].on for collect in roles.beside}
    if unknown := [name for name in config.agents if name not in names]:
        guess = nearest(unknown[0], names) or f"; it has {', '.join(sorted(names)) or 'none beside the first'}."
        raise ConfigError(f"agents.{unknown[0]}: the run has no further reward agent of this name{guess}")
    found = {}
    for collect in roles.beside:
        agent = pipeline.by_name[collect].on
        own, plan = _service(trace, agent, collect, asked, config), config.agents.get(agent, AgentPlan())
        if own.latency.values or plan.latency is not None:
            found[collect] = plan.change(own, f"agents.{agent}")
    return found


def _service(
    trace: Trace, agent: str, collect: str | None, asked: Mapping[str, list[Mark]], config: PlanConfig
) -> Rewards:
    """Returns an agent's service, with the latencies of the requests that a stage collected, or any, in a trace."""
    every = asked.get(agent, [])
    trained = [m for m in every if not m.args.get("validation")] or every
    own = [m for m in trained if m.args.get("collector") in (None, collect)]
    steps: dict[int, list[float]] = {}
    for m in sorted(own, key=lambda m: (m.args.get("group", 0), m.args.get("sample", 0))):
        steps.setdefault(m.args.get("step", 0), []).append(m.end - m.begin)
    latencies = tuple(m.end - m.begin for m in own)
    return Rewards(
        Distribution("empirical", values=latencies) if latencies else Distribution("constant"),
        concurrency_of(trace, agent) or 64,
        rpm_of(trace, agent),
        scattered=bool(config.balance_batch),
        steps={step: tuple(of) for step, of in steps.items()},
    )


def _validation(pipeline: Pipeline, score: str | None, asked: Sequence[Mark], config: PlanConfig) -> Validation | None:
    """Returns the validation that a stage scores, with the latency of its own requests."""
    every = pipeline.by_name[score].every if score is not None else None
    if not every:
        return None
    if config.validation.overlap is False:
        raise ConfigError("validation.overlap=false: training goes on beside a validation in every run; leave it out.")
    own = [m for m in asked if m.args.get("validation")]
    latencies = tuple(m.end - m.begin for m in own)
    latency = Distribution("empirical", values=latencies) if own and config.reward.latency is None else None
    samples = len(own) // max(1, len({m.args.get("step") for m in own}))
    return Validation(every, samples, config.validation.pool, latency=latency)


def policy_of(facts: Mapping[str, Any]) -> SchedulingPolicy:
    """Returns the policy that a trace's meta, or one of its changes, describes."""
    return SchedulingPolicy(
        int(facts.get("split", 1)),
        int(facts.get("max_staleness", 0)),
        facts.get("order", "arrival"),
        bool(facts.get("stream_rollout", False)),
    )


def _logged(trace: Trace, mini_batches: int) -> Logged:
    """Returns the run that a trace records; a policy that no preset has is called by its numbers."""
    seconds, steps = trace.trained
    said = list(trace.meta.get("policies") or [trace.meta])  # more than one if policy=auto changed it
    if len(said) > 1 or "split" not in said[0]:
        return Logged(str(trace.meta.get("policy")), seconds, steps, None)
    only = policy_of(said[0])
    return Logged(name_of(only, mini_batches), seconds, steps, only)


def _sizes(job: Mapping[str, Any], trace: Trace, pipeline: Pipeline) -> tuple[int, int]:
    """Returns prompts and responses of a step; what the run's configuration does not say is derived from the trace."""
    # Without a number of groups no policy can split a step: one for each mini-batch.
    prompts = int(job["prompts"] or job["mini_batches"])
    if job.get("responses") is not None:
        return prompts, int(job["responses"])
    sampling = {each.name for each in pipeline.with_role("samples")[:1]}
    steps: dict[int, int] = {}
    for s in trace.spans:
        if s.stage in sampling:
            steps[s.step] = steps.get(s.step, 0) + int(s.args.get("samples", 0))
    return prompts, max(1, round(statistics.median(steps.values()) / prompts)) if steps else 1


def _repeated(
    pipeline: Pipeline,
    role: Literal["saves", "validates"],
    what: str,
    every: int | None,
    trace: Trace,
    source: str,
) -> Pipeline:
    """Returns the pipeline with the stages of a role every so many steps and at the end; with 0, without them."""
    if every is None:
        return pipeline
    own = {s.name for s in pipeline.with_role(role)}
    if every and own.isdisjoint(s.stage for s in trace.spans):
        key = {"checkpoint": "checkpoint.every", "validation": "val.every"}[what]
        raise ConfigError(
            f"{what}.every={every}: the run of {source} made no {what}, so the time of one is not known; "
            f"leave it out, or make the run again with {key}=2."
        )
    if every:
        stages = [replace(s, every=every) if s.name in own else s for s in pipeline.stages]
    else:
        kept = [s for s in pipeline.stages if s.name not in own]
        stages = [replace(s, after=tuple(name for name in s.after if name not in own)) for s in kept]
    return Pipeline(stages, pipeline.inputs, pipeline.resources)


def _ends(trace: Trace, stage: str | None) -> tuple[float, ...]:
    """Returns the mean share of a rollout's time after which its first, second, ... group ended."""
    sampled = sorted(level.at for level in trace.levels if level.name == SAMPLED)
    shares = [
        [(at - s.begin) / (s.end - s.begin) for at in sampled if s.begin <= at <= s.end]
        for s in trace.spans
        if s.stage == stage and s.end > s.begin
    ]
    if not shares or len(set(map(len, shares))) > 1:
        return ()  # a rollout was restarted
    return tuple(statistics.fmean(column) for column in zip(*shares, strict=True))


def _dispatch(trace: Trace) -> dict[str, float]:
    """Returns stage -> mean seconds from when its tasks could begin to when they did.

    The first step is left out unless it is a stage's only one: its tasks wait for the imports of libraries.
    """
    by_task = {s.task: s for s in trace.spans}
    delays: dict[str, list[tuple[int, float]]] = {}
    first = min((s.step for s in trace.spans), default=0)
    before: dict[str, float] = {}
    slots = trace.meta.get("resources") or {}
    for s in sorted(trace.spans, key=lambda s: (s.begin, s.end)):
        waited = by_task.get(s.waited_for)
        if waited is not None:
            busy = before.get(s.resource, 0.0) if slots.get(s.resource) == 1 else 0.0
            delays.setdefault(s.stage, []).append((s.step, max(0.0, s.begin - max(busy, waited.end))))
        before[s.resource] = max(before.get(s.resource, 0.0), s.end)
    later = {stage: [delay for step, delay in of if step > first] for stage, of in delays.items()}
    return {stage: statistics.fmean(later[stage] or [delay for _step, delay in of]) for stage, of in delays.items()}
