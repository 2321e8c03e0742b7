"""Training stages with epochs and their own numbers of mini-batches: order, groups, values, and what is refused."""

from __future__ import annotations

import re

import pytest

from dataflow.errors import PipelineError, PolicyError
from dataflow.graph import Latest, Pipeline, TaskGraph, TaskId, stage
from dataflow.planning.workload import rollout
from dataflow.policy import SchedulingPolicy, expand, preset
from dataflow.testing import check_trace, grpo_pipeline
from tests.rigs.costs import RandomCosts, SteadyCosts
from tests.rigs.golden import check_golden
from tests.rigs.scheduling import simulate


@stage(writes="values", on="gpu")
def values(responses, critic: Latest): ...


@stage(writes="critic", on="gpu", role="trains", per_mini_batch=True)
def critic_update(responses, values, advantages, critic: Latest): ...


def with_critic(actor: dict | None = None, critic: dict | None = None) -> Pipeline:
    stages = [s.bind(**(actor or {})) if s.name == "actor_update" else s for s in grpo_pipeline().stages]
    stages = [s.also_reads("values") if s.name == "advantage" else s for s in stages]
    return Pipeline([*stages, values, critic_update.bind(**(critic or {}))], inputs=["prompts"])


def graph_of(split: int = 1, order: str = "index", **options) -> TaskGraph:
    return expand(with_critic(**options), SchedulingPolicy(split, 0, order), 3, 4, groups=16)


def trained(graph: TaskGraph, name: str, seed: int = 0, step: int = 2) -> list[tuple[int, ...]]:
    """Returns the groups of each update of a step, in the order in which they ran."""
    trace, seen = simulate(graph, RandomCosts(seed, 16, graph.order))
    check_trace(trace, graph)
    spans = [s for s in trace.spans if s.stage == name and s.step == step]
    found = [seen[TaskId(s.step, name, s.part, s.parts)].groups for s in sorted(spans, key=lambda s: (s.begin, s.part))]
    assert all(groups is not None for groups in found)
    return found


@pytest.mark.parametrize("split", [1, 2, 4])
def test_each_mini_batch_is_used_for_all_epochs_before_the_next_whatever_the_policy(split):
    quarter = [tuple(range(4 * k, 4 * k + 4)) for k in range(4)]
    found = trained(graph_of(split, actor={"epochs": 2}), "actor_update")
    assert found == [groups for groups in quarter for _ in range(2)]


@pytest.mark.parametrize("split", [1, 4])
def test_in_order_of_arrival_each_group_is_trained_once_an_epoch(split):
    found = trained(graph_of(split, "arrival", actor={"epochs": 3}), "actor_update", seed=7)
    assert [groups for groups in found[::3] for _ in range(3)] == found
    assert sorted(g for groups in found[::3] for g in groups) == list(range(16))


def test_epochs_over_the_step_pass_over_all_groups_before_the_next_as_in_verl():
    quarter = [tuple(range(4 * k, 4 * k + 4)) for k in range(4)]
    assert trained(graph_of(actor={"epochs": 2, "epochs_over": "step"}), "actor_update") == quarter * 2
    with pytest.raises(PolicyError) as error:
        graph_of(2, actor={"epochs": 2, "epochs_over": "step"})
    assert str(error.value) == (
        "stage 'actor_update' passes over the whole step 2 times (epochs_over='step'), but split=2 trains on a part "
        "before the others are there; use baseline, off-policy or epochs_over='mini-batch'."
    )


@pytest.mark.parametrize(("split", "own"), [(1, 2), (2, 16)])
def test_a_critic_takes_its_own_number_of_mini_batches(split, own):
    graph = graph_of(split, critic={"mini_batches": own, "epochs": 2})
    assert graph.parts["critic_update"] == 2 * own
    each = 16 // own
    parts = [tuple(range(each * k, each * k + each)) for k in range(own)]
    assert trained(graph, "critic_update") == [groups for groups in parts for _ in range(2)]
    assert [len(groups) for groups in trained(graph, "actor_update")] == [4] * 4


