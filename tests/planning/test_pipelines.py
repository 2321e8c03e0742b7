"""Plans of pipelines without old log-probs, with a critic, with a teacher: from costs, logs and traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataflow import simulate as run_costs
from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.loading.pipeline_file import load_pipeline_file, pipeline_of
from dataflow.errors import ConfigError
from dataflow.planning.config import LogPlan, PlanConfig
from dataflow.planning.simulation import Outcome
from dataflow.planning.sources.read import read_workload
from dataflow.planning.sources.trace import of_trace
from dataflow.planning.workload import Validation, Workload, grpo
from dataflow.policy import PRESETS, expand, preset
from dataflow.timeline.spans import Trace
from tests.planning.sources.test_verl import NEEDED, write
from tests.rigs.costs import SteadyCosts
from tests.rigs.scheduling import simulate as run

PASS = "old_log_prob"
COSTS = """
steps: 8
prompts: 4
responses: 2
mini_batches: 2
stages: {rollout: 10, actor_update: 8}
reward: {latency: 2, concurrency: 8}
"""
CRITIC = COSTS.replace("rollout: 10", "rollout: 10, old_log_prob: 5, values: 3, critic_update: 6")
ROOT = Path(__file__).resolve().parents[2]
KEYS = ("steps=6", "checkpoint.every=0", "val.every=0", "samples.every=0")


def step_s(workload: Workload, policy: str) -> float:
    return Outcome.of(workload, preset(policy, workload.mini_batches)).total_s / workload.steps


def test_costs_without_the_time_of_old_log_probs_have_no_such_stage(tmp_path: Path) -> None:
    (tmp_path / "costs.yaml").write_text(COSTS)
    bypassed, _ = read_workload(str(tmp_path / "costs.yaml"))
    whole, _ = read_workload(str(tmp_path / "costs.yaml"), [f"stages.{PASS}=5"])
    assert (PASS in whole.pipeline.by_name, PASS in bypassed.pipeline.by_name) == (True, False)
    assert (whole.mean_s(), bypassed.mean_s()) == (23, 18)
    # The rewards, 2 s, hide behind the pass; without it they are waited for, and 3 s are saved, not 5.
    assert (step_s(whole, "baseline"), step_s(bypassed, "baseline")) == (pytest.approx(23), pytest.approx(20))
    # With stale samples the next rollout hides them under either, and all 5 s are saved.
    assert step_s(whole, "off-policy") - step_s(bypassed, "off-policy") == pytest.approx(5)


def test_a_loop_that_stops_for_its_validation_holds_back_the_next_step() -> None:
    for bypass, first in ((False, PASS), (True, "actor_update")):
        pipeline = grpo(False, Validation(5, overlap=False), bypass=bypass)
        turns = {s.name: read.lag for s in pipeline.stages for read in s.reads if read.field == "turn"}
        assert turns == {"rollout": "carried", first: "latest"}


def test_values_hide_behind_the_rewards_and_updates_follow_them(tmp_path: Path) -> None:
    (tmp_path / "costs.yaml").write_text(CRITIC)
    workload, _ = read_workload(str(tmp_path / "costs.yaml"), ["steps=4", "reward.latency=20"])
    assert workload.mean_s() == 32
    # Rollout, the rewards (20 s, beside log-probs and values), the actor's update. The critic's, which the next rollout
    # need not wait for, hides behind the rewards of the next step; only the last one stays.
    assert step_s(workload, "baseline") == pytest.approx(10 + 20 + 8 + 6 / 4)
    assert step_s(workload, "both") < 0.9 * step_s(workload, "baseline")
    (tmp_path / "costs.yaml").write_text(CRITIC.replace(", critic_update: 6", ""))
    with pytest.raises(ConfigError, match=r"does not say 'stages.critic_update'; give stages\.critic_update=SECONDS"):
        read_workload(str(tmp_path / "costs.yaml"))


def test_logs_of_verl_with_a_critic_and_in_bypass_mode(tmp_path: Path) -> None:
    columns: dict[str, list[object]] = {"gen": [10] * 3, "reward": [0.5] * 3, "update_actor": [4] * 3}
    bypass = write(tmp_path / "bypass.csv", {**columns, "adv": [20] * 3, "step": [34.5] * 3})
    workload, _config = read_workload(bypass, [*NEEDED, "log.latency=5"])
    assert PASS not in workload.pipeline.by_name
    assert step_s(workload, "baseline") == pytest.approx(34.5, rel=0.01)
    # 16 requests, 4 in flight, 10 s each: 40 s, 8 s of it behind log-probs and values.
    more = {PASS: [5] * 3, "values": [3] * 3, "adv": [32] * 3, "update_critic": [7] * 3, "step": [61.5] * 3}
    workload, _config = read_workload(write(tmp_path / "ppo.csv", {**columns, **more}), [*NEEDED, "log.latency=10"])
    assert workload.rewards.latency.mean == pytest.approx(10, rel=0.01)
    assert step_s(workload, "baseline") * 3 == pytest.approx(3 * 61.5 - 2 * 7, rel=0.01), "the critic's updates hide"


def recipe(name: str, policy: str, directory: Path, seconds: dict[str, float], *keys: str) -> tuple[Trace, Any]:
    """Returns the trace that a recipe's graph has with these seconds of its stages, and its pipeline."""
    module = load_pipeline_file(ROOT / "pipelines" / f"{name}.py")
    config = parse_overrides(module.Config, [f"policy={policy}", *KEYS, f"runs={directory}", *keys])
    pipeline = pipeline_of(module, config)
    graph = expand(pipeline, config.policy.resolve(4), 6, 4, groups=32)
    trace, _seen = run(graph, SteadyCosts(1.0, 32, {s.name: 0.01 for s in pipeline.stages} | seconds))
    trace.meta |= {"status": "finished", "policy": policy, "split": graph.parts["reward_collect"], "steps": 6}
    trace.meta |= {"max_staleness": graph.max_staleness, "order": "arrival", "stream_rollout": False}
    trace.meta["job"] = {
        "pipeline": pipeline.facts(), "prompts": 32, "responses": 8, "mini_batches": 4, "concurrency": 256,
    }  # fmt: skip
    return trace, pipeline


