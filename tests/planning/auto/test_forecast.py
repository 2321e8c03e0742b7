"""The window of a run's own trace, and what is predicted from it."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow import simulate as simulate_costs
from dataflow.config.base import PipelineConfig
from dataflow.distribution import Distribution
from dataflow.graph import Pipeline, stage
from dataflow.planning.auto.forecast import Forecast, candidates, forecast, steady_s
from dataflow.planning.auto.window import Latency, latency_changed, window
from dataflow.planning.rewards import Rewards
from dataflow.planning.simulation.simulate import simulate
from dataflow.planning.workload import Measured, Modelled, Workload, grpo
from dataflow.policy import SchedulingPolicy, expand
from dataflow.stage import Carried, Latest
from dataflow.timeline.spans import Mark, Span, Trace

SECONDS = {"rollout": 4.0, "old_log_prob": 1.0, "actor_update": 4.0, "sync_weights": 0.5}
BASELINE, BOTH = SchedulingPolicy(), SchedulingPolicy(4, 1)


def workload(latency: float = 10.0, steps: int = 8) -> Workload:
    times = {name: Modelled(Distribution("constant", seconds)) for name, seconds in SECONDS.items()}
    return Workload("test", grpo(False), steps, 8, 2, 4, times, Rewards(Distribution("constant", latency), 16))


def trace_of(latency: float = 10.0, steps: int = 8, policy: SchedulingPolicy = BASELINE) -> Trace:
    """Returns the trace of a run of the workload, with its requests."""
    load = workload(latency, steps)
    trace = simulate(load, policy, whole=True)[0].trace
    job = {"pipeline": load.pipeline.facts(), "prompts": 8, "responses": 2, "mini_batches": 4, "concurrency": 16}
    trace.meta |= {"job": job, "status": "running"}
    for step in range(1, steps + 1):
        begin = next(s.begin for s in trace.spans if (s.stage, s.step) == ("reward_collect", step))
        trace.marks += [Mark("reward", "reward", begin, begin + latency, {"step": step}) for _ in range(16)]
    return trace


def faster(trace: Trace, since: int, factor: float, stage: str = "rollout") -> Trace:
    """Returns a trace whose tasks of a stage take another time from a step on."""
    spans = [
        Span(s.stage, s.step, s.part, s.parts, s.resource, s.begin, s.begin + (s.end - s.begin) * factor, s.args)
        if s.stage == stage and s.step >= since
        else s
        for s in trace.spans
    ]
    marks = [
        Mark(m.name, m.resource, m.begin, m.begin + (m.end - m.begin) * factor, m.args)
        if stage == "reward" and m.args["step"] >= since
        else m
        for m in trace.marks
    ]
    return Trace(spans, marks, meta=trace.meta)


def steps_of(found: Trace | None) -> int:
    assert found is not None
    assert sorted({s.step for s in found.spans}) == list(range(1, found.meta["steps"] + 1))
    assert {m.args["step"] for m in found.marks} == {s.step for s in found.spans}
    return int(found.meta["steps"])


def test_a_window_leaves_out_the_first_step_and_what_follows_its_last() -> None:
    trace = trace_of()
    assert window(trace, 0) is None
    assert steps_of(window(trace, 1)) == 1
    assert steps_of(window(trace, 6)) == 5
    assert steps_of(window(trace_of(steps=30), 30)) == 12


def test_a_window_begins_at_a_change_of_the_work_or_of_the_latency() -> None:
    assert steps_of(window(faster(trace_of(), 6, 3.0), 8)) == 3
    assert steps_of(window(faster(trace_of(), 6, 0.3, "reward"), 8)) == 3
    assert steps_of(window(faster(trace_of(), 6, 1.1), 8)) == 7


def test_one_step_that_is_an_exception_is_no_change() -> None:
    trace = trace_of()
    slow = faster(trace, 5, 3.0)
    odd = Trace(
        [a if a.step == 5 else b for a, b in zip(slow.spans, trace.spans, strict=True)], trace.marks, meta=trace.meta
    )
    assert steps_of(window(odd, 8)) == 7


@pytest.mark.parametrize("factor", [0.6, 1.6])
@pytest.mark.parametrize("odd", [4, 7, 8])
def test_one_step_whose_rewards_are_an_exception_is_no_change(odd: int, factor: float) -> None:
    trace = faster(faster(trace_of(), odd, factor, "reward"), odd + 1, 1 / factor, "reward")
    # Of the last step it is not known whether it is one.
    assert steps_of(window(trace, 8)) == (1 if odd == 8 else 7)
    assert steps_of(window(faster(trace_of(), odd, factor, "reward"), 8)) == 9 - odd, "all steps from then on"


def with_latencies(latencies: list[list[float]], resource: str = "reward") -> Trace:
    """Returns the trace of a run whose steps have rewards with these latencies."""
    trace = trace_of(steps=len(latencies))
    marks = [
        Mark("reward", resource, 0.0, seconds, {"step": step}) for step, of in enumerate(latencies, 1) for seconds in of
    ]
    return Trace(trace.spans, marks, meta=trace.meta)


@pytest.mark.parametrize("factor", [0.25, 4.0])
@pytest.mark.parametrize("sigma", [0.0, 0.4])
@pytest.mark.parametrize("later", [1, 2, 5, 8])
def test_a_change_within_a_step_cuts_off_the_steps_before(factor: float, sigma: float, later: int) -> None:
    dice = random.Random(0)

    def draws(count: int, mean: float) -> list[float]:
        return [dice.lognormvariate(math.log(mean), sigma) for _ in range(count)]

    steps = [draws(32, 10) for _ in range(8)]
    steps += [[*draws(16, 10), *draws(16, 10 * factor)]]
    steps += [draws(32, 10 * factor) for _ in range(later)]
    assert steps_of(window(with_latencies(steps), len(steps))) in (later, later + 1)


def test_a_change_of_one_agent_shows_beside_another_that_is_quick() -> None:
    steps = [[1.0] * 32] * 6 + [[8.0] * 32] * 4
    slow, quick = with_latencies(steps), with_latencies([[0.0005, 0.0006] * 16] * 10, "rule")
    both = Trace(slow.spans, sorted([*slow.marks, *quick.marks], key=lambda m: m.args["step"]), meta=slow.meta)
    assert latency_changed(both, 7, 6, whole=False)
    assert not latency_changed(both, 8, 7, whole=True)
    assert steps_of(window(both, 10)) == 4


def test_latencies_without_an_end_are_no_error() -> None:
    steps = [[1.0, math.inf, 0.0, -1.0, 2.0]] * 6
    assert steps_of(window(with_latencies(steps), 6)) == 5


def test_rewards_that_take_another_time_show_before_their_step_ends() -> None:
    slow = faster(trace_of(), 7, 3.0, "reward")
    assert latency_changed(slow, 7, 6, whole=False)
    assert not latency_changed(slow, 8, 7, whole=True), "no longer than those of the step before"
    assert not latency_changed(trace_of(), 7, 6, whole=True)
    quick = faster(trace_of(), 7, 0.3, "reward")
    assert latency_changed(quick, 7, 6, whole=True)
    assert not latency_changed(quick, 7, 6, whole=False), "the first rewards to arrive are the quickest"
    assert not latency_changed(slow, 6, 7, whole=True), "a step that has ended is no news"
    found = window(slow, 6, rewards_of=7)
    assert found is not None
    assert {m.end - m.begin for m in found.marks} == {30.0}
    assert {s.step for s in found.spans} == {1, 2, 3, 4, 5}
    assert forecast(found, [BASELINE], BASELINE).seconds[0] == pytest.approx(4 + 1 + 4 + 0.5 + 30 - 1, rel=0.01)


@pytest.mark.slow
def test_a_forecast_from_a_baseline_is_what_each_policy_then_takes() -> None:
    load, found = workload(steps=40), window(trace_of(), 8)
    assert found is not None
    policies = candidates(load.pipeline, 4, 8, limit=1)
    seconds = dict(zip(policies, forecast(found, policies, BASELINE).seconds, strict=True))
    assert seconds[BASELINE] == pytest.approx(4 + 1 + 4 + 0.5 + 10 - 1, rel=0.01), "log-probs run during the wait"
    for policy in (BASELINE, BOTH, SchedulingPolicy(1, 1)):
        assert seconds[policy] == pytest.approx(steady_s(load, policy), rel=0.01)


@pytest.mark.parametrize("steps", range(1, 13))
def test_each_policy_is_judged_by_the_same_steps_however_much_they_differ(steps: int) -> None:
    """Without rewards to wait for, every policy takes the GPU's time."""
    times = {"rollout": (1.0, 9.0, 2.0, 30.0, 1.0, 4.0), "actor_update": (2.0, 1.0, 16.0, 3.0, 5.0)}
    measured = {name: Measured({at: (of[at % len(of)],) for at in range(1, steps + 1)}) for name, of in times.items()}
    load = replace(workload(steps=40), times=measured, rewards=Rewards(Distribution("constant"), 64))
    known = range(2, steps + 1) if steps > 1 else [1]
    mean = sum(of[at % len(of)] for of in times.values() for at in known) / len(known)
    for staleness in range(3):
        assert steady_s(load, SchedulingPolicy(1, staleness)) == pytest.approx(mean)


