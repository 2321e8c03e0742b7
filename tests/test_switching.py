"""A change of policy in mid-run: the rules of correctness hold across it, and it drains nothing."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from dataflow.batch import Batch
from dataflow.errors import PipelineError, PolicyError
from dataflow.executors.base import Chunk, Done
from dataflow.graph import Pipeline, TaskGraph, TaskId, stage
from dataflow.policy import PolicySchedule, SchedulingPolicy, divisors, expand, preset
from dataflow.runner import Restored, Runner
from dataflow.testing import check_trace, grpo_pipeline
from dataflow.timeline.spans import Trace
from tests.rigs.costs import RandomCosts, SteadyCosts
from tests.rigs.scheduling import RecordingExecutor, Seen, random_graph, simulate

DICE = st.randoms(use_true_random=False)
QUICK = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=min(settings().max_examples, 12))
STEPS = 10
GROUPS = 12
BASELINE, BOTH = SchedulingPolicy(), preset("both", 4)


def other(graph: TaskGraph, dice: random.Random, most: int = 2) -> SchedulingPolicy:
    """Returns a random policy that may follow that of a graph; some do not fit its pipeline."""
    numbers = [
        s.mini_batches or graph.parts[s.name] // s.epochs for s in graph.pipeline.stages if s.per == "mini-batch"
    ]
    split = dice.choice(divisors(math.gcd(*numbers) if numbers else graph.groups or 1))
    return SchedulingPolicy(split, dice.randint(0, most), graph.order, dice.random() < 0.5)


class Interrupted(RecordingExecutor):
    """Calls a function between any two events: ends of tasks and chunks of a rollout that streams."""

    def __init__(self, costs: RandomCosts | SteadyCosts) -> None:
        super().__init__(costs)
        self.between: Callable[[], None] = lambda: None

    def put(self, value: Any) -> Any:
        return value

    async def events(self) -> AsyncIterator[Done | Chunk]:
        async for event in super().events():
            yield event
            self.between()


def switched(
    graph: TaskGraph,
    costs: RandomCosts | SteadyCosts,
    dice: random.Random,
    changes: int = 8,
    most: int = 2,
    restored: Restored | None = None,
) -> tuple[Trace, dict[TaskId, Seen], TaskGraph, list[tuple[int, SchedulingPolicy]]]:
    """Runs a graph and changes its policy at random times; checks the scheduler's invariants after every task.

    Returns:
        The trace, the inputs of every task, the graph as it was in the end, and the changes with their first steps.
    """
    executor, trace = Interrupted(costs), Trace(meta={"resources": dict(graph.pipeline.resources)})
    points: list[tuple[int, SchedulingPolicy]] = []
    tasks = sum(len(graph.unroll(step)) for step in range(graph.first, graph.steps + 1))
    # Each task has a span, and an event that is over; chunks add to these.
    moments = sorted(dice.randrange(3 * tasks) for _ in range(dice.randint(min(1, changes), changes)))
    now = itertools.count()

    def change(*_items: object) -> None:
        runner.scheduler.check()
        at = next(now)
        while moments and moments[0] <= at:
            del moments[0]
            policy = other(graph, dice, most)
            try:
                step = runner.switch(policy)
            except (PipelineError, PolicyError):
                continue  # nothing has changed
            points.extend([(step, policy)] if step is not None else [])
            runner.scheduler.check()

    executor.between = change
    inputs = dict.fromkeys(graph.pipeline.inputs, lambda step: None)
    # A span is recorded in the middle of an event: the runner has taken it, and the scheduler has not.
    trace.sink = change
    runner = Runner(graph, executor, inputs=inputs, trace=trace, restored=restored)
    asyncio.run(runner.run())
    return trace, executor.seen, runner.graph, points


@stage(writes="snapshot", on="gpu", role="saves", every=3)
def stage_checkpoint(actor, weights_version): ...


@stage(on="io", role="saves", every=3, ahead_of="write_checkpoint")
def keep_samples(responses): ...


@stage(on="io", role="saves", every=3)
def write_checkpoint(snapshot): ...


def grpo(policy: SchedulingPolicy, mini_batches: int = 4, saves: bool = False, **more: Any) -> TaskGraph:
    pipeline = grpo_pipeline(**more)
    if saves:
        stages = [*pipeline.stages, stage_checkpoint, keep_samples, write_checkpoint]
        pipeline = Pipeline(stages, inputs=["prompts"], resources=pipeline.resources)
    return expand(pipeline, policy, STEPS, mini_batches, groups=GROUPS)


def version(graph: TaskGraph, step: int) -> int:
    """Returns the version of the weights that a step samples with, by its policy."""
    return max(0, step - 1 - graph.staleness(step))


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


@pytest.mark.slow
@QUICK
@given(DICE, st.integers(0, 999), st.sampled_from(["arrival", "index"]), st.integers(1, 3))
def test_versions_are_those_of_each_steps_policy_and_each_group_trains_once(dice, seed, order, gpus):
    resources = {"gpu": gpus, "reward": None, "controller": 1, "io": 1}
    saves = dice.random() < 0.5
    graph = grpo(SchedulingPolicy(1, dice.randint(0, 2), order), saves=saves, val_every=3, resources=resources)
    trace, seen, after, _points = switched(graph, RandomCosts(seed, GROUPS, order), dice)
    check_trace(trace, after, busy=False)
    versions = []
    for step in range(1, STEPS + 1):
        sync = (TaskId(version(after, step), "sync_weights"),) if version(after, step) else ()
        assert seen[TaskId(step, "rollout")].fields["weights_version"] == sync
        before = (TaskId(step - 1, "actor_update", 3, 4),) if step > 1 else ()
        assert seen[TaskId(step, "actor_update", 0, 4)].fields["actor"] == before
        versions.append(version(after, step))
        assert sorted(g for _i, groups in trained(seen, [step]) for g in groups) == list(range(GROUPS))
    assert versions == sorted(versions)


# --- rules 1, 2 and 3 ----------------------------------------------------------------------------------------


def trained(seen: dict[TaskId, Seen], steps: Iterable[int]) -> list[tuple[TaskId, tuple[int, ...] | None]]:
    """Returns each optimizer step of some steps with its groups, in order."""
    found = sorted((i.step, i.part, i) for i in seen if i.stage == "actor_update" and i.step in steps)
    return [(i, seen[i].groups) for *_, i in found]


def updates(seen: dict[TaskId, Seen]) -> list[tuple[TaskId, tuple[int, ...] | None, object]]:
    """Returns each optimizer step with its groups and the version they were sampled from, in order."""
    versions = {i.step: what.fields["weights_version"] for i, what in seen.items() if i.stage == "rollout"}
    return [(i, groups, versions[i.step]) for i, groups in trained(seen, range(1, STEPS + 1))]


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


@pytest.mark.slow
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


# --- checkpoints, and a run that goes on from one ------------------------------------------------------------


def cut(graph: TaskGraph, step: int) -> Restored:
    """Returns what a checkpoint of a step holds: the states, and all that was sampled with older weights."""
    ahead = range(step + 1, min(STEPS, step + graph.sampled_ahead(step)) + 1)
    samples = {at: Batch(list(range(GROUPS)), {}, meta={"weights_version": version(graph, at)}) for at in ahead}
    states = {"actor": "restored", "weights_version": step}
    return Restored(states, {("responses", at): batch for at, batch in samples.items()})


@pytest.mark.slow
@QUICK
@given(DICE, st.integers(0, 999))
def test_a_checkpoint_holds_all_that_was_sampled_before_its_weights_were_synced(dice, seed):
    graph = grpo(SchedulingPolicy(1, dice.randint(0, 2)), saves=True)
    trace, _seen, after, _points = switched(graph, RandomCosts(seed, GROUPS), dice)
    check_trace(trace, after, busy=False)
    spans = {(s.stage, s.step): s for s in trace.spans if s.parts == 1}
    for step in (3, 6, 9):
        synced, written = spans["sync_weights", step], spans["write_checkpoint", step]
        for at in range(step + 1, STEPS + 1):
            assert (version(after, at) < step) == (at <= step + after.sampled_ahead(step))
            if version(after, at) < step:
                assert spans["rollout", at].end <= synced.begin
                assert spans["keep_samples", at].end <= written.begin


@pytest.mark.slow
@QUICK
@given(DICE, st.integers(0, 999), st.sampled_from([3, 6, 9]))
def test_a_run_that_resumes_ends_as_it_would_have(dice, seed, step):
    graph = grpo(SchedulingPolicy(1, dice.randint(0, 2), "index"), saves=True)
    _trace, seen, after, points = switched(graph, RandomCosts(seed, GROUPS, "index"), dice)
    schedule = PolicySchedule(((1, SchedulingPolicy(1, graph.staleness(1), "index")),))
    for since, policy in points:
        schedule = schedule.switched(since, policy)
    again = expand(graph.pipeline, schedule, STEPS, 4, GROUPS, first=step + 1)
    assert [again.staleness(at) for at in range(1, STEPS + 1)] == [after.staleness(at) for at in range(1, STEPS + 1)]
    restored = cut(again, step)
    _trace, resumed, _after, _none = switched(again, RandomCosts(seed + 1, GROUPS, "index"), dice, 0, 0, restored)
    late = range(step + 1, STEPS + 1)
    assert trained(resumed, late) == trained(seen, late)
    for at in late:
        assert sampled_with(resumed, restored, at) == sampled_with(seen, Restored(), at) == version(after, at)


def sampled_with(seen: dict[TaskId, Seen], restored: Restored, step: int) -> int:
    """Returns the version that a step's samples are of."""
    if ("responses", step) in restored.fields:
        return int(restored.fields["responses", step].meta["weights_version"])
    (read,) = seen[TaskId(step, "rollout")].fields["weights_version"] or (0,)
    return read.step if isinstance(read, TaskId) else read or 0


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