UNRECORDED = PlanConfig(log=LogPlan(latency="0", concurrency=256))


@pytest.mark.parametrize("policy", ["baseline", "both"])
def test_recipes_are_planned_from_their_own_traces(policy: str, tmp_path: Path) -> None:
    seconds = {PASS: 3.0, "actor_update": 1.0, "rollout": 4.0}
    whole, bypassed = (
        of_trace(recipe("gsm8k_grpo", policy, tmp_path, seconds, f"algorithm.bypass_mode={on}")[0], "run", UNRECORDED)
        for on in ("false", "true")
    )
    assert (PASS in whole.times, PASS in bypassed.times) == (True, False)
    assert 1.5 < step_s(whole, policy) - step_s(bypassed, policy) < 3.01
    trace, _ = recipe("ppo_critic", policy, tmp_path, {"values": 2.0, "critic_update": 3.0, "rollout": 4.0})
    ppo = of_trace(trace, "a run", UNRECORDED)
    assert ppo.times["values"].mean == pytest.approx(2, rel=0.01)
    assert ppo.times["critic_update"].mean == pytest.approx(12, rel=0.01)
    assert step_s(ppo, "both") < step_s(ppo, "baseline")


@pytest.mark.parametrize("policy", PRESETS)
def test_distillation_whose_parts_a_teacher_forms_is_planned_from_its_own_trace(policy: str, tmp_path: Path) -> None:
    module = load_pipeline_file(ROOT / "pipelines" / "distill.py")
    config = parse_overrides(module.Config, [*KEYS[:2], "val.every=3", f"runs={tmp_path}", f"policy={policy}"])
    pipeline = pipeline_of(module, config)
    graph = expand(pipeline, config.policy.resolve(4), 6, 4, groups=32)
    seconds = dict.fromkeys(pipeline.by_name, 0.5) | {"rollout": 4.0, "teacher_log_prob": 8.0, "actor_update": 6.0}
    trace = run_costs(graph, seconds)
    trace.meta |= {"job": {**config.job(), "pipeline": pipeline.facts()}, "policy": policy, "steps": 6}
    workload = of_trace(trace, "own", PlanConfig())
    assert Outcome.of(workload, preset(policy, 4)).total_s == pytest.approx(trace.wall, rel=0.02)
