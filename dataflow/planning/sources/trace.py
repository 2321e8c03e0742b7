"""Reads a workload from a dataflow run: its trace holds the time of each task and each reward request."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from dataflow.distribution import Distribution, parse_distribution
from dataflow.errors import ConfigError, DataError, counted, nearest
from dataflow.graph import Pipeline
from dataflow.planning.config import AgentPlan, LogPlan, PlanConfig
from dataflow.planning.planner import name_of
from dataflow.planning.rewards import Rewards, Validation
from dataflow.planning.sources.whatifs import changed, given_times, refuse_log
from dataflow.planning.workload import Logged, Measured, Roles, StageTime, Workload
from dataflow.policy import SchedulingPolicy
from dataflow.stage import SAMPLED
from dataflow.timeline import perfetto
from dataflow.timeline.agents import concurrency_of, rates_of
from dataflow.timeline.spans import Mark, Span, Trace


def workload(path: Path, config: PlanConfig) -> Workload:
    """Returns the workload of a run.

    Raises:
        DataError: the trace cannot be read, or has no complete step.
    """
    trace = perfetto.read(path / "trace.json" if path.is_dir() else path)
    planned = of_trace(trace, str(path), config)
    own = PlanConfig(seed=config.seed, log=config.log)
    if config.model_copy(update={"policy": None}) == own:
        return planned
    # What is to be compared with the trace is the run as it was, without what the keys change.
    return replace(planned, loop=of_trace(trace, str(path), own))


def of_trace(trace: Trace, source: str, config: PlanConfig) -> Workload:
    """Returns the workload of a trace.

    Raises:
        DataError: the trace has no complete step.
        ConfigError: a key contradicts what was measured.
    """
    job = trace.meta.get("job")
    if not isinstance(job, dict) or not {"pipeline", "prompts", "mini_batches"} <= job.keys():
        raise DataError(
            f"trace {source} does not say what its pipeline and its steps were; give a run, not a simulation, or plan "
            "from costs.yaml."
        )
    _refuse(config, source)
    pipeline = Pipeline.from_facts(job["pipeline"])
    if config.checkpoint.every is not None:
        pipeline = _repeated(pipeline, "saves", "checkpoint", config.checkpoint.every, trace, source)
    if config.validation.every is not None:
        pipeline = _repeated(pipeline, "validates", "validation", config.validation.every, trace, source)
    roles = Roles.of(pipeline)
    if roles.collect is None and config.reward != AgentPlan():
        raise ConfigError(
            f"reward.{min(config.reward.model_fields_set)}: no stage of {source} sends reward requests; stages.NAME= "
            "says how long the stage takes that gets its rewards itself."
        )
    assumed: list[str] = []
    beside = _further_services(trace, pipeline, roles, config, assumed)
    times = _times(trace, pipeline, {roles.collect, roles.score, *beside}, config, source, assumed)
    agent = pipeline.collector.on if pipeline.collector is not None else "reward"
    own, known = _service(trace, agent, (None, roles.collect), config)
    if roles.collect is not None and not known:
        own = _unrecorded(own, config, source, roles.collect)
    elif config.log != LogPlan():
        refuse_log(config, f"the trace of {source}", "says what it was")
    given = config.reward.latency is not None
    measured = f"stage times and {known} reward latencies are" if known and not given else "stage times are"
    assumed[:0] = [f"{measured} those of the run.", *_taken(trace, agent, config.reward)]
    prompts, responses = _sizes(job, trace, pipeline, assumed)
    if cut := trace.meta.get("cut"):
        assumed.append(f"the run is {cut}.")
    dispatch = _dispatch(trace) if config.dispatch is None else dict.fromkeys(pipeline.by_name, config.dispatch)
    if dispatch and config.dispatch is None:
        mean = 1000 * statistics.fmean(dispatch.values())
        assumed.append(
            f"a task begins {mean:.1f} ms after it could, as in the run, more or less by stage (dispatch=SECONDS)."
        )
    ends = _ends(trace, next((s.name for s in pipeline.stages if s.streams), None))
    if pipeline.streaming and not ends:
        assumed.append("a streaming rollout's groups would end evenly over its time.")
    said_by = agent if known else "log" if config.log.concurrency else ""
    return Workload(
        source=source,
        pipeline=pipeline,
        steps=config.steps or trace.trained[1],
        prompts=prompts,
        responses=responses,
        mini_batches=config.mini_batches or int(job["mini_batches"]),
        times=times,
        rewards=changed(own, config.reward, "reward"),
        beside=beside,
        validation=_validation(trace, pipeline, roles.score, agent, config),
        dispatch_s=dispatch,
        ends=ends,
        assumptions=tuple(assumed),
        ran_with=f"{said_by}.concurrency={own.concurrency}" if said_by else "",
        logged=_logged(trace, int(job["mini_batches"])),
        seed=config.seed,
    )


def _times(
    trace: Trace,
    pipeline: Pipeline,
    waits: Collection[str | None],
    config: PlanConfig,
    source: str,
    assumed: list[str],
) -> dict[str, StageTime]:
    """Returns the time of each stage but of those that wait for a reward service.

    Raises:
        DataError: a stage of each step has none.
    """
    # A checkpoint that was left out, as the disk was busy, took no time.
    left_out = {s.step for s in trace.spans if s.args.get("left_out")}
    skipped = {(s.name, step) for s in pipeline.with_role("saves") if s.ahead_of is None for step in left_out}
    spans: dict[str, dict[int, list[Span]]] = {}
    for s in sorted(trace.spans, key=lambda s: s.part):
        if s.stage not in waits and (s.stage, s.step) not in skipped and s.stage in pipeline.by_name:
            spans.setdefault(s.stage, {}).setdefault(s.step, []).append(s)
    times: dict[str, StageTime] = {name: Measured(whole) for name, of in spans.items() if (whole := _whole(of))}
    if repeated := sorted({s.step for s in trace.spans if s.args.get("restarted") and s.stage in times}):
        assumed.append(
            f"tasks that ran again after their process had died (step {', '.join(map(str, repeated))}) are left out; "
            "others stand in."
        )
    if missing := [s.name for s in pipeline.stages if s.every is None and s.name not in times and s.name not in waits]:
        raise DataError(f"trace {source} holds no whole step of '{missing[0]}'; give a run that trained a step.")
    return times | given_times(config, [s.name for s in pipeline.stages if s.name not in waits])


def _further_services(
    trace: Trace, pipeline: Pipeline, roles: Roles, config: PlanConfig, assumed: list[str]
) -> dict[str, Rewards]:
    """Returns the services of the agents whose groups do not form the parts, and adds what is assumed of them.

    An agent whose requests the trace does not have takes the measured time of its tasks.

    Raises:
        ConfigError: a key is of an agent that the run does not have.
    """
    names = {pipeline.by_name[collect].on: collect for collect in roles.beside}
    if unknown := [name for name in config.agents if name not in names]:
        guess = nearest(unknown[0], names) or f"; it has {', '.join(names) or 'none beside the first'}."
        raise ConfigError(f"agents.{unknown[0]}: the run has no further reward agent of this name{guess}")
    found = {}
    for collect in roles.beside:
        agent = pipeline.by_name[collect].on
        plan = config.agents.get(agent, AgentPlan())
        own, known = _service(trace, agent, (None, collect), config)
        if known or plan.latency is not None:
            found[collect] = changed(own, plan, f"agents.{agent}")
            assumed += [f"agent '{agent}': {known} latencies are those of the run.", *_taken(trace, agent, plan)]
    return found


def _service(trace: Trace, agent: str, collectors: Collection[str | None], config: PlanConfig) -> tuple[Rewards, int]:
    """Returns an agent's service, with the latencies of the requests in a trace, and their number.

    Args:
        trace: of the run.
        agent: its name.
        collectors: what the requests' ``collector`` may be, where several agents collect on one resource.
        config: of the plan.
    """
    asked = _asked(trace, agent)
    trained = [m for m in asked if not m.args.get("validation")] or asked
    own = [m for m in trained if m.args.get("collector") in collectors]
    steps: dict[int, list[Mark]] = {}
    for m in sorted(own, key=lambda m: (m.args.get("group", 0), m.args.get("sample", 0))):
        steps.setdefault(m.args.get("step", 0), []).append(m)
    latencies = tuple(m.end - m.begin for m in own)
    rewards = Rewards(
        Distribution("empirical", values=latencies) if latencies else Distribution("constant"),
        concurrency_of(trace, agent) or 64,
        rates_of(trace, agent)[0],
        scattered=bool(config.balance_batch),
        steps={step: tuple(m.end - m.begin for m in of) for step, of in steps.items()},
    )
    return rewards, len(latencies)


def _asked(trace: Trace, agent: str) -> list[Mark]:
    """Returns the requests of an agent, those of validations among them."""
    return [m for m in trace.marks if m.name == "reward" and m.resource == agent and not _repeats(trace, m)]


def _repeats(trace: Trace, mark: Mark) -> bool:
    """Whether a request may be one that the run made before it was resumed, and whose answer the ledger has."""
    return bool(trace.meta.get("resumed")) and mark.args.get("how") == "ledger"


def _taken(trace: Trace, agent: str, plan: AgentPlan) -> list[str]:
    """Returns what a plan takes over from an agent of the run, and what it leaves out."""
    rpm, tpm = rates_of(trace, agent)
    said = [f"{agent}.rpm={rpm:g} is the run's."] if rpm and plan.rpm is None else []
    said += [f"{agent}.tpm={tpm:g} of the run is not simulated."] if tpm else []
    if repeated := sum(_repeats(trace, m) for m in trace.marks if m.name == "reward" and m.resource == agent):
        said.append(
            f"{counted(repeated, 'answer')} that '{agent}' took from its ledger {'is' if repeated == 1 else 'are'} "
            "left out: the run resumed, and asked for rewards again."
        )
    return said


def _unrecorded(own: Rewards, config: PlanConfig, source: str, collect: str) -> Rewards:
    """Returns the service of a run whose own judge was asked by its stages, so that the trace has no request.

    Raises:
        ConfigError: what it ran with is not said.
    """
    why = f"the trace has no reward request, as the run's own stages asked for those of '{collect}': "
    latency, concurrency = config.need(source, {"log.latency": "uniform:1:4", "log.concurrency": 64}, why=why)
    given = parse_distribution(latency, "log.latency")
    return replace(own, latency=given, concurrency=concurrency, rpm=config.log.rpm or own.rpm)


def _validation(
    trace: Trace, pipeline: Pipeline, score: str | None, agent: str, config: PlanConfig
) -> Validation | None:
    """Returns the validation that a stage scores, with the latency of its own requests."""
    every = pipeline.by_name[score].every if score is not None else None
    if not every:
        return None
    scored = [m for m in trace.marks if m.args.get("validation")]
    times_scored = len({m.args.get("step") for m in scored})
    latencies = tuple(m.end - m.begin for m in _asked(trace, agent) if m.args.get("validation"))
    own = Distribution("empirical", values=latencies) if latencies and config.reward.latency is None else None
    return Validation(every, len(scored) // max(1, times_scored), config.validation.pool, latency=own)


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
        return Logged(str(trace.meta.get("policy")), seconds, steps)
    only = policy_of(said[0])
    return Logged(name_of(only, mini_batches), seconds, steps, only)


def _sizes(job: Mapping[str, Any], trace: Trace, pipeline: Pipeline, assumed: list[str]) -> tuple[int, int]:
    """Returns prompts and responses of a step; what the run's configuration does not say is derived from the trace."""
    prompts = job["prompts"]
    if prompts is None:
        prompts = job["mini_batches"]
        assumed.append(
            f"the run has no number of groups, so that no policy can split its steps; {counted(prompts, 'group')} a "
            "step would be one for each mini-batch (groups=NUMBER in the run)."
        )
    if job.get("responses") is not None:
        return int(prompts), int(job["responses"])
    steps: dict[int, int] = {}
    for s in trace.spans:
        if s.stage in {each.name for each in pipeline.with_role("samples")[:1]}:
            steps[s.step] = steps.get(s.step, 0) + int(s.args.get("samples", 0))
    samples = statistics.median(steps.values()) if steps else 0
    return int(prompts), max(1, round(samples / prompts))


