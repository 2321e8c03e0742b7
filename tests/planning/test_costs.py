"""Costs on the virtual clock: what waits for the reward service, and how a latency is fitted."""

from __future__ import annotations

import pytest

from dataflow.distribution import Distribution, parse_distribution
from dataflow.errors import ConfigError
from dataflow.executors.virtual import End
from dataflow.planning.costs import WorkloadCosts, fit_latency, makespan
from dataflow.planning.rewards import Rewards, Validation
from dataflow.planning.workload import Modelled, Workload, grpo
from dataflow.policy import expand, preset


@pytest.mark.parametrize(
    ("groups", "responses", "servers", "waves"), [(4, 4, 4, 4), (4, 4, 5, 4), (1, 1, 9, 1), (3, 3, 2, 5)]
)
def test_the_makespan_of_constant_latencies_is_that_of_whole_waves(
    groups: int, responses: int, servers: int, waves: int
) -> None:
    assert makespan(Rewards(Distribution("constant", 7.0), servers), groups, responses, runs=2) == pytest.approx(
        7.0 * waves
    )


def test_a_fitted_latency_takes_as_long_as_was_measured() -> None:
    rewards = Rewards(parse_distribution("uniform:1:40"), 16)
    distribution = fit_latency(rewards, 64, 5, 500.0)
    assert makespan(Rewards(distribution, 16), 64, 5) == pytest.approx(500.0, rel=1e-3)
    limited = Rewards(parse_distribution("lognormal:8:0.6"), 16, rpm=120.0)
    assert makespan(Rewards(fit_latency(limited, 20, 5, 100.0), 16, 120.0), 20, 5) == pytest.approx(100.0, rel=0.02)


def test_a_limit_that_is_too_low_for_what_was_measured_is_said() -> None:
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