def test_a_task_knows_its_epoch_and_the_next_step_continues_from_the_last_one():
    graph = graph_of(4, actor={"epochs": 2})
    assert [t.epoch for t in graph.unroll(1) if t.stage.name == "actor_update"] == [0, 1] * 4
    _trace, seen = simulate(graph, RandomCosts(0, 16, "index"))
    assert seen[TaskId(2, "old_log_prob")].fields["actor"] == (TaskId(1, "actor_update", 7, 8),)
    assert seen[TaskId(2, "gather_weights")].fields["actor"] == (TaskId(2, "actor_update", 7, 8),)


@stage(writes="loss", on="gpu", per_mini_batch=True)
def loss(advantages): ...


@stage(writes="report", on="gpu", per_mini_batch=True)
def report(loss): ...


def test_a_reader_gets_the_values_of_the_last_epoch_that_cover_its_groups():
    stages = [*grpo_pipeline().stages, loss.bind(mini_batches=6, epochs=2), report]
    graph = expand(Pipeline(stages, inputs=["prompts"]), SchedulingPolicy(), 1, 4, groups=12)
    sources = [t.inputs[0].sources for t in graph.unroll(1) if t.stage is report]
    assert [[i.part for i in part] for part in sources] == [[1, 3], [3, 5], [7, 9], [9, 11]]


@pytest.mark.parametrize("name", ["baseline", "both"])
def test_golden_timelines_of_a_critic(name):
    graph = expand(with_critic({"epochs": 2}, {"mini_batches": 8}), preset(name, 4), 3, 4, groups=16)
    costs = SteadyCosts(12.0, 16, {"values": 1.0, "critic_update": 0.5})
    check_golden(graph, costs, f"critic_{name}", name)


WRONG = {
    "a split that does not fit": (
        lambda: graph_of(4, critic={"mini_batches": 2}),
        PolicyError,
        "stage 'critic_update': policy.split=4 does not divide mini_batches=2; use policy.split=1 or 2.",
    ),
    "groups that do not fit": (
        lambda: graph_of(critic={"mini_batches": 3}),
        PolicyError,
        "stage 'critic_update': mini_batches=3 does not divide 16 prompt groups; use 1, 2, 4, 8 or 16.",
    ),
    "no epochs": (
        lambda: with_critic({"epochs": 0}),
        PipelineError,
        "stage 'actor_update': epochs=0; give a whole number of 1 or more.",
    ),
    "epochs of a stage that runs once": (
        lambda: Pipeline([rollout.bind(epochs=2)], inputs=["prompts", "weights_version"]),
        PipelineError,
        "stage 'rollout' runs once a step, so it takes neither mini_batches= nor epochs=; declare it with "
        "per_mini_batch=True.",
    ),
    "an unknown order": (
        lambda: with_critic({"epochs": 2, "epochs_over": "part"}),
        PipelineError,
        "stage 'actor_update': epochs_over='part'; use 'mini-batch' or 'step'.",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_sentence(case):
    make, kind, sentence = WRONG[case]
    with pytest.raises(kind, match=f"^{re.escape(sentence)}$"):
        make()


def test_a_plan_keeps_epochs_and_mini_batches():
    pipeline = with_critic({"epochs": 2}, {"mini_batches": 8, "epochs": 3, "epochs_over": "step"})
    again = Pipeline.from_facts(pipeline.facts())
    assert [(s.mini_batches, s.epochs, s.epochs_over) for s in again.with_role("trains")] == [
        (None, 2, "mini-batch"),
        (8, 3, "step"),
    ]
    graph = expand(again, preset("baseline", 4), 1, 4, groups=16)
    assert (graph.parts["actor_update"], graph.parts["critic_update"]) == (8, 24)