def _refuse(config: PlanConfig, source: str) -> None:
    """Rejects keys that contradict the measured times.

    Raises:
        ConfigError: such a key was given.
    """
    held = {"prompts": config.prompts, "responses": config.responses, "validation.samples": config.validation.samples}
    if given := [key for key, value in held.items() if value is not None]:
        raise ConfigError(
            f"{given[0]}: the trace of {source} says what it was; leave it out, or plan from a costs.yaml."
        )
    if config.validation.overlap is False:
        raise ConfigError("validation.overlap=false: training goes on beside a validation in every run; leave it out.")


def _repeated(
    pipeline: Pipeline, role: Literal["saves", "validates"], what: str, every: int, trace: Trace, source: str
) -> Pipeline:
    """Returns the pipeline with the stages of a role every given number of steps and at the end; with 0, without them.

    Raises:
        ConfigError: they did not run, so that their time is not known.
    """
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


def _whole(steps: dict[int, list[Span]]) -> dict[int, tuple[float, ...]]:
    """Returns the seconds of each part, for complete steps only; an interrupted run has incomplete ones.

    The time of a task that ran again has that in it which its process took to be rebuilt; so its step is left out if
    there are others.
    """
    whole = {step: parts for step, parts in steps.items() if len(parts) == parts[0].parts}
    usual = {step: parts for step, parts in whole.items() if not any(s.args.get("restarted") for s in parts)}
    return {step: tuple(s.end - s.begin for s in parts) for step, parts in (usual or whole).items()}


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