def test_candidates_are_those_that_the_pipeline_and_the_limit_allow() -> None:
    pipeline = grpo(False)
    found = candidates(pipeline, 4, 8, limit=1)
    assert len(found) == len(set(found)) == 12
    assert {p.max_staleness for p in candidates(pipeline, 4, 8, limit=0)} == {0}
    assert {p.stream_rollout for p in candidates(pipeline, 4, 8, limit=1, streams=False)} == {False}
    assert len({p.split for p in candidates(pipeline, 64, 64, limit=0)}) == 4
    assert {p.split for p in candidates(pipeline, 4, None, limit=0)} == {1}, "parts need the number of groups"


def test_more_requests_in_flight_are_suggested_as_long_as_they_gain() -> None:
    trace = trace_of()
    assert forecast(window(trace, 8), [BASELINE], BASELINE).in_flight is None, "all 16 of a step are in flight"
    trace.meta["job"]["concurrency"] = 4
    found = forecast(window(trace, 8), [BASELINE, BOTH], BASELINE)
    assert found.in_flight is not None
    number, seconds = found.in_flight
    assert number == 16
    assert seconds == pytest.approx(10, rel=0.1), "the GPU work of a step, or a request's latency"
    held = forecast(window(trace, 8), [BASELINE], BASELINE, adapted=16)
    assert held.in_flight is None


