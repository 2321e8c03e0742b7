"""Plans of PPO with a critic: from costs written by hand, from a log of verl, and from a run's trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.loading.pipeline_file import load_pipeline_file, pipeline_of
from dataflow.errors import ConfigError
from dataflow.graph import Pipeline
from dataflow.planning.config import LogPlan, PlanConfig
from dataflow.planning.simulation import Outcome
from dataflow.planning.sources.read import read_workload
from dataflow.planning.sources.trace import of_trace
from dataflow.planning.workload import Workload
from dataflow.policy import PRESETS, expand, preset
from dataflow.running.reporting.timings import timing_names
from tests.planning.sources.test_verl import write
from tests.rigs.costs import SteadyCosts
from tests.rigs.scheduling import simulate as run

COSTS = """
steps: 4
prompts: 4
responses: 2
mini_batches: 2
stages: {rollout: 10, old_log_prob: 5, values: 3, actor_update: 8, critic_update: 6}
reward: {latency: 20, concurrency: 8}
"""
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    (tmp_path / "costs.yaml").write_text(COSTS)
    return tmp_path / "costs.yaml"


def step_s(workload: Workload, policy: str) -> float:
    return Outcome.of(workload, preset(policy, workload.mini_batches)).total_s / workload.steps


def test_values_hide_behind_the_rewards_and_updates_follow_them(costs: Path) -> None:
    workload, _ = read_workload(str(costs))
    assert {"values", "critic_update"} <= workload.pipeline.by_name.keys()
    assert workload.mean_s() == 32
    # Rollout, the rewards (20 s, beside log-probs and values), the actor's update. The critic's, which the next rollout
    # need not wait for, hides behind the rewards of the next step; only the last one stays.
    assert step_s(workload, "baseline") == pytest.approx(10 + 20 + 8 + 6 / 4)
    assert step_s(workload, "both") < 0.9 * step_s(workload, "baseline")


def test_a_critic_needs_the_times_of_both_its_stages(costs: Path) -> None:
    costs.write_text(COSTS.replace(", critic_update: 6", ""))
    with pytest.raises(ConfigError, match=r"does not say 'stages.critic_update'; give stages\.critic_update=SECONDS"):
        read_workload(str(costs))
    costs.write_text(COSTS.replace(", critic_update: 6", "").replace("values: 3, ", ""))
    assert "critic" not in read_workload(str(costs))[0].pipeline.writer


def test_a_baseline_of_verl_is_predicted_but_for_the_critics_updates_that_hide(tmp_path: Path) -> None:
    columns: dict[str, list[object]] = {
        "gen": [20, 10, 10],
        "reward": [0.5] * 3,
        "old_log_prob": [5] * 3,
        "values": [3] * 3,
        "adv": [32] * 3,  # 16 requests, 4 in flight, 10 s each: 40 s, 8 s of it behind log-probs and values
        "update_critic": [7] * 3,
        "update_actor": [4] * 3,
        "step": [71.5, 61.5, 61.5],
    }
    keys = ["prompts=8", "responses=2", "mini_batches=2", "log.concurrency=4", "log.latency=10"]
    workload, _config = read_workload(write(tmp_path / "ppo.csv", columns), keys)
    assert workload.rewards.latency.mean == pytest.approx(10, rel=0.01)
    assert Outcome.of(workload, preset("baseline", 2)).total_s == pytest.approx(194.5 - 2 * 7, rel=0.01)
    assert any("algorithm.whiten=mini-batch" in said for said in workload.assumptions)


@pytest.mark.parametrize("policy", PRESETS)
def test_the_recipe_is_planned_from_its_own_trace(policy: str, tmp_path: Path) -> None:
    module = load_pipeline_file(ROOT / "pipelines" / "ppo_critic.py")
    keys = ["steps=6", "checkpoint.every=0", "val.every=0", "samples.every=0", "name=x", f"runs={tmp_path}"]
    config = parse_overrides(module.Config, [f"policy={policy}", *keys])
    pipeline: Pipeline = pipeline_of(module, config)
    graph = expand(pipeline, config.policy.resolve(4), 6, 4, groups=32)
    seconds = {s.name: 0.01 for s in pipeline.stages} | {"values": 2.0, "critic_update": 3.0, "rollout": 4.0}
    trace, _seen = run(graph, SteadyCosts(40.0, 32, seconds))
    if not graph.max_staleness:  # otherwise the next rollout comes first
        collected = {s.step: s.end for s in reversed(trace.spans) if s.stage == "reward_collect"}  # the first parts
        assert all(s.begin < collected[s.step] for s in trace.spans if s.stage == "values"), "while they are awaited"
    trace.meta |= {"status": "finished", "policy": policy, "split": graph.parts["reward_collect"], "steps": 6}
    trace.meta |= {"max_staleness": graph.max_staleness, "order": "arrival", "stream_rollout": False}
    job = {"prompts": 32, "responses": 8, "mini_batches": 4, "concurrency": 256}
    trace.meta["job"] = {"pipeline": pipeline.facts(), **job}
    workload = of_trace(trace, "a run", PlanConfig(log=LogPlan(latency="0", concurrency=256)))
    assert workload.times["values"].mean == pytest.approx(2, rel=0.01)
    assert workload.times["critic_update"].mean == pytest.approx(12, rel=0.01)
    assert step_s(workload, "both") < step_s(workload, "baseline")
    names = timing_names(trace)
    assert (names["actor_update"], names["critic_update"], names["values"]) == (
        "update_actor",
        "update_critic",
        "values",
    )
