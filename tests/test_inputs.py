"""Inputs are fetched once, those that may be one step ahead; what is raised is an error of the step that needs them."""

from __future__ import annotations

import asyncio

import pytest

from dataflow.errors import DataError, RunError
from dataflow.executors.inline import InlineExecutor
from dataflow.executors.virtual import VirtualExecutor
from dataflow.graph import Carried, Latest, Pipeline, stage
from dataflow.policy import SchedulingPolicy, expand, preset
from dataflow.runner import Ahead, Runner
from dataflow.testing import grpo_pipeline
from dataflow.timeline.spans import Trace
from tests.rigs.costs import RandomCosts

STEPS = 4


def graph_of(policy: str = "baseline", **options):
    return expand(grpo_pipeline(**options), preset(policy, 4), STEPS, 4, groups=16)


def drive(graph, function, ahead=Ahead) -> list[tuple[str, int]]:
    """Runs a graph; returns the fetches and the ends of spans, in order."""
    seen: list[tuple[str, int]] = []

    def fetch(step: int):
        seen.append(("fetch", step))
        return function(step)

    trace = Trace(sink=lambda span, *_: seen.append((span.stage, span.step)))
    runner = Runner(graph, VirtualExecutor(RandomCosts(0)), inputs={"prompts": ahead(fetch)}, trace=trace)
    asyncio.run(runner.run())
    return seen


@pytest.mark.parametrize("policy", ["baseline", "both"])
def test_the_inputs_of_a_step_are_there_before_the_rollout_of_the_step_before_ends(policy):
    seen = drive(graph_of(policy), lambda step: None)
    assert [step for what, step in seen if what == "fetch"] == [1, 2, 3, 4]
    for step in range(2, STEPS + 1):
        assert seen.index(("fetch", step)) < seen.index(("rollout", step - 1))


@pytest.mark.parametrize("ahead", [Ahead, lambda function: function])
def test_what_is_raised_ends_the_run_where_the_step_begins_and_is_raised_once(ahead):
    calls: list[int] = []
    done: list[int] = []

    def prompts(step: int):
        calls.append(step)
        if step == 3:
            raise DataError("row 7 cannot be read")

    runner = Runner(
        graph_of(),
        VirtualExecutor(RandomCosts(0)),
        inputs={"prompts": ahead(prompts)},
        trace=Trace(),
        on_step=lambda step, metrics: done.append(step),
    )
    with pytest.raises(DataError, match="row 7 cannot be read"):
        asyncio.run(runner.run())
    assert calls == [1, 2, 3]
    assert done == [1, 2], "the step before is done and reported"


def test_a_users_own_input_is_fetched_when_its_step_begins():
    seen = drive(graph_of(), lambda step: None, ahead=lambda function: function)
    for step in range(2, STEPS + 1):
        last = max(at for at, what in enumerate(seen) if what == ("actor_update", step - 1))
        assert seen.index(("fetch", step)) > last


@stage(on="io", every=2)
def look(table): ...


def test_inputs_that_draw_from_one_source_match():
    """A user's fields are fetched in the order of the stages that read them, whatever their names."""
    rows = iter(range(100))
    pairs: list[tuple[int, int]] = []

    @stage(writes="drawn", on="gpu", role="samples")
    def draw(prompts, version: Carried):
        return prompts

    @stage(writes="version", on="gpu", role="trains")
    def train(drawn, answers, version: Latest):
        pairs.append((drawn, answers))
        return 0

    graph = expand(Pipeline([draw, train], inputs=["prompts", "answers"]), SchedulingPolicy(), STEPS)
    inputs = dict.fromkeys(["prompts", "answers"], lambda step: next(rows))
    asyncio.run(Runner(graph, InlineExecutor(), inputs=inputs, trace=Trace()).run())
    assert pairs == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_an_input_that_no_stage_of_the_next_step_reads_is_not_fetched():
    fetched: list[int] = []
    pipeline = Pipeline([*grpo_pipeline().stages, look], inputs=["prompts", "table"])
    graph = expand(pipeline, preset("both", 4), STEPS, 4, groups=16)
    inputs = {"prompts": Ahead(lambda step: None), "table": Ahead(fetched.append)}
    asyncio.run(Runner(graph, VirtualExecutor(RandomCosts(0)), inputs=inputs, trace=Trace()).run())
    assert fetched == [2, 4]


def test_a_value_that_cannot_be_made_or_handed_on_is_named():
    class Refusing(VirtualExecutor):
        def put(self, value):
            raise TypeError("cannot pickle")

    def ends(step):
        raise SystemExit("no more")

    for prompts, words in (
        (lambda step: object(), r"its value cannot be copied .TypeError: cannot"),
        (ends, "its function raised SystemExit: no more"),
    ):
        runner = Runner(graph_of(), Refusing(RandomCosts(0)), inputs={"prompts": prompts}, trace=Trace())
        with pytest.raises(RunError, match=f"input 'prompts' of step 1: {words}"):
            asyncio.run(runner.run())
