"""Checkpoint stages: when they run, what they wait for, and that training does not wait for them."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.executors.virtual import VirtualExecutor
from dataflow.graph import Pipeline, TaskId, TaskInfo
from dataflow.policy import PRESETS, SchedulingPolicy, expand, preset
from dataflow.runner import Runner
from dataflow.running.saving.checkpoints import CheckpointStore
from dataflow.stages.checkpoint import FAILED, Snapshot, checkpoint_stages, write_checkpoint
from dataflow.testing import check_trace, grpo_pipeline
from dataflow.timeline.spans import Trace
from tests.rigs.costs import SteadyCosts
from tests.rigs.critic import hosted, ppo_pipeline
from tests.rigs.scheduling import simulate

STEPS = 9


def saving(every: int, steps: int = STEPS, plain: Pipeline | None = None) -> Pipeline:
    """The stages of GRPO, or of another pipeline, with those that save."""
    plain = plain or grpo_pipeline()
    stages = hosted(plain.stages)
    saves = checkpoint_stages(stages, every=every, store=None, steps=steps)  # type: ignore[arg-type]
    return Pipeline([*stages, *saves], plain.inputs, plain.resources)


@pytest.mark.parametrize(("staleness", "every"), [(0, 2), (1, 1), (2, 4)])
def test_the_samples_that_a_checkpoint_needs_are_kept_before_it(staleness: int, every: int) -> None:
    graph = expand(saving(every), SchedulingPolicy(2, staleness), STEPS, 4, groups=8)
    tasks = {t.id: t for step in range(1, STEPS + 1) for t in graph.unroll(step)}
    saved = [step for step in range(1, STEPS + 1) if step % every == 0 or step == STEPS]
    assert [i.step for i in tasks if i.stage == "write_checkpoint"] == saved
    needed = {late for step in saved for late in range(step + 1, min(step + staleness, STEPS) + 1)}
    assert {i.step for i in tasks if i.stage == "keep_samples"} == needed
    for step in saved:
        waits = {d.step for d in tasks[TaskId(step, "write_checkpoint")].deps if d.stage == "keep_samples"}
        assert waits == set(range(step + 1, min(step + staleness, STEPS) + 1))


@pytest.mark.slow
@settings(deadline=None)
@given(name=st.sampled_from([*PRESETS, "both+stream"]), every=st.integers(1, 5), write=st.floats(0.0, 200.0))
def test_training_never_waits_for_a_slow_disk(name: str, every: int, write: float) -> None:
    def trained(seconds: dict[str, float]) -> float:
        graph = expand(saving(every), preset(name, 4), STEPS, 4, groups=8)
        trace, _reads = simulate(graph, SteadyCosts(8.0, 8, seconds))
        check_trace(trace, graph)
        return max(s.end for s in trace.spans if s.stage == "sync_weights")

    saving_s = {"stage_checkpoint": 0.1, "keep_samples": 0.0, "write_checkpoint": 0.0}
    assert trained(saving_s | {"keep_samples": write, "write_checkpoint": write}) == trained(saving_s)


@settings(deadline=None)
@given(
    name=st.sampled_from([*PRESETS, "both+stream"]),
    staleness=st.integers(0, 2),
    after=st.integers(1, 150),
    latency=st.floats(0.0, 30.0),
)
def test_an_interrupted_run_ends_at_a_consistent_cut(name: str, staleness: int, after: int, latency: float) -> None:
    policy = replace(preset(name, 4), max_staleness=staleness, order="index")
    graph = expand(saving(3), policy, STEPS, 4, groups=8)
    costs = SteadyCosts(latency, 8, {"stage_checkpoint": 0.1, "keep_samples": 0.1, "write_checkpoint": 5.0})
    trace, cut = Trace(), list[int]()

    def between(*_items: object) -> None:
        if len(trace.spans) == after:
            cut.append(runner.end_early())
            runner.scheduler.check()

    runner = Runner(graph, VirtualExecutor(costs), inputs={"prompts": lambda step: step}, trace=trace)
    trace.sink = between
    asyncio.run(runner.run())
    if not cut:
        return
    (step,) = cut
    done = {(s.stage, s.step) for s in trace.spans}
    trained = Counter(s.step for s in trace.spans if s.stage == "actor_update")
    assert trained == dict.fromkeys(range(1, step + 1), 4), "whole steps, and none behind the cut"
    assert {at for stage, at in done if stage == "sync_weights"} == set(range(1, step + 1))
    if step:
        needed = range(1, min(step + staleness, STEPS) + 1)
        assert {at for stage, at in done if stage == "rollout"} >= set(needed)
        handles = {(name, at) for name, at in runner.handles(step) if name == "responses"}
        assert handles >= {("responses", at) for at in needed if at > step}
    saves = [at for at in range(3, step + 1) if at % 3 == 0]
    assert {at for stage, at in done if stage == "write_checkpoint"} == set(saves)


SAVING_S = {"stage_checkpoint": 0.1, "stage_critic_checkpoint": 0.1, "keep_samples": 0.1}
WRITING_S = {"write_checkpoint": 3.0, "write_critic_checkpoint": 5.0}
PPO_S = {"values": 0.5, "critic_update": 0.7}


@pytest.mark.slow
@settings(deadline=None)
@given(name=st.sampled_from([*PRESETS, "both+stream"]), every=st.integers(1, 3), gpus=st.sampled_from([1, 2]))
def test_all_that_is_trained_is_copied_between_two_updates(name: str, every: int, gpus: int) -> None:
    plain = ppo_pipeline()
    pipeline = saving(every, plain=Pipeline(plain.stages, plain.inputs, {**plain.resources, "gpu": gpus}))
    graph = expand(pipeline, preset(name, 4), STEPS, 4, groups=8)
    trace, _reads = simulate(graph, SteadyCosts(8.0, 8, SAVING_S | WRITING_S | PPO_S))
    check_trace(trace, graph)
    of = {stage: {s.step: s for s in trace.spans if s.stage == stage} for stage in {s.stage for s in trace.spans}}
    copies, further = of["stage_checkpoint"], of["stage_critic_checkpoint"]
    assert copies.keys() == further.keys() == of["write_critic_checkpoint"].keys() == of["write_checkpoint"].keys()
    for step, span in further.items():
        updates = [s for s in trace.spans if s.stage in ("actor_update", "critic_update")]
        assert max(s.end for s in updates if s.step <= step) <= copies[step].begin
        assert copies[step].end <= span.begin
        assert span.end <= min((s.begin for s in updates if s.step > step), default=span.end)
        written = of["write_critic_checkpoint"][step]
        assert span.end <= written.begin
        assert written.end <= of["write_checkpoint"][step].begin


class Toy:
    """A trained model whose state is a text, on a disk that may be full."""

    rank = 0

    def __init__(self, text: str = "weights", error: OSError | None = None) -> None:
        self.text = text
        self.error = error
        self.copies = 0

    async def snapshot(self, wait: bool) -> bool:
        if self.copies and not wait:
            return False
        self.copies += 1
        assert self.copies == 1
        return True

    async def settle(self) -> None:
        self.copies = 0

    async def write(self, directory: str) -> None:
        self.copies = 0
        if self.error is not None:
            raise self.error
        Path(directory).mkdir()
        Path(directory, "state").write_text(self.text)


class Saving:
    """Calls the stages that save an actor and a critic, which run in the order of their fields."""

    def __init__(self, directory: Path, actor: Toy, critic: Toy) -> None:
        self.store = CheckpointStore(directory)
        self.toys = {"trainer": actor, "critic": critic}
        stages = hosted(ppo_pipeline().stages)
        self.stages = Pipeline(
            [*stages, *checkpoint_stages(stages, every=1, store=self.store, steps=9)], ["prompts"]
        ).subset(
            s for s in ("stage_checkpoint", "stage_critic_checkpoint", "write_critic_checkpoint", "write_checkpoint")
        )

    async def step(self, step: int, *, writes: bool = True) -> dict[str, float]:
        """Saves a step, or with writes=False only copies; returns the metrics."""
        fields: dict[str, Any] = {"actor": step, "critic": -step, "weights_version": step}
        metrics: dict[str, float] = {}
        for s in self.stages.order:
            if writes or s.name.startswith("stage"):
                task = TaskInfo(step, s.name)
                options: dict[str, Any] = {**s.services, "service": self.toys[s.services["service"].name]}
                if "task" in inspect.signature(s.fn).parameters:
                    options["task"] = task
                value = await s.fn(*(fields[read.field] for read in s.reads), **options)
                fields |= dict.fromkeys(s.writes, value)
                metrics |= task.metrics
        return metrics


def test_a_checkpoint_holds_actor_and_critic(tmp_path: Path) -> None:
    saving = Saving(tmp_path, Toy("actor"), Toy("critic"))
    assert asyncio.run(saving.step(2))[FAILED] == 0
    found = saving.store.newest()
    assert found is not None
    assert found.states() == {"actor": 2, "critic": -2, "weights_version": 2}
    assert (found.service("trainer") / "state").read_text() == "actor"
    assert (found.service("critic") / "state").read_text() == "critic"


@pytest.mark.parametrize("fails", ["trainer", "critic"])
def test_a_checkpoint_without_one_of_them_is_none(tmp_path: Path, fails: str) -> None:
    saving = Saving(tmp_path, Toy(), Toy())
    assert asyncio.run(saving.step(1))[FAILED] == 0
    saving.toys[fails].error = OSError(28, "No space left on device", "x.distcp")
    assert asyncio.run(saving.step(2)) == {FAILED: 1.0}
    assert saving.store.whole() == [1]
    assert not list(tmp_path.glob(".step*")), "what was written of it is removed"
    saving.toys[fails].error = None
    assert asyncio.run(saving.step(3))[FAILED] == 0, "no copy is left that would be in the way of the next"
    assert saving.store.whole() == [1, 3]


def test_while_one_is_still_to_be_written_neither_is_copied(tmp_path: Path) -> None:
    saving = Saving(tmp_path, Toy(), Toy())
    asyncio.run(saving.step(1, writes=False))
    asyncio.run(saving.step(2, writes=False))
    assert [toy.copies for toy in saving.toys.values()] == [1, 1]
    saving.store.discard(1)


@pytest.mark.parametrize("missing", ["disk", "samples", None])
def test_a_checkpoint_has_the_samples_of_the_steps_behind_it_or_is_none(tmp_path: Path, missing: str | None) -> None:
    store, toy = CheckpointStore(tmp_path), Toy()
    store.keep(3, {"responses": [3]})

    def write(step: int) -> dict[str, float]:
        task = TaskInfo(step, "write_checkpoint", sampled_ahead=1)
        snapshot = Snapshot(store.begin(step), {"actor": step})
        asyncio.run(write_checkpoint(snapshot, service=toy, folder="trainer", store=store, steps=9, task=task))
        return task.metrics

    assert write(2)[FAILED] == 0
    toy.error = OSError(28, "No space left on device", "x.distcp") if missing == "disk" else None
    if missing is None:
        assert write(9)[FAILED] == 0, "the last step needs no samples of steps that never come"
        return
    assert write(4) == {FAILED: 1.0}
    assert store.whole() == [2]
    assert not list(tmp_path.glob(".step*")), "what was written of it is removed"
