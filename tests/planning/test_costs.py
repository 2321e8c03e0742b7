"""A workload's times and requests, and its costs on the virtual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dataflow.distribution import Distribution, parse_distribution
from dataflow.errors import ConfigError
from dataflow.executors.virtual import End
from dataflow.planning.costs import WorkloadCosts, fit_latency, makespan
from dataflow.planning.planner import predict
from dataflow.planning.simulation import Outcome, Outcomes
from dataflow.planning.workload import Measured, Modelled, Rewards, Validation, Workload, grpo
from dataflow.policy import expand, preset
from tests.rigs.simulated import job


def test_measured_steps_are_replayed_without_their_warm_up_and_parts_are_kept_or_shared_evenly() -> None:
    measured = Measured({1: (9.0,), 2: (1.0,), 3: (2.0,)})
    assert [measured.seconds(step, 0, 1) for step in range(1, 7)] == [9, 1, 2, 1, 2, 1]
    assert Measured({1: (5.0,)}).seconds(7, 0, 1) == 5.0
    parts = Measured({1: (1.0, 3.0)})
    assert [parts.seconds(1, part, 2) for part in range(2)] == [1.0, 3.0]
    assert [parts.seconds(1, part, 4) for part in range(4)] == [1.0] * 4


def test_a_step_and_its_requests_take_the_same_under_every_policy() -> None:
    workload = replace(job(), times={"actor_update": Modelled(parse_distribution("uniform:2:6"))})
    whole = workload.seconds("actor_update", 3, 0, 1)
    assert [workload.seconds("actor_update", 3, part, 2) for part in range(2)] == [whole / 2] * 2
    assert workload.seconds("actor_update", 4, 0, 1) != whole
    together = workload.requests(2, range(8)).seconds
    assert together == [*workload.requests(2, (0, 1)).seconds, *workload.requests(2, (2, 3, 4, 5, 6, 7)).seconds]
    scattered = replace(workload, rewards=replace(workload.rewards, scattered=True)).requests(2, range(8))
    assert scattered.seconds != together
    of = {group: [scattered.seconds[place] for place in places] for group, places in scattered.places.values()}
    assert all(sorted(of[group]) == sorted(together[4 * group : 4 * group + 4]) for group in range(8))
    assert replace(workload, seed=1).requests(2, range(8)).seconds != together


def test_requests_take_their_share_of_the_slots_or_of_the_minute() -> None:
    assert Rewards(Distribution("constant", 20.0), 5).seconds == 4.0
    assert Rewards(Distribution("constant", 20.0), 5, rpm=10.0).seconds == 6.0


@pytest.mark.parametrize(("groups", "responses", "servers", "waves"), [(4, 4, 5, 4), (1, 1, 9, 1), (3, 3, 2, 5)])
def test_the_makespan_of_constant_latencies_is_that_of_whole_waves(
    groups: int, responses: int, servers: int, waves: int
) -> None:
    rewards = Rewards(Distribution("constant", 7.0), servers)
    assert makespan(rewards, groups, responses, runs=2) == pytest.approx(7.0 * waves)


def test_a_fitted_latency_takes_as_long_as_was_measured() -> None:
    rewards = Rewards(parse_distribution("uniform:1:40"), 16)
    distribution = fit_latency(rewards, 64, 5, 500.0)
    assert makespan(Rewards(distribution, 16), 64, 5) == pytest.approx(500.0, rel=1e-3)
    limited = Rewards(parse_distribution("lognormal:8:0.6"), 16, rpm=120.0)
    assert makespan(Rewards(fit_latency(limited, 20, 5, 100.0), 16, 120.0), 20, 5) == pytest.approx(100.0, rel=0.02)
    with pytest.raises(ConfigError, match=r"log.rpm=10: 100 requests a step cannot be answered in the 60 s"):
        fit_latency(Rewards(Distribution("constant", 1.0), 16, rpm=10.0), 20, 5, 60.0)


def test_a_collect_ends_when_its_groups_are_there_and_a_validation_has_its_own_pool() -> None:
    validation = Validation(1, samples=2, pool="own")
    workload = Workload(
        source="a test",
        pipeline=grpo(False, validation),
        steps=1,
        prompts=2,
        responses=2,
        mini_batches=2,
        times={"rollout": Modelled(Distribution("constant", 4.0))},
        rewards=Rewards(Distribution("constant", 10.0), 2),
        validation=validation,
        dispatch_s={"reward_collect": 0.5, "rollout": 0.25},
    )
    graph = expand(workload.pipeline, preset("mini-batch", 2), 1, 2, groups=2)
    tasks = {str(task): task for task in graph.unroll(1)}
    costs = WorkloadCosts(workload, graph)
    assert costs.start(tasks["rollout[1]"], None, 1.0) == End(5.25, 1.25)
    assert costs.start(tasks["reward_request[1]"], None, 6.0) == End(6.0, 6.0)
    assert costs.start(tasks["reward_collect[1.1]"], None, 6.0) is None
    assert costs.start(tasks["val_score[1]"], None, 7.0) is None
    assert costs.advance(15.0) is None
    # Four requests of 10 s in two slots: a group every 10 s. The two of the validation do not wait.
    assert costs.advance(100.0) == (tasks["reward_collect[1.1]"].id, End(16.0, 6.5, (0,)))
    assert costs.advance(100.0) == (tasks["val_score[1]"].id, End(17.0, 7.0))
    assert costs.start(tasks["reward_collect[1.2]"], None, 30.0) is None
    # It has been there for a while.
    assert costs.advance(30.0) == (tasks["reward_collect[1.2]"].id, End(30.5, 30.5, (1,)))
    assert costs.load_s == {"reward": 20.0}


def test_a_plan_makes_each_simulation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    of = Outcome.of
    monkeypatch.setattr(Outcome, "of", lambda *wanted: made.append(wanted) or of(*wanted))
    once, few = Outcomes(), replace(job(), steps=2)
    policies = {name: preset(name, 4) for name in ("baseline", "both")}
    for _ in range(2):
        predict(few, policies, outcomes=once)
    assert len(made) == 2 * len(policies), "a run and its critical path for each policy"
    # A critical path depends on no limit, and the words about a workload change nothing.
    more = replace(few, rewards=replace(few.rewards, concurrency=3), assumptions=("a sentence",))
    predict(more, policies, outcomes=once)
    assert len(made) == 3 * len(policies)
