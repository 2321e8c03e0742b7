"""Policies: presets, their numbers, and the graphs that expand makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.errors import PipelineError, PolicyError
from dataflow.graph import Carried, Latest, Pipeline, TaskId, stage
from dataflow.policy import PRESETS, SchedulingPolicy, check_batch, divisors, expand, preset
from dataflow.testing import check_trace, grpo_pipeline
from tests.rigs.costs import SteadyCosts
from tests.rigs.scheduling import simulate


def graph_of(policy: SchedulingPolicy, steps: int = 6, mini_batches: int = 4, groups: int | None = 16):
    return expand(grpo_pipeline(), policy, steps, mini_batches, groups=groups)


def task(graph, step: int, name: str, part: int = 0):
    return next(t for t in graph.unroll(step) if t.stage.name == name and t.id.part == part)


def test_presets_are_two_integers():
    assert {name: (preset(name, 4).split, preset(name, 4).max_staleness) for name in PRESETS} == {
        "baseline": (1, 0),
        "mini-batch": (4, 0),
        "off-policy": (1, 1),
        "both": (4, 1),
    }


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: preset("bth", 4),
            "unknown policy 'bth'; did you mean 'both'? "
            "(policies: baseline, mini-batch, off-policy, both, each also with +stream; a run also takes auto).",
        ),
        (lambda: SchedulingPolicy(split=0), "split=0; give 1 (wait for all rewards) or more parts."),
        (lambda: SchedulingPolicy(max_staleness=5), "max_staleness=5; give 0 (on-policy) to 4."),
        (lambda: SchedulingPolicy(order="idx"), "order='idx'; use 'arrival' or 'index'."),
        (
            lambda: check_batch(64, 3),
            "mini_batches=3 does not divide 64 prompt groups; use 1, 2, 4, 8, 16, 32 or 64.",
        ),
        (
            lambda: graph_of(SchedulingPolicy(split=3)),
            "policy.split=3 does not divide mini_batches=4; use policy.split=1, 2 or 4.",
        ),
        (
            lambda: graph_of(SchedulingPolicy(), groups=6),
            "mini_batches=4 does not divide 6 prompt groups; use 1, 2, 3 or 6.",
        ),
        (
            lambda: graph_of(SchedulingPolicy(2), groups=None),
            "split=2 needs the number of prompt groups in a step; give groups=.",
        ),
        (lambda: graph_of(SchedulingPolicy(), steps=2.5), "steps=2.5; give a whole number of 1 or more."),
    ],
)
def test_what_does_not_fit_is_one_exact_sentence(make, sentence):
    with pytest.raises(PolicyError) as error:
        make()
    assert str(error.value) == sentence


def test_a_whole_batch_estimator_refuses_a_split():
    pipeline = grpo_pipeline()
    why = {"batch": "it normalises over all groups", "group": None}

    @stage(writes="advantages", on="controller", splittable=True, whole_batch=lambda tools: why[tools["over"]])
    def advantage(responses, rewards, *, over): ...

    stages = [s if s.name != "advantage" else advantage.bind(over="batch") for s in pipeline.stages]
    pipeline = Pipeline(stages, inputs=["prompts"])
    expand(pipeline, preset("off-policy", 4), 2, 4, groups=16)
    with pytest.raises(PolicyError) as error:
        expand(pipeline, preset("both", 4), 2, 4, groups=16)
    assert str(error.value) == (
        "stage 'advantage' needs the whole batch (it normalises over all groups), but the policy splits it "
        "in 4 parts; use baseline, off-policy or another estimator."
    )
    stages = [s if s.name != "advantage" else advantage.bind(over="group") for s in pipeline.stages]
    expand(Pipeline(stages, inputs=["prompts"]), preset("both", 4), 2, 4, groups=16)


def test_a_splittable_stage_behind_one_that_cannot_be_split():
    @stage(writes="scaled", on="controller")
    def scale(rewards): ...

    @stage(writes="advantages", on="controller", splittable=True)
    def advantage(responses, scaled): ...

    stages = [s for s in grpo_pipeline().stages if s.name != "advantage"] + [scale, advantage]
    pipeline = Pipeline(stages, inputs=["prompts"])
    expand(pipeline, preset("baseline", 4), 2, 4, groups=16)
    with pytest.raises(PipelineError) as error:
        expand(pipeline, preset("both", 4), 2, 4, groups=16)
    assert str(error.value) == (
        "stage 'advantage' runs once a part, but reads from 'scale', which needs all parts of the step; "
        "make 'scale' splittable or use a policy with split=1."
    )


def test_a_split_that_nobody_forms():
    @stage(writes="b", on="gpu", per_mini_batch=True)
    def update(a): ...

    with pytest.raises(PipelineError, match="'update' runs once a mini-batch, but no stage forms the parts"):
        expand(Pipeline([update], inputs=["a"]), SchedulingPolicy(2), 2, 2, groups=2)
    with pytest.raises(PipelineError, match="a pipeline without stages has nothing to run; give it a stage"):
        expand(Pipeline([]), SchedulingPolicy(), 1)


def test_one_state_cannot_be_held_in_two_versions():
    @stage(writes="weights", on="gpu")
    def sync(x): ...

    @stage(writes="old", on="gpu")
    def reads_new(weights: Latest): ...

    @stage(writes="x", on="gpu")
    def reads_old(old, weights: Carried): ...

    pipeline = Pipeline([sync, reads_new, reads_old])
    expand(pipeline, SchedulingPolicy(), 3)
    with pytest.raises(PipelineError, match=r"the tasks wait for each other: .*; let one stage read"):
        expand(pipeline, SchedulingPolicy(max_staleness=1), 3)


@pytest.mark.parametrize("steps", [1, 7])
def test_a_deadlock_of_optional_stages_fails_in_a_short_run_too(steps):
    # 'late' and 'look' run on steps 6 and 7 both only when 7 is the last step: then they would wait for ever.
    @stage(writes="a", on="gpu")
    def first(a: Latest): ...

    @stage(writes="b", on="gpu")
    def second(a): ...

    @stage(writes="c", on="io", every=2)
    def late(a, b: Carried): ...

    @stage(writes="d", on="io", every=2)
    def look(a, b): ...

    with pytest.raises(PipelineError, match="the tasks wait for each other"):
        expand(Pipeline([first, second, late, look]), SchedulingPolicy(max_staleness=1), steps)


def test_the_window_reaches_as_far_as_tasks_wait():
    # The first write of 'c' waits for its readers, 'b', whose next write waits for 'a' of two steps on.
    @stage(writes="a", on="gpu")
    def a(b: Carried): ...

    @stage(writes="b", on="gpu")
    def b(a, c: Carried): ...

    @stage(writes="c", on="gpu")
    def c(a): ...

    pipeline = Pipeline([a, b, c])
    assert expand(pipeline, SchedulingPolicy(), 20).ahead == 1
    assert expand(pipeline, SchedulingPolicy(max_staleness=2), 20).ahead == 4
    assert expand(grpo_pipeline(), SchedulingPolicy(max_staleness=4), 20).ahead == 5


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 4), st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 3), st.data())
def test_grpo_expands_to_the_parts_and_versions_of_its_policy(staleness, mini_batches, per, data):
    split = data.draw(st.sampled_from(divisors(mini_batches)))
    groups = mini_batches * per
    graph = expand(grpo_pipeline(), SchedulingPolicy(split, staleness), 9, mini_batches, groups=groups)
    for step in range(1, 10):
        version = max(0, step - 1 - staleness)
        read = task(graph, step, "rollout").inputs[1]
        assert read.field == "weights_version"
        assert read.state
        assert read.sources == ((TaskId(version, "sync_weights"),) if version else ())
        updates = [t for t in graph.unroll(step) if t.stage.name == "actor_update"]
        assert len(updates) == mini_batches
        for m, update in enumerate(updates):
            part = m * split // mini_batches
            assert update.chosen_by == (TaskId(step, "reward_collect", part, split),)
            assert update.mini_batch == (m % (mini_batches // split), mini_batches // split)
        assert [t.take for t in graph.unroll(step) if t.stage.collects] == [groups // split] * split


@pytest.mark.parametrize("split", [1, 2])
def test_what_reads_the_parts_once_a_step_works_on_their_groups(split):
    @stage(writes="scaled", on="controller")
    def scale(rewards, prompts, held_out): ...

    @stage(writes="report", on="io")
    def report(scaled, responses, weights_version, val_responses): ...

    @stage(writes="val_responses", on="gpu")
    def validate(held_out, weights_version): ...

    @stage(on="io")
    def late(responses): ...

    stages = [*grpo_pipeline().stages, scale, report, validate, late.bind(after=["reward_collect"])]
    pipeline = Pipeline(stages, inputs=["prompts", "held_out"])
    graph = expand(pipeline, SchedulingPolicy(split), 2, 2, groups=8)
    parts = tuple(TaskId(2, "reward_collect", part, split) for part in range(split))
    for name in ("scale", "report"):
        assert task(graph, 2, name).chosen_by == parts
    # A validation only waits for the weights, and its groups share no more than numbers with the step's.
    for name in ("validate", "late", "gather_weights", "old_log_prob"):
        assert task(graph, 2, name).chosen_by == ()
    whole = {name: [i.field for i in task(graph, 2, name).inputs if i.whole] for name in ("scale", "report")}
    assert whole == {"scale": ["held_out"], "report": ["val_responses"]}


def test_a_state_is_overwritten_only_after_its_readers():
    graph = graph_of(SchedulingPolicy(4, 1))
    # Version 2 goes into the engine when rollout 3 (version 1) is done; version 1 when rollouts 1 and 2 are.
    assert TaskId(3, "rollout") in task(graph, 2, "sync_weights").deps
    assert {TaskId(1, "rollout"), TaskId(2, "rollout")} <= set(task(graph, 1, "sync_weights").deps)
    # The update may not start before the log-probs of its own step, nor before the last version is out.
    assert TaskId(1, "gather_weights") in task(graph, 2, "actor_update").deps
    assert TaskId(2, "old_log_prob") in task(graph, 2, "actor_update").deps
    assert TaskId(2, "actor_update", 0, 4) in task(graph, 2, "actor_update", 1).deps


def test_optional_stages_run_every_so_often_and_at_the_end():
    graph = expand(grpo_pipeline(val_every=3), preset("both", 4), 8, 4, groups=16)
    validated = [n for n in range(1, 9) if any(t.stage.name == "val_rollout" for t in graph.unroll(n))]
    assert validated == [3, 6, 8]
    assert TaskId(3, "val_rollout") in task(graph, 4, "sync_weights").deps
    assert TaskId(2, "val_rollout") not in task(graph, 3, "sync_weights").deps


def test_it_may_begin_at_any_step():
    graph = expand(grpo_pipeline(), preset("both", 4), 8, 4, groups=16, first=5)
    assert task(graph, 6, "rollout").inputs[1].sources == ()
    assert task(graph, 7, "rollout").inputs[1].sources == (TaskId(5, "sync_weights"),)
    assert {dep.step for t in graph.unroll(5) for dep in t.deps} <= {5, 6}


def test_streaming_starts_the_rewards_as_groups_finish():
    def run(name):
        graph = expand(grpo_pipeline(val_every=2), preset(name, 4), 4, 4, groups=16)
        costs = SteadyCosts(latency=20.0, groups=16, seconds={"reward_request": 0.0})
        trace, seen = simulate(graph, costs)
        check_trace(trace, graph)
        return trace, seen

    whole, _ = run("baseline")
    trace, seen = run("baseline+stream")
    # The first sixteenth of the rewards is requested after a sixteenth of the rollout (3 s).
    assert whole.wall - trace.wall == pytest.approx(4 * 3.0 * 15 / 16)
    first = next(s for s in trace.spans if s.task == "rollout[1]")
    assert first.args["emitted_s"] == pytest.approx([3.0 * (k + 1) / 16 for k in range(16)])
    asked = [s for s in trace.spans if s.stage == "reward_request" and s.step == 1]
    assert [s.begin for s in asked] == pytest.approx(first.args["emitted_s"])
    parts = [seen[TaskId(1, "reward_request", k, 16)] for k in range(16)]
    assert [p.groups for p in parts] == [(k,) for k in range(16)]
    assert parts[3].fields["responses"] == (TaskId(1, "rollout", 3, 16),)


@pytest.mark.parametrize(("groups", "mini_batches", "chunks"), [(1024, 4, 16), (24, 4, 12), (18, 18, 18), (7, 1, 7)])
def test_chunks_of_a_rollout_fill_the_mini_batches(groups, mini_batches, chunks):
    graph = expand(grpo_pipeline(), preset("both+stream", mini_batches), 2, mini_batches, groups=groups)
    assert graph.unroll(1)[0].emits == chunks
    assert graph.window(1, 1).number_of_nodes() == len(graph.unroll(1))
