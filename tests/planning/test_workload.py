"""A workload's times, requests and graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dataflow.distribution import Distribution, parse_distribution
from dataflow.planning.rewards import Rewards, Validation
from dataflow.planning.workload import Measured, Modelled, Workload, grpo


def job(**changes: object) -> Workload:
    base = Workload(
        source="a test",
        pipeline=grpo(),
        steps=10,
        prompts=6,
        responses=2,
        mini_batches=2,
        times={
            "rollout": Modelled(Distribution("constant", 10.0)),
            "actor_update": Modelled(parse_distribution("uniform:2:6")),
        },
        rewards=Rewards(parse_distribution("uniform:1:3"), 4),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_measured_steps_are_replayed_and_warm_up_is_not_repeated() -> None:
    measured = Measured({1: (9.0,), 2: (1.0,), 3: (2.0,)})
    assert [measured.seconds(step, 0, 1) for step in range(1, 7)] == [9, 1, 2, 1, 2, 1]
    assert measured.mean == 4.0
    assert Measured({1: (5.0,)}).seconds(7, 0, 1) == 5.0


def test_measured_parts_are_kept_or_shared_evenly() -> None:
    measured = Measured({1: (1.0, 3.0)})
    assert [measured.seconds(1, part, 2) for part in range(2)] == [1.0, 3.0]
    assert [measured.seconds(1, part, 4) for part in range(4)] == [1.0] * 4


def test_a_step_draws_the_same_time_for_all_its_parts_and_policies() -> None:
    workload = job()
    whole = workload.seconds("actor_update", 3, 0, 1)
    assert [workload.seconds("actor_update", 3, part, 2) for part in range(2)] == [whole / 2] * 2
    assert workload.seconds("actor_update", 4, 0, 1) != whole
    assert workload.seconds("sync_weights", 3, 0, 1) == 0
    assert workload.mean_s() == pytest.approx(14.0)


def test_a_groups_latencies_are_its_own_however_it_is_sent() -> None:
    workload = job()
    whole = list(workload.requests(2, range(6)))
    assert whole == [*workload.requests(2, [0, 1]), *workload.requests(2, [2, 3, 4, 5])]
    assert [group for group, _ in whole] == [g for g in range(6) for _ in range(2)]
    scattered = job(rewards=replace(workload.rewards, scattered=True)).requests(2, range(6))
    assert list(scattered) != whole
    assert sorted(scattered) == sorted(whole)
    assert list(job(seed=1).requests(2, range(6))) != whole


def test_validation_that_stops_training_holds_back_the_next_step() -> None:
    beside, stopping = (grpo(False, Validation(5, overlap=overlap), 20) for overlap in (True, False))
    assert "end_step" not in beside.by_name
    assert {read.field for read in stopping.by_name["old_log_prob"].reads} >= {"turn"}
    assert {read.field for read in stopping.by_name["rollout"].reads} >= {"turn"}


def test_requests_take_their_share_of_the_slots_or_of_the_minute() -> None:
    assert Rewards(Distribution("constant", 20.0), 5).seconds == 4.0
    assert Rewards(Distribution("constant", 20.0), 5, rpm=10.0).seconds == 6.0
