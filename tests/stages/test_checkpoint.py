"""Checkpoint stages: when they run, what they wait for, and that training does not wait for them."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.errors import PipelineError
from dataflow.executors.virtual import VirtualExecutor
from dataflow.graph import Pipeline, TaskId, TaskInfo
from dataflow.policy import PRESETS, SchedulingPolicy, expand, preset
from dataflow.runner import Runner
from dataflow.running.saving.checkpoints import CheckpointStore
from dataflow.stages.checkpoint import FAILED, Snapshot, checkpoint_stages, write_checkpoint
from dataflow.testing import SteadyCosts, check_trace, grpo_pipeline, simulate
from dataflow.timeline.spans import Span, Trace

STEPS = 9


def saving(every: int, steps: int = STEPS) -> Pipeline:
    """The stages of GRPO with those that save."""
    plain = grpo_pipeline()
    stages = checkpoint_stages(plain.stages, every=every, trainer=None, store=None, steps=steps)  # type: ignore[arg-type]
    return Pipeline([*plain.stages, *stages], plain.inputs, plain.resources)


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("every", [1, 2, 4])
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
@given(name=st.sampled_from([*PRESETS, "both+stream"]), every=st.integers(1, 3))
def test_a_checkpoint_lies_between_the_sync_of_its_step_and_the_next_update(name: str, every: int) -> None:
    graph = expand(saving(every), preset(name, 4), STEPS, 4, groups=8)
    seconds = {"stage_checkpoint": 0.1, "keep_samples": 0.1, "write_checkpoint": 3.0}
    trace, _reads = simulate(graph, SteadyCosts(8.0, 8, seconds))
    for span in (s for s in trace.spans if s.stage == "stage_checkpoint"):
        synced = max(s.end for s in trace.spans if s.stage == "sync_weights" and s.step == span.step)
        later = [s.begin for s in trace.spans if s.stage == "actor_update" and s.step == span.step + 1]
        assert synced <= span.begin
        assert span.end <= min(later, default=span.end)


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

    def on_span(_span: Span) -> None:
        if len(trace.spans) == after:
            cut.append(runner.finish())
            runner.scheduler.check()

    runner = Runner(graph, VirtualExecutor(costs), inputs={"prompts": lambda step: step}, trace=trace, on_span=on_span)
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


def test_the_stage_ahead_of_another_needs_it() -> None:
    plain = grpo_pipeline()
    staging, keeping, writing = checkpoint_stages(plain.stages, every=2, trainer=None, store=None, steps=4)  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match=r"'keep_samples' is ahead of 'write_checkpoint', which is no other stage"):
        Pipeline([*plain.stages, keeping], plain.inputs)
    with pytest.raises(PipelineError, match="so give both the same every="):
        Pipeline([*plain.stages, staging, keeping, writing.bind(every=3)], plain.inputs)


class Toy:
    """A trainer whose state is a text, on a disk that may be full."""

    rank = 0

    def __init__(self, error: OSError | None = None) -> None:
        self.error = error

    async def write(self, directory: str) -> None:
        if self.error is not None:
            raise self.error
        Path(directory).mkdir()
        Path(directory, "state").write_text("weights")


def write(trainer: Toy, store: CheckpointStore, step: int, staleness: int = 0, steps: int = 9) -> dict[str, float]:
    task = TaskInfo(step, "write_checkpoint", max_staleness=staleness)
    snapshot = Snapshot(store.begin(step), {"actor": step})
    asyncio.run(write_checkpoint(snapshot, trainer=trainer, store=store, steps=steps, task=task))
    return task.metrics


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.keep(3, {"responses": [3]})
    metrics = write(Toy(), store, 2, staleness=1)
    assert metrics[FAILED] == 0
    assert metrics["checkpoint/bytes"] > 0
    found = store.newest()
    assert found is not None
    assert (found.step, found.states(), found.samples()) == (2, {"actor": 2}, {3: {"responses": [3]}})
    assert (found.trainer / "state").read_text() == "weights"


@pytest.mark.parametrize("step", [8, 9])
def test_the_last_steps_need_no_samples_of_steps_that_never_come(tmp_path: Path, step: int) -> None:
    store = CheckpointStore(tmp_path)
    store.keep(9, {"responses": []})
    assert write(Toy(), store, step, staleness=4)[FAILED] == 0


@pytest.mark.parametrize("missing", ["disk", "samples"])
def test_a_disk_that_fails_costs_one_checkpoint(tmp_path: Path, missing: str, caplog: Any) -> None:
    store = CheckpointStore(tmp_path)
    store.keep(3, {"responses": [3]})
    assert write(Toy(), store, 2, staleness=1)[FAILED] == 0
    error = OSError(28, "No space left on device", "x.distcp") if missing == "disk" else None
    assert write(Toy(error), store, 4, staleness=1) == {FAILED: 1.0}
    found = store.newest()
    assert found is not None
    assert found.step == 2
    assert not list(tmp_path.glob(".step*")), "what was written of it is removed"