def test_what_cannot_be_predicted_is_left_out() -> None:
    found = window(trace_of(), 8)
    assert found is not None
    assert forecast(found, [BASELINE, SchedulingPolicy(3)], BASELINE).seconds[1] is None
    del found.meta["job"]
    reason = "trace the run does not say what its pipeline was; give the trace.json of a run."
    assert forecast(found, [BASELINE], BASELINE) == Forecast([None], reason=reason)


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
    policies = candidates(pipeline, 2, groups, limit=1)
    found = dict(zip(policies, forecast(window(trace, 6), policies, BASELINE).seconds, strict=True))
    assert found[BASELINE] == pytest.approx(11.0)
    stale = found[SchedulingPolicy(1, 1)]
    assert stale is not None
    assert stale < 8.0


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9), st.lists(st.floats(-5, 5), min_size=1, max_size=9))
def test_latencies_joined_are_those_of_all_requests(one: list[float], other: list[float]) -> None:
    found, every = Latency.of(one).joined(Latency.of(other)), [*one, *other]
    assert found.number == len(every)
    assert found.mean == pytest.approx(statistics.fmean(every), abs=1e-9)
    assert found.error == pytest.approx(statistics.stdev(every) / len(every) ** 0.5, abs=1e-6)
    assert Latency.of([1.0]).error == math.inf
