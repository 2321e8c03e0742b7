"""Reward models that sleep: the order of the stages under every policy, on the virtual clock."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dataflow.errors import PipelineError
from dataflow.graph import Hosted, Pipeline, TaskGraph, stage
from dataflow.policy import PRESETS, expand, preset
from dataflow.rewards.models.sleeping import Sleeper
from dataflow.scheduler import Scheduler
from dataflow.stages.sampling.sleep import with_sleep
from dataflow.tasks.events import RunDone, Start, TaskFinished
from dataflow.testing import RandomCosts, SteadyCosts, check_trace, grpo_pipeline, simulate
from tests.rigs.golden import check_golden

SECONDS = {f"{prefix}{name}": 1.0 for prefix in ("", "val_") for name in ("wake_rewards", "sleep_rewards")}
ALL = [*PRESETS, "both+stream"]


def colocated(val_every: int | None = None) -> Pipeline:
    agent = Hosted("reward", "x:y")
    plain = grpo_pipeline(val_every)
    asks = {"requests", "collects"}
    stages = [
        replace(s, services={"agent": agent}) if s.role in asks or s.name == "val_score" else s for s in plain.stages
    ]
    return Pipeline(with_sleep(stages, "gpu", [Sleeper("rm", ["http://h"], 1.0)]), plain.inputs, plain.resources)


def graph_of(policy: str, steps: int = 4, val_every: int | None = 2, staleness: int | None = None) -> TaskGraph:
    chosen = preset(policy, 4)
    if staleness is not None:
        chosen = replace(chosen, max_staleness=staleness)
    return expand(colocated(val_every), chosen, steps, 4, groups=16)


@pytest.mark.parametrize("policy", ALL)
def test_nothing_runs_on_the_gpus_between_waking_and_sleeping(policy: str) -> None:
    graph = graph_of(policy, steps=6)
    trace, _ = simulate(graph, SteadyCosts(latency=12.0, seconds=SECONDS))
    check_trace(trace, graph)
    by = {(s.stage, s.step): s for s in trace.spans}
    for prefix, asks, collects in (("", "reward_request", "reward_collect"), ("val_", "val_score", "val_score")):
        for step in range(1, 7):
            if (wake := by.get((f"{prefix}wake_rewards", step))) is None:
                assert prefix
                continue
            sleep = by[f"{prefix}sleep_rewards", step]
            assert not [s for s in trace.on("gpu") if s.begin < sleep.begin and s.end > wake.end]
            assert all(s.begin >= wake.end for s in trace.spans if (s.stage, s.step) == (asks, step))
            assert all(s.end <= sleep.begin for s in trace.spans if (s.stage, s.step) == (collects, step))


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("policy", ALL)
def test_no_policy_stands_still(policy: str, staleness: int) -> None:
    graph = graph_of(policy, 8, 3, staleness)
    for seed in range(5):
        trace, _ = simulate(graph, RandomCosts(seed, 16))
        check_trace(trace, graph)


@pytest.mark.parametrize("policy", ["baseline", "both"])
def test_golden_timelines(policy: str) -> None:
    check_golden(graph_of(policy, 3, None), SteadyCosts(latency=6.0, seconds=SECONDS), f"colocated_{policy}", policy)


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("seed", range(8))
def test_a_run_that_ends_early_lets_the_models_sleep(policy: str, seed: int) -> None:
    dice = random.Random(seed)
    scheduler = Scheduler(graph_of(policy, 6, 2))
    running: list = []
    instructions, stop = scheduler.start(), dice.randrange(5, 60)
    for number in range(10_000):
        scheduler.check()
        running += [i.task for i in instructions if isinstance(i, Start)]
        if any(isinstance(i, RunDone) for i in instructions):
            return
        if number == stop:
            _step, instructions = scheduler.end_early()
            continue
        assert running, "it stands still"
        task = running.pop(dice.randrange(len(running)))
        if task.emits > 1:
            running.append(task)
            instructions = _emit(scheduler, task)
            running.remove(task)
            scheduler.check()
            running += [i.task for i in instructions if isinstance(i, Start)]
        groups = None
        if task.stage.collects:
            groups = tuple(range(task.id.part * task.take, (task.id.part + 1) * task.take))
        instructions = scheduler.handle(TaskFinished(task.id, 1.0, groups))


def _emit(scheduler: Scheduler, task) -> list:
    from dataflow.tasks.events import ChunkEmitted

    found = []
    each = 16 // task.emits
    for part in range(task.emits):
        groups = tuple(range(part * each, (part + 1) * each))
        found += scheduler.handle(ChunkEmitted(task.id._replace(part=part, parts=task.emits), groups))
    return found


@stage(writes="a", on="gpu")
def first(prompts): ...


@stage(writes="b", on="gpu")
def middle(a): ...


@stage(writes="c", on="gpu")
def last(b): ...


HOLD = first.bind(until="last")


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([HOLD, middle, last], "'middle' runs on 'gpu' and 'last' waits for it; let 'first' be after 'middle'"),
        ([HOLD], "'last' has ended, which is no other stage"),
        ([HOLD, middle.bind(on="controller"), last.bind(on="io")], "but that runs on 'io'; let both run on one"),
        ([HOLD, middle, last.bind(renamed={"b": "prompts"})], "'last' does not wait for it; give it after=['first']"),
        ([HOLD, middle, last.bind(every=2)], "let each of them run once on the same steps"),
        (
            [
                HOLD,
                middle.bind(on="controller").also_reads("d", "latest"),
                last,
                last.bind(name="d", renamed={"c": "d"}),
            ],
            "'middle' waits for 'd' of an earlier step, which 'd' writes on 'gpu'",
        ),
    ],
)
def test_a_hold_that_could_stand_still_is_refused(stages: list, said: str) -> None:
    with pytest.raises(PipelineError) as error:
        Pipeline(stages, ["prompts"])
    assert said in str(error.value)


def test_a_stage_that_asks_in_another_way_is_refused() -> None:
    plain = grpo_pipeline()
    agent = Hosted("reward", "x:y")
    stages = [replace(s, services={"agent": agent}) if s.name != "rollout" else s for s in plain.stages]
    with pytest.raises(PipelineError, match="asks for rewards while reward models with placement=colocated may sleep"):
        with_sleep(stages, "gpu", [])


def test_a_hold_survives_the_trace() -> None:
    pipeline = colocated()
    again = Pipeline.from_facts(pipeline.facts())
    assert again.by_name["wake_rewards"].until == "sleep_rewards"
    assert "holds gpu until sleep_rewards has ended" in again.explain()
