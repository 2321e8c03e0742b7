"""Plans of a pipeline whose parts no reward agent forms: in distillation a teacher forms them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataflow import simulate as run
from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.loading.pipeline_file import load_pipeline_file, pipeline_of
from dataflow.planning.config import PlanConfig
from dataflow.planning.simulation import Outcome
from dataflow.planning.sources.trace import of_trace
from dataflow.policy import PRESETS, expand, preset

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("policy", PRESETS)
def test_distillation_is_planned_from_its_own_trace(policy: str, tmp_path: Path) -> None:
    module = load_pipeline_file(ROOT / "pipelines" / "distill.py")
    keys = ["steps=6", "checkpoint.every=0", "val.every=3", "name=x", f"runs={tmp_path}", f"policy={policy}"]
    config = parse_overrides(module.Config, keys)
    pipeline = pipeline_of(module, config)
    graph = expand(pipeline, config.policy.resolve(4), 6, 4, groups=32)
    seconds = dict.fromkeys(pipeline.by_name, 0.5) | {"rollout": 4.0, "teacher_log_prob": 8.0, "actor_update": 6.0}
    trace = run(graph, seconds)
    trace.meta |= {"job": {**config.job(), "pipeline": pipeline.facts()}, "policy": policy, "steps": 6}
    workload = of_trace(trace, "own", PlanConfig())
    for name in PRESETS:
        assert Outcome.of(workload, preset(name, 4)).total_s >= 6 * (8 if name != "baseline" else 18), (
            "the teacher scores each step"
        )
    assert Outcome.of(workload, preset(policy, 4)).total_s == pytest.approx(trace.wall, rel=0.02)
