"""Plans are the same to the last digit, however they are simulated: those of the queue that served one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dataflow.planning.plan import make_plan

GOLDEN = Path(__file__).with_name("same_plans.json")
"""Made by the planner that simulated each request by itself."""

COSTS = """
steps: 6
prompts: 16
responses: 4
mini_batches: 4
stages: {rollout: 20, old_log_prob: 5, ref_log_prob: 4, actor_update: 18, sync_weights: 1, val_rollout: 6,
  checkpoint: 3}
reward: {latency: uniform:1:15, concurrency: 12}
validation: {every: 2, samples: 40, pool: shared, overlap: true}
checkpoint: {every: 3}
"""
CASES: dict[str, list[str]] = {
    "shared validation": [],
    "a limit of requests a minute": ["reward.rpm=150", "validation.pool=own"],
    "step by step": ["reward.agent=per-step", "validation.overlap=false"],
    "by index, streamed": [
        "policy.split=4",
        "policy.max_staleness=2",
        "policy.order=index",
        "policy.stream_rollout=true",
    ],
    "requests of one length": ["reward.latency=2.5", "reward.concurrency=8"],
    "two agents": ["agents={style: {latency: 'uniform:1:4', concurrency: 6}}", "placement=disaggregated"],
}


def plan(path: str, arguments: list[str]) -> Any:
    """Returns a plan as JSON."""
    found = make_plan(path, arguments).as_dict()
    return json.loads(json.dumps({key: found[key] for key in ("policies", "advice")}))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_the_same_to_the_last_digit(name: str, tmp_path: Path) -> None:
    (tmp_path / "costs.yaml").write_text(COSTS)
    assert plan(str(tmp_path / "costs.yaml"), CASES[name]) == json.loads(GOLDEN.read_text())[name]
