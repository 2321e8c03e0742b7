"""The planner against theory: closed forms, bounds, and what must hold for any workload."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataflow.distribution import Distribution, parse_distribution
from dataflow.errors import ConfigError
from dataflow.planning.planner import ROWS, parse_sweep, predict, sweep, turned
from dataflow.planning.reward_service import POLL_S
from dataflow.planning.simulation import Outcome, Outcomes, simulate
from dataflow.planning.workload import Modelled, Rewards, Validation, Workload, grpo
from dataflow.policy import SchedulingPolicy, expand, preset
from dataflow.testing import check_trace
from dataflow.timeline import causes

# Seconds a step.
ROLLOUT, LOG_PROB, UPDATE, SYNC = 10.0, 5.0, 8.0, 1.0
WORK = ROLLOUT + LOG_PROB + UPDATE + SYNC
STEPS = 6


def load(
    latency: str | float = 20.0,
    concurrency: int = 4,
    steps: int = STEPS,
    validation: Validation | None = None,
    checkpoint: int | None = None,
    **rewards: object,
) -> Workload:
    """4 prompts of 4 responses in 4 mini-batches: 16 requests, served 4 at a time, so a group every 20 s."""
    seconds = {
        "rollout": ROLLOUT,
        "old_log_prob": LOG_PROB,
        "actor_update": UPDATE,
        "sync_weights": SYNC,
        "val_rollout": 3.0,
        "checkpoint": 2.0,
    }
    return Workload(
        source="a test",
        pipeline=grpo(False, validation, checkpoint),
        steps=steps,
        prompts=4,
        responses=4,
        mini_batches=4,
        times={name: Modelled(Distribution("constant", s)) for name, s in seconds.items()},
        rewards=Rewards(parse_distribution(latency), concurrency, **rewards),  # type: ignore[arg-type]
        validation=validation,
    )


def total(workload: Workload, policy: str | SchedulingPolicy) -> float:
    found = preset(policy, workload.mini_batches) if isinstance(policy, str) else policy
    return Outcome.of(workload, found).total_s


REWARDS = 80.0  # of a step, one group after the other


@pytest.mark.parametrize(
    ("policy", "workload", "seconds"),
    [
        ("baseline", load(), STEPS * (ROLLOUT + REWARDS + UPDATE + SYNC)),
        ("mini-batch", load(), STEPS * (ROLLOUT + REWARDS + UPDATE / 4 + SYNC)),  # hides all updates but the last
        # The next rollout is done long before the rewards are: after the first one the service always has work.
        ("off-policy", load(), ROLLOUT + STEPS * REWARDS + UPDATE + SYNC),
        ("both", load(), ROLLOUT + STEPS * REWARDS + UPDATE / 4 + SYNC),
        # A group is sampled every 2.5 s, and its four requests take all slots for 20 s.
        ("mini-batch+stream", load(), STEPS * (ROLLOUT / 4 + REWARDS + UPDATE / 4 + SYNC)),
        *((policy, load(0.0, 16), STEPS * WORK) for policy in ROWS),  # rewards that come at once
        ("baseline", load(4.0, 16), STEPS * WORK),  # quick ones hide behind the log-probs
        ("baseline", load(12.0, 16), STEPS * (ROLLOUT + 12 + UPDATE + SYNC)),
        ("off-policy", load(12.0, 16), STEPS * WORK),
        # The first of a step's requests starts at once, the others every 5 s.
        ("baseline", load(1.0, 16, rpm=12.0), STEPS * (ROLLOUT + 15 * 5 + 1 + UPDATE + SYNC)),
    ],
)
def test_a_policy_takes_what_follows_by_hand(policy: str, workload: Workload, seconds: float) -> None:
    assert total(workload, policy) == pytest.approx(seconds)


def test_an_agent_that_serves_step_after_step_idles_in_the_tail() -> None:
    # 16 requests on 5 slots: 4 waves of 20 s, of which the last fills one slot.
    steady, stepwise = load(concurrency=5), load(concurrency=5, agent="per-step")
    assert total(stepwise, "both") == pytest.approx(ROLLOUT + POLL_S / 2 + STEPS * 80 + UPDATE / 4 + SYNC)
    assert total(steady, "both") < total(stepwise, "both") - (STEPS - 2) * 15


def test_validation_stops_the_loop_or_not() -> None:
    plain = total(load(), "baseline")
    beside = load(validation=Validation(2, samples=4, pool="own"), checkpoint=3)
    stopping = load(validation=Validation(2, samples=4, pool="own", overlap=False), checkpoint=3)
    # Beside training both hide in the wait for the next rewards.
    assert total(beside, "baseline") == pytest.approx(plain)
    assert total(stopping, "baseline") == pytest.approx(plain + 3 * (3 + 20) + 2 * 2)


def test_the_uncounted_first_rollout_is_left_out() -> None:
    counted = load()
    assert total(replace(counted, uncounted=True), "both") == pytest.approx(total(counted, "both") - ROLLOUT)
    assert total(replace(counted, uncounted=True), "baseline") == pytest.approx(total(counted, "baseline"))


def test_what_binds_is_named_with_its_seconds() -> None:
    rows = {row.policy: row for row in predict(load())}
    assert list(rows) == list(ROWS)
    assert rows["both"].bound_by == "reward service"
    assert rows["both"].lower_bound_s == pytest.approx(STEPS * 80)
    assert rows["both"].bounds_s["GPU pool"] == pytest.approx(STEPS * WORK)
    assert rows["baseline"].change == 0
    assert rows["both"].change == pytest.approx(rows["both"].total_s / rows["baseline"].total_s - 1)
    assert rows["baseline"].gpu_idle == pytest.approx(1 - STEPS * WORK / rows["baseline"].total_s)
    assert rows["baseline"].exposed_wait_by_cause["rewards"] == pytest.approx(80 - LOG_PROB)
    quick = predict(load(0.0, 16), {"both": preset("both", 4)})[0]
    assert quick.bound_by == "GPU pool"
    assert quick.total_s == pytest.approx(quick.lower_bound_s)
    lonely = predict(load(60.0, 16), {"baseline": preset("baseline", 4)})[0]
    assert lonely.bound_by == "critical path"
    assert lonely.lower_bound_s == pytest.approx(lonely.total_s)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    times = st.sampled_from(["0", "3", "uniform:1:9", "lognormal:4:0.5"])
    every = draw(st.sampled_from([None, 2, 3]))
    validation = None
    if every:
        validation = Validation(
            every, draw(st.integers(0, 5)), draw(st.sampled_from(["own", "shared"])), draw(st.booleans())
        )
    checkpoint = draw(st.sampled_from([None, 3]))
    pipeline = grpo(draw(st.booleans()), validation, checkpoint)
    timed = [s.name for s in pipeline.stages if s.name not in ("reward_collect", "val_score", "end_step")]
    mini_batches = draw(st.sampled_from([1, 2, 4]))
    return Workload(
        source="drawn",
        pipeline=pipeline,
        steps=draw(st.integers(1, 7)),
        prompts=mini_batches * draw(st.integers(1, 3)),
        responses=draw(st.integers(1, 3)),
        mini_batches=mini_batches,
        times={name: Modelled(parse_distribution(draw(times))) for name in timed},
        rewards=Rewards(
            parse_distribution(draw(times)),
            draw(st.integers(1, 9)),
            draw(st.sampled_from([None, 30.0])),
            draw(st.sampled_from(["continuous", "per-step"])),
            draw(st.booleans()),
        ),
        validation=validation,
        dispatch_s=dict.fromkeys(pipeline.by_name, draw(st.sampled_from([0.0, 0.25]))),
        uncounted=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )


@st.composite
def policies(draw: st.DrawFn, mini_batches: int) -> SchedulingPolicy:
    split = draw(st.sampled_from([d for d in (1, 2, 4) if mini_batches % d == 0]))
    order = draw(st.sampled_from(["arrival", "index"]))
    return SchedulingPolicy(split, draw(st.integers(0, 3)), order, draw(st.booleans()))


@pytest.mark.slow
@settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_workload_under_any_policy(data: st.DataObject) -> None:
    workload = data.draw(workloads())
    policy = data.draw(policies(workload.mini_batches))
    trace, _costs = simulate(workload, policy)
    graph = expand(workload.pipeline, policy, workload.steps, workload.mini_batches, groups=workload.prompts)
    check_trace(trace, graph, tolerance=1e-6, busy=not any(workload.dispatch_s.values()))
    outcomes = Outcomes()
    (row,) = predict(workload, {"x": policy}, outcomes=outcomes)
    assert row.total_s >= row.lower_bound_s - 1e-6, "no schedule beats its bound"
    found = outcomes.of(workload, policy)
    assert found.busy_s + sum(found.waits_s.values()) == pytest.approx(found.total_s)
    if not found.begin:
        numbers = causes.summary(trace)
        assert (numbers["wall_s"], numbers["gpu_busy_s"]) == pytest.approx((found.end, found.busy_s))


def test_a_sweep_holds_a_row_for_each_value() -> None:
    found = sweep(load(), "reward.concurrency:2:16", ["baseline", "both"])
    assert found.values == (2, 4, 8, 16)
    times = found.as_dict()["policies"][1]["step_s"]
    assert times == sorted(times, reverse=True)
    assert parse_sweep("mini_batches:1:4", load()) == ("mini_batches", (1, 2, 4))
    assert parse_sweep("reward.concurrency:1e5:1e5", load()) == ("reward.concurrency", (100_000,))
    assert turned(load(), "reward.rpm", 90.0).rewards.rpm == 90.0
    assert turned(load(), "mini_batches", 2.0).mini_batches == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reward.concurency:1:4", "no knob is named 'reward.concurency'; did you mean 'reward.concurrency'?"),
        ("reward.concurrency:a:b", "not of the form reward.concurrency:LOW:HIGH"),
        ("reward.concurrency:8:2", "give 1 <= LOW <= HIGH <= 100,000"),
        ("mini_batches:3:3", "no number from 3 to 3 divides 4 prompts"),
    ],
)
def test_a_sweep_that_cannot_be_made_is_said(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_sweep(text, load())
    assert message in str(error.value)


def test_with_gpus_of_its_own_the_engine_samples_while_the_trainer_updates() -> None:
    apart = load(0.0).placed("disaggregated")
    alone = LOG_PROB + UPDATE
    # The engine is a step ahead: from the first log-probs on the trainer has always something to do.
    assert total(apart, "off-policy") == pytest.approx(ROLLOUT + STEPS * alone + SYNC)
    # On-policy each waits for the other.
    assert total(apart, "baseline") == total(load(0.0), "baseline") == pytest.approx(STEPS * WORK)
    (row,) = predict(apart, {"off-policy": preset("off-policy", 4)})
    assert row.bounds_s["GPU pool"] == pytest.approx(STEPS * alone), "the busier of the two"
    busy = STEPS * (alone + ROLLOUT + SYNC) / 2
    assert row.gpu_idle == pytest.approx(1 - busy / row.total_s)
    assert row.exposed_wait_s * STEPS == pytest.approx(row.total_s - busy)
