"""Plans with and without ``algorithm.bypass_mode``: the pass of old log-probs and its time leave the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.loading.pipeline_file import load_pipeline_file, pipeline_of
from dataflow.planning.config import LogPlan, PlanConfig
from dataflow.planning.rewards import Validation
from dataflow.planning.simulation import Outcome
from dataflow.planning.sources.read import read_workload
from dataflow.planning.sources.trace import of_trace
from dataflow.planning.workload import Workload, grpo
from dataflow.policy import PRESETS, expand, preset
from tests.planning.sources.test_verl import write
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
ROOT = Path(__file__).resolve().parents[2]


def step_s(workload: Workload, policy: str) -> float:
    return Outcome.of(workload, preset(policy, workload.mini_batches)).total_s / workload.steps


def test_costs_without_its_time_have_no_such_stage(tmp_path: Path) -> None:
    (tmp_path / "costs.yaml").write_text(COSTS)
    bypassed, _ = read_workload(str(tmp_path / "costs.yaml"))
    whole, _ = read_workload(str(tmp_path / "costs.yaml"), [f"stages.{PASS}=5"])
    assert PASS in whole.pipeline.by_name
    assert PASS not in bypassed.pipeline.by_name
    assert "old_log_probs" not in {read.field for s in bypassed.pipeline.stages for read in s.reads}
    assert (whole.mean_s(), bypassed.mean_s()) == (23, 18)
    # The rewards, 2 s, hide behind the pass; without it they are waited for, and 3 s are saved, not 5.
    assert (step_s(whole, "baseline"), step_s(bypassed, "baseline")) == (pytest.approx(23), pytest.approx(20))
    # With stale samples the next rollout hides them under either, and all 5 s are saved.
    assert step_s(whole, "off-policy") - step_s(bypassed, "off-policy") == pytest.approx(5)


def test_a_log_of_verl_in_bypass_mode_has_no_such_stage(tmp_path: Path) -> None:
    columns: dict[str, list[object]] = {
        "gen": [10] * 3,
        "reward": [0.5] * 3,
        "adv": [20] * 3,
        "update_actor": [4] * 3,
        "step": [34.5] * 3,
    }
    keys = ["prompts=8", "responses=2", "mini_batches=2", "log.concurrency=4", "log.latency=5"]
    workload, _config = read_workload(write(tmp_path / "bypass.csv", columns), keys)
    assert PASS not in workload.pipeline.by_name
    assert any("timing_s/old_log_prob" in said for said in workload.assumptions)
    assert step_s(workload, "baseline") == pytest.approx(34.5, rel=0.01)


@pytest.mark.parametrize("policy", PRESETS)
def test_a_recipe_is_planned_from_its_own_trace(policy: str, tmp_path: Path) -> None:
    module = load_pipeline_file(ROOT / "pipelines" / "gsm8k_grpo.py")
    keys = ["steps=6", "checkpoint.every=0", "val.every=0", "samples.every=0", "name=x", f"runs={tmp_path}"]
    found = {}
    for bypass in ("false", "true"):
        config = parse_overrides(module.Config, [f"policy={policy}", f"algorithm.bypass_mode={bypass}", *keys])
        pipeline = pipeline_of(module, config)
        graph = expand(pipeline, config.policy.resolve(4), 6, 4, groups=32)
        seconds = {s.name: 0.01 for s in pipeline.stages} | {PASS: 3.0, "actor_update": 1.0, "rollout": 4.0}
        trace, _seen = run(graph, SteadyCosts(1.0, 32, seconds))
        trace.meta |= {"status": "finished", "policy": policy, "split": graph.parts["reward_collect"], "steps": 6}
        trace.meta |= {"max_staleness": graph.max_staleness, "order": "arrival", "stream_rollout": False}
        job = {"prompts": 32, "responses": 8, "mini_batches": 4, "concurrency": 256}
        trace.meta["job"] = {"pipeline": pipeline.facts(), **job}
        found[bypass] = of_trace(trace, "a run", PlanConfig(log=LogPlan(latency="0", concurrency=256)))
    assert (PASS in found["false"].times, PASS in found["true"].times) == (True, False)
    assert found["false"].mean_s() - found["true"].mean_s() == pytest.approx(3)
    assert 1.5 < step_s(found["false"], policy) - step_s(found["true"], policy) < 3.01


def test_a_loop_that_stops_for_its_validation_holds_back_the_update_instead() -> None:
    pipeline = grpo(False, Validation(5, overlap=False), bypass=True)
    turns = {s.name: read.lag for s in pipeline.stages for read in s.reads if read.field == "turn"}
    assert turns == {"rollout": "carried", "actor_update": "latest"}
