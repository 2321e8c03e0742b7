"""A change of policy in mid-run: the rules of correctness hold across it, and it drains nothing."""

from __future__ import annotations

import asyncio
import math
import random

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from dataflow.errors import PipelineError, PolicyError
from dataflow.graph import TaskGraph, TaskId
from dataflow.policy import PolicySchedule, SchedulingPolicy, divisors, expand, preset
from dataflow.runner import Runner
from dataflow.testing import (
    RandomCosts,
    RecordingExecutor,
    Seen,
    SteadyCosts,
    check_trace,
    grpo_pipeline,
    random_graph,
    simulate,
)
from dataflow.timeline.spans import Trace

DICE = st.randoms(use_true_random=False)
QUICK = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=min(settings().max_examples, 12))
STEPS = 10
GROUPS = 12
BASELINE, BOTH = SchedulingPolicy(), preset("both", 4)


def other(graph: TaskGraph, dice: random.Random, most: int = 2) -> SchedulingPolicy:
    """Returns a random policy that may follow that of a graph; some do not fit its pipeline."""
    numbers = [
        s.mini_batches or graph.parts[s.name] // s.epochs for s in graph.pipeline.stages if s.grain == "mini-batch"
    ]
    split = dice.choice(divisors(math.gcd(*numbers) if numbers else graph.groups or 1))
    return SchedulingPolicy(split, dice.randint(0, most), graph.order, dice.random() < 0.5)


def switched(
    graph: TaskGraph, costs: RandomCosts | SteadyCosts, dice: random.Random, often: float = 0.04, most: int = 2
) -> tuple[Trace, dict[TaskId, Seen], TaskGraph, list[int]]:
    """Runs a graph and changes its policy at random times; checks the scheduler's invariants after every task.

    Returns:
        The trace, the inputs of every task, the graph as it was in the end, and the first steps of the policies.
    """
    executor, trace = RecordingExecutor(costs), Trace(meta={"resources": dict(graph.pipeline.resources)})
    points: list[int] = []

    def on_span(_span: object) -> None:
        runner.scheduler.check()
        if dice.random() < often:
            try:
                step = runner.switch(other(graph, dice, most))
            except (PipelineError, PolicyError):
                return  # nothing has changed
            points.extend([step] if step is not None else [])
            runner.scheduler.check()

    inputs = dict.fromkeys(graph.pipeline.inputs, lambda step: None)
    runner = Runner(graph, executor, inputs=inputs, trace=trace, on_span=on_span)
    asyncio.run(runner.run())
    return trace, executor.seen, runner.graph, points


def grpo(policy: SchedulingPolicy, mini_batches: int = 4, **more) -> TaskGraph:
    return expand(grpo_pipeline(**more), policy, STEPS, mini_batches, groups=GROUPS)


# --- rule 5, of any pipeline ---------------------------------------------------------------------------------


@QUICK
@given(DICE, st.integers(0, 999), st.sampled_from([0.0, 0.5]))
def test_any_run_keeps_every_rule_across_changes(dice, seed, grain):
    try:
        graph = random_graph(dice)
    except PipelineError:
        reject()
    trace, _seen, after, _points = switched(graph, RandomCosts(seed, graph.groups, graph.order, grain), dice)
    # What became ready by a change could not start before it; the scheduler's own check saw every free slot.
    check_trace(trace, after, busy=False)


@QUICK
@given(DICE, st.integers(0, 999), st.sampled_from(["arrival", "index"]), st.integers(1, 3))
def test_versions_are_those_of_each_steps_policy(dice, seed, order, gpus):
    resources = {"gpu": gpus, "reward": None, "controller": 1, "io": 1}
    graph = grpo(SchedulingPolicy(1, dice.randint(0, 2), order), val_every=3, resources=resources)
    trace, seen, after, _points = switched(graph, RandomCosts(seed, GROUPS, order), dice)
    check_trace(trace, after, busy=False)
    versions = []
    for step in range(1, STEPS + 1):
        version = max(0, step - 1 - after.staleness(step))
        sync = (TaskId(version, "sync_weights"),) if version else ()
        assert seen[TaskId(step, "rollout")].fields["weights_version"] == sync
        before = (TaskId(step - 1, "actor_update", 3, 4),) if step > 1 else ()
        assert seen[TaskId(step, "actor_update", 0, 4)].fields["actor"] == before
        versions.append(version)
    assert versions == sorted(versions)


@QUICK
@given(DICE, st.integers(0, 999))
def test_each_group_trains_once_a_step(dice, seed):
    graph = grpo(BASELINE)
    _trace, seen, _after, _points = switched(graph, RandomCosts(seed, GROUPS), dice)
    for step in range(1, STEPS + 1):
        trained = [g for i, what in seen.items() if (i.stage, i.step) == ("actor_update", step) for g in what.groups]
        assert sorted(trained) == list(range(GROUPS))


# --- rules 1, 2 and 3 ----------------------------------------------------------------------------------------


