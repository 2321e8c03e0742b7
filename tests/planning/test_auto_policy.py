"""A run that plans itself: the window of its trace, what is predicted from it, and the decision."""

from __future__ import annotations

import random

import pytest

from dataflow import simulate as simulate_costs
from dataflow.config.base import PipelineConfig
from dataflow.distribution import Distribution
from dataflow.errors import DataError
from dataflow.graph import Pipeline, stage
from dataflow.planning.auto import PolicyChooser, candidates, forecast, latency_changed, opening, window
from dataflow.planning.simulation import simulate
from dataflow.planning.workload import Modelled, Rewards, Workload, grpo
from dataflow.policy import SchedulingPolicy, expand
from dataflow.stage import Carried, Latest
from dataflow.timeline.spans import Mark, Trace

SECONDS = {"rollout": 4.0, "old_log_prob": 1.0, "actor_update": 4.0, "sync_weights": 0.5}
BASELINE, SPLIT = SchedulingPolicy(), SchedulingPolicy(4)
STALE, BOTH = SchedulingPolicy(1, 1), SchedulingPolicy(4, 1)
ALL = [BASELINE, SPLIT, STALE, BOTH]


def workload(latency: float = 10.0, steps: int = 8) -> Workload:
    times = {name: Modelled(Distribution("constant", seconds)) for name, seconds in SECONDS.items()}
    return Workload("test", grpo(False), steps, 8, 2, 4, times, Rewards(Distribution("constant", latency), 16))


def trace_of(latencies: list[list[float]], resource: str = "reward") -> Trace:
    """Returns the trace of a run under the baseline whose steps have rewards with these latencies."""
    load = workload(steps=len(latencies))
    trace = simulate(load, BASELINE)[0]
    job = {"pipeline": load.pipeline.facts(), "prompts": 8, "responses": 2, "mini_batches": 4, "concurrency": 16}
    trace.meta |= {"job": job, "status": "running"}
    for step, of in enumerate(latencies, 1):
        trace.marks += [Mark("reward", resource, 0.0, seconds, {"step": step}) for seconds in of]
    return trace


def steady(steps: int = 8, latency: float = 10.0) -> Trace:
    return trace_of([[latency] * 16] * steps)


# --- window -----------------------------------------------------------------------------------------------------------


def test_a_window_has_the_last_steps_numbered_from_one() -> None:
    trace = steady(30)
    for since, last, steps in ((2, 6, 5), (1, 30, 12), (28, 30, 3), (30, 30, 1)):
        found = window(trace, since, last)
        assert found is not None
        assert {s.step for s in found.spans} == {m.args["step"] for m in found.marks} == set(range(1, steps + 1))
        assert found.meta["steps"] == steps
    assert window(trace, 31, 31) is None


@pytest.mark.parametrize("sigma", [0.0, 0.4])
@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
def test_a_step_whose_rewards_took_another_time_shows_beyond_chance(factor: float, sigma: float) -> None:
    dice = random.Random(0)
    steps = [[mean * dice.lognormvariate(0, sigma) for _ in range(32)] for mean in [10.0] * 7 + [10.0 * factor] * 3]
    trace = trace_of(steps)
    assert [latency_changed(trace, 2, step) for step in range(3, 9)] == [False] * 5 + [factor != 1]
    assert not latency_changed(trace, 8, 9), "as that before"


def test_a_change_of_one_agent_shows_beside_another_that_is_quick() -> None:
    slow, quick = trace_of([[1.0] * 32] * 6 + [[8.0] * 32] * 4), trace_of([[0.0005, 0.0006] * 16] * 10, "rule")
    both = Trace(slow.spans, sorted([*slow.marks, *quick.marks], key=lambda m: m.args["step"]), meta=slow.meta)
    assert [latency_changed(both, 2, step) for step in (6, 7)] == [False, True]


# --- forecast ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_forecast_from_a_baseline_is_what_each_policy_then_takes() -> None:
    found = window(steady(), 2, 8)
    assert found is not None
    seconds = dict(zip([*ALL, SchedulingPolicy(3)], forecast(found, [*ALL, SchedulingPolicy(3)]), strict=True))
    assert seconds[BASELINE] == pytest.approx(4 + 1 + 4 + 0.5 + 10 - 1, rel=0.01), "log-probs run during the wait"
    for policy in ALL:
        ends = [simulate(workload(steps=steps), policy)[0].wall for steps in (10, 30)]
        assert seconds[policy] == pytest.approx((ends[1] - ends[0]) / 20, rel=0.01)
    assert seconds[SchedulingPolicy(3)] is None, "3 parts do not divide 4 mini-batches"
    slow = forecast(found, [BASELINE], limit=4)[0]
    assert slow == pytest.approx(4 + 4 * 10 + 4 + 0.5, rel=0.01), "the limit in force"
    del found.meta["job"]
    with pytest.raises(DataError, match="does not say what its pipeline"):
        forecast(found, ALL)


