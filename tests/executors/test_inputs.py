"""Inputs are fetched once, one step ahead; what their function raises is an error of the step that needs them."""

from __future__ import annotations

import asyncio

import pytest

from dataflow.errors import DataError, RunError
from dataflow.executors.inputs import StepInputs
from dataflow.executors.parts import Parts
from dataflow.executors.virtual import VirtualExecutor
from dataflow.policy import expand, preset
from dataflow.runner import Runner
from dataflow.testing import RandomCosts, grpo_pipeline
from dataflow.timeline.spans import Trace

STEPS = 4


def graph_of(policy: str = "baseline", **options):
    return expand(grpo_pipeline(**options), preset(policy, 4), STEPS, 4, groups=16)


def drive(graph, function) -> list[tuple[str, int]]:
    """Runs a graph; returns the fetches and the ends of spans, in order."""
    seen: list[tuple[str, int]] = []

    def fetch(step: int):
        seen.append(("fetch", step))
        return function(step)

    runner = Runner(
        graph,
        VirtualExecutor(RandomCosts(0)),
        inputs={"prompts": fetch},
        trace=Trace(),
        on_span=lambda span: seen.append((span.stage, span.step)),
    )
    asyncio.run(runner.run())
    return seen


@pytest.mark.parametrize("policy", ["baseline", "mini-batch", "off-policy", "both"])
def test_the_inputs_of_a_step_are_there_before_the_rollout_of_the_step_before_ends(policy):
    seen = drive(graph_of(policy), lambda step: None)
    assert [step for what, step in seen if what == "fetch"] == [1, 2, 3, 4]
    for step in range(2, STEPS + 1):
        assert seen.index(("fetch", step)) < seen.index(("rollout", step - 1))


def test_what_is_raised_ahead_ends_the_run_only_where_the_step_begins_and_is_raised_once():
    calls: list[int] = []

    def prompts(step: int):
        calls.append(step)
        if step == 3:
            raise DataError("row 7 cannot be read")

    spans: list[tuple[str, int]] = []
    runner = Runner(
        graph_of(),
        VirtualExecutor(RandomCosts(0)),
        inputs={"prompts": prompts},
        trace=Trace(),
        on_span=lambda span: spans.append((span.stage, span.step)),
    )
    with pytest.raises(DataError, match="row 7 cannot be read"):
        asyncio.run(runner.run())
    assert calls == [1, 2, 3]
    assert ("actor_update", 2) in spans  # the step before was trained


def test_an_input_that_no_stage_of_the_next_step_reads_is_not_fetched():
    pipeline = grpo_pipeline(val_every=2)
    assert {"prompts"} <= set(pipeline.inputs)
    fetched: list[tuple[str, int]] = []
    graph = expand(pipeline, preset("both", 4), STEPS, 4, groups=16)
    inputs = {name: lambda step, name=name: fetched.append((name, step)) for name in pipeline.inputs}
    asyncio.run(Runner(graph, VirtualExecutor(RandomCosts(0)), inputs=inputs, trace=Trace()).run())
    read = {
        (item.field, step)
        for step in range(1, STEPS + 1)
        for task in graph.unroll(step)
        for item in task.inputs
        if not item.sources and not item.state
    }
    assert sorted(fetched) == sorted(read)


def test_nothing_is_fetched_after_the_last_step():
    fetched: list[int] = []
    drive(graph_of("both"), fetched.append)
    assert fetched == [1, 2, 3, 4]


def inputs_of(function, handles=()):
    return StepInputs({"prompts": function}, Parts(graph_of()), lambda value: ("handle", value), dict(handles))


def test_a_released_step_holds_nothing():
    fetched: list[int] = []
    inputs = inputs_of(lambda step: fetched.append(step) or step)
    assert inputs.find("prompts", 1) == inputs.find("prompts", 1) == [("handle", 1)]
    inputs.release(1)
    assert inputs.find("prompts", 1) == [("handle", 1)]
    assert fetched == [1, 1]


def test_handles_of_another_runner_and_unknown_fields():
    inputs = inputs_of(lambda step: step, {("prompts", 2): "other"})
    assert inputs.find("prompts", 2) == ["other"]
    assert inputs.find("held_out", 2) == []
    inputs.fetch_ahead(3, ["prompts", "held_out"])
    assert inputs.find("prompts", 3) == [("handle", 3)]


def test_an_exception_of_the_users_is_named_and_kept():
    def broken(step: int):
        raise KeyError("question")

    inputs = inputs_of(broken)
    inputs.fetch_ahead(5, ["prompts"])
    with pytest.raises(RunError, match=r"input 'prompts' of step 5: its function raised KeyError: 'question'") as found:
        inputs.find("prompts", 5)
    assert isinstance(found.value.__cause__, KeyError)