def updates(seen: dict[TaskId, Seen]) -> list[tuple[TaskId, tuple[int, ...] | None, object]]:
    """Returns each optimizer step with its groups and the version they were sampled from, in order."""
    found = sorted((i.step, i.part, i) for i in seen if i.stage == "actor_update")
    return [(i, seen[i].groups, seen[TaskId(i.step, "rollout")].fields["weights_version"]) for *_, i in found]


@QUICK
@given(DICE, st.integers(0, 999), st.integers(0, 999))
def test_changes_of_split_and_streaming_alone_leave_the_optimizer_steps_as_they_are(dice, seed, base_seed):
    graph = grpo(SchedulingPolicy(order="index"))
    _trace, base = simulate(graph, RandomCosts(base_seed, GROUPS, "index"))
    trace, seen, after, _points = switched(graph, RandomCosts(seed, GROUPS, "index"), dice, most=0)
    check_trace(trace, after, busy=False)
    assert updates(seen) == updates(base)
    for step in range(2, STEPS + 1):  # strictly on-policy
        assert seen[TaskId(step, "rollout")].fields["weights_version"] == (TaskId(step - 1, "sync_weights"),)


@QUICK
@given(DICE, st.integers(0, 999), st.integers(0, 999))
def test_the_same_schedule_gives_the_same_optimizer_steps_whenever_rewards_arrive(dice, seed, again):
    graph = grpo(SchedulingPolicy(order="index"))
    _trace, seen, after, _points = switched(graph, RandomCosts(seed, GROUPS, "index"), dice)
    schedule = PolicySchedule(
        tuple((step, SchedulingPolicy(1, after.staleness(step), "index")) for step in range(1, STEPS + 1))
    )
    _trace, other_order = simulate(
        expand(graph.pipeline, schedule, STEPS, 4, GROUPS), RandomCosts(again, GROUPS, "index")
    )
    assert updates(other_order) == updates(seen)


# --- what a change costs -------------------------------------------------------------------------------------


def at_end_of(step: int, graph: TaskGraph, policy: SchedulingPolicy, latency: float = 8.0) -> tuple[Trace, int | None]:
    """Runs a graph and changes its policy at the end of a step; returns the trace and the policy's first step."""
    trace, found = Trace(meta={"resources": dict(graph.pipeline.resources)}), []

    def on_step(done: int, _metrics: object) -> None:
        if done == step:
            found.append(runner.switch(policy))

    inputs = dict.fromkeys(graph.pipeline.inputs, lambda step: None)
    runner = Runner(graph, RecordingExecutor(SteadyCosts(latency, GROUPS)), inputs=inputs, trace=trace, on_step=on_step)
    asyncio.run(runner.run())
    return trace, found[0]


def test_the_next_step_is_the_first_under_the_new_policy_and_nothing_waits_for_it():
    plain, whole = (simulate(grpo(policy), SteadyCosts(8.0, GROUPS))[0] for policy in (BASELINE, BOTH))
    each, faster = plain.wall / STEPS, whole.wall / STEPS
    # When a step is reported, the rollout of the next one has started; under `both` also that of the one after it.
    trace, first = at_end_of(4, grpo(BASELINE), BOTH)
    assert first == 6
    assert trace.wall <= 5 * each + (STEPS - 5) * faster + 1e-9
    back, first = at_end_of(4, grpo(BOTH), BASELINE)
    assert first == 7
    assert back.wall <= 6 * faster + (STEPS - 6) * each + 1e-9
    for step in (4, 6):
        begins = [s.begin for s in trace.spans if (s.stage, s.step) == ("rollout", step + 1)]
        synced = [s.end for s in trace.spans if (s.stage, s.step) == ("sync_weights", step)]
        assert (begins < synced) == (step == 6)  # step 6 is the first whose wait hides a rollout


def test_staleness_rises_by_one_a_step_and_falls_at_once():
    schedule = PolicySchedule(((1, BASELINE),)).switched(4, SchedulingPolicy(2, 3)).switched(9, BASELINE)
    assert [schedule.at(step).max_staleness for step in range(1, 11)] == [0, 0, 0, 1, 2, 3, 3, 3, 0, 0]
    assert [schedule.at(step).split for step in (3, 4, 8, 9)] == [1, 2, 2, 1]
    graph = expand(grpo_pipeline(), schedule, STEPS, 4, GROUPS)
    assert [graph.sampled_ahead(step) for step in range(1, 11)] == [0, 0, 3, 3, 3, 2, 1, 0, 0, 0]


def test_what_does_not_fit_is_refused_and_changes_nothing():
    with pytest.raises(PolicyError, match="order='index' cannot follow order='arrival'"):
        PolicySchedule(((1, BASELINE),)).switched(2, SchedulingPolicy(order="index"))
    with pytest.raises(PolicyError, match="does not divide"):
        at_end_of(3, grpo(BASELINE), SchedulingPolicy(split=3))


def test_after_the_last_step_has_begun_no_step_is_left():
    _trace, first = at_end_of(STEPS, grpo(BASELINE), BOTH)
    assert first is None
    _trace, first = at_end_of(STEPS - 2, grpo(BASELINE), BOTH)
    assert first == STEPS