@stage(writes="responses", on="gpu", role="samples")
def draw(prompts: object, version: Carried) -> None: ...


@stage(writes="rewards", on="reward", role="collects")
def judge(responses: object) -> None: ...


@stage(writes="actor", on="gpu", role="trains", per_mini_batch=True)
def update(responses: object, rewards: object, actor: Latest) -> None: ...


@stage(writes="version", on="gpu", role="syncs")
def sync(actor: object) -> None: ...


@pytest.mark.parametrize("groups", [4, None])
def test_a_pipeline_of_ones_own_whose_rewards_no_agent_collects_is_predicted(groups: int | None) -> None:
    pipeline = Pipeline([draw, judge, update, sync], inputs=["prompts"])
    seconds = {"draw": 1.0, "judge": 8.0, "update": 2.0, "sync": 0.0}
    trace = simulate_costs(expand(pipeline, BASELINE, 6, 2, groups=4), seconds)
    trace.meta["job"] |= PipelineConfig(groups=groups, mini_batches=2).job()
    policies = candidates(pipeline, 2, groups, limit=1, order="arrival")
    found = window(trace, 2, 6)
    assert found is not None
    predicted = dict(zip(policies, forecast(found, policies), strict=True))
    assert predicted[BASELINE] == pytest.approx(11.0)
    assert (predicted[STALE] or 99.0) < 8.0


# --- decision ---------------------------------------------------------------------------------------------------------


def test_candidates_are_those_that_the_pipeline_and_the_limit_allow() -> None:
    pipeline = grpo(False)
    found = candidates(pipeline, 4, 8, limit=1, order="index")
    assert len(found) == len(set(found)) == 12
    assert (found[0], found[-1]) == (SchedulingPolicy(1, 0, "index"), SchedulingPolicy(4, 1, "index", True))
    assert {p.max_staleness for p in candidates(pipeline, 4, 8, limit=0, order="index")} == {0}
    assert {p.stream_rollout for p in candidates(pipeline, 4, 8, limit=1, order="index", streams=False)} == {False}
    assert {p.split for p in candidates(pipeline, 64, 64, limit=0, order="index")} == {1, 16, 32, 64}
    assert {p.split for p in candidates(pipeline, 4, None, limit=0, order="index")} == {1}, "parts need groups"


def test_a_run_begins_with_the_most_overlap() -> None:
    schedule = opening([*ALL, SchedulingPolicy(4, 2)])
    assert [(step, p.split, p.max_staleness) for step, p in schedule.changes] == [(1, 1, 0), (2, 4, 1), (3, 4, 2)]
    assert opening([BASELINE]).changes == ((1, BASELINE),)


def chooser(current: SchedulingPolicy = BOTH) -> PolicyChooser:
    return PolicyChooser(ALL, current, since=2, shows=4)


def times(baseline: float, split: float, stale: float, both: float) -> dict[SchedulingPolicy, float]:
    return dict(zip(ALL, (baseline, split, stale, both), strict=True))


def test_it_plans_every_few_steps_once_some_show_the_policy_and_at_once_after_a_change_of_latency() -> None:
    trace = trace_of([[1.0] * 16] * 14 + [[4.0] * 16] * 10)
    run, planned = chooser(), []
    for step in range(1, 25):
        if run.ended(step, 10.0 * step, trace):
            planned.append(step)
            run.planned(step)
    assert planned == [7, 12, 15, 20]
    assert run.since == 15


def test_it_takes_the_least_stale_of_those_about_as_fast_and_most_parts_of_equals() -> None:
    for known, wanted in (
        (times(10, 8.02, 8, 8), SPLIT),
        (times(10, 10, 10, 10), SPLIT),
        (times(8, 8.03, 8, 8), BASELINE),
        (times(10, 9, 8, 8), None),
        (times(10, 9, 9, 9.2), SPLIT),
        (times(10, 10, 8, 8.2), None),
        (times(10, 10, 8, 8.3), STALE),
    ):
        assert chooser().decide(known) == wanted, known
    assert chooser(SPLIT).decide(times(10, 8.2, 8, 8)) is None, "a gain that is not worth a change"
    assert chooser(SPLIT).decide(times(10, 8.3, 8, 8)) == BOTH
    assert chooser().decide({SPLIT: 1.0}) is None, "without a prediction of the present policy"


def test_a_policy_that_takes_longer_than_predicted_is_left_and_not_taken_again() -> None:
    run, at, trace = chooser(), 0.0, steady(40)
    known = times(12, 10, 11, 10)  # 12 s of both policies' 10 s is a bias of all predictions; 18 s of one is not
    taken = []
    for step in range(1, 31):
        at += 12.0 if run.current == BOTH else 18.0
        if run.ended(step, at, trace):
            run.planned(step)
            if (policy := run.decide(known)) is not None:
                run.switched(step + 1, policy)
                taken.append(policy)
    assert taken == [SPLIT, BOTH]
