"""Plans of runs with several reward agents: each is a queue of its own, with its own limits, waits and bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import ConfigError
from dataflow.planning.advice import advise
from dataflow.planning.config import PlanConfig
from dataflow.planning.planner import parse_sweep, predict, sweep, turned
from dataflow.planning.simulation import Outcome, simulate
from dataflow.planning.sources.read import read_workload
from dataflow.planning.sources.trace import of_trace
from dataflow.planning.workload import Workload
from dataflow.policy import PRESETS, SchedulingPolicy, preset
from dataflow.timeline.spans import Mark, Trace

COSTS = """
steps: 4
prompts: 8
responses: 2
mini_batches: 4
stages: {{rollout: 2.0, old_log_prob: 0.5, actor_update: 1.0, sync_weights: 0.5}}
reward: {{latency: {reward}, concurrency: 16}}
agents: {{style: {{latency: {style}, concurrency: {slots}}}}}
"""


def load(tmp_path: Path, reward: Any = 1.0, style: Any = 1.0, slots: int = 16, *arguments: str) -> Workload:
    path = tmp_path / "costs.yaml"
    path.write_text(COSTS.format(reward=reward, style=style, slots=slots))
    workload, _config = read_workload(str(path), list(arguments))
    return workload


@pytest.mark.parametrize(("reward", "style", "cause"), [(10.0, 1.0, "rewards"), (1.0, 10.0, "style")])
def test_a_step_waits_for_the_slower_agent(tmp_path: Path, reward: float, style: float, cause: str) -> None:
    (row,) = predict(load(tmp_path, reward, style), {"baseline": preset("baseline", 4)})
    # Rollout, then the slower agent beside the log-probs, then the update and the sync.
    assert row.step_s == pytest.approx(2.0 + 10.0 + 1.0 + 0.5)
    # The part is formed when the rewards of the first agent are there; from then on the other one is waited for.
    waits = {name: row.exposed_wait_by_cause.get(name, 0.0) for name in ("rewards", "style")}
    assert waits == pytest.approx(
        {"rewards": 9.5, "style": 0.0} if cause == "rewards" else {"rewards": 0.5, "style": 9.0}
    )


def test_each_agent_has_slots_of_its_own(tmp_path: Path) -> None:
    (row,) = predict(load(tmp_path, 1.0, 3.0, 4), {"baseline": preset("baseline", 4)})
    assert row.step_s == pytest.approx(2.0 + 4 * 3.0 + 1.0 + 0.5), "16 requests in 4 slots"


@pytest.mark.parametrize("order", ["arrival", "index"])
@pytest.mark.parametrize("policy", PRESETS)
def test_all_agents_return_the_groups_of_a_part(tmp_path: Path, policy: str, order: Any) -> None:
    workload = load(tmp_path, "uniform:1:20", "uniform:1:5", 4)
    usual = preset(policy, 4)
    trace, costs = simulate(workload, SchedulingPolicy(usual.split, usual.max_staleness, order))
    ends = {(s.stage, s.step, s.part): s.end for s in trace.spans}
    advantages = [key for key in ends if key[0] == "advantage"]
    assert len(advantages) == 4 * usual.split
    for _stage, step, part in advantages:
        both = [ends[name, step, part] for name in ("reward_collect", "style_collect")]
        assert ends["advantage", step, part] >= max(both)
    assert costs.load_s["style"] > 0 < costs.load_s["reward"]


def test_the_slowest_service_is_the_bound_and_the_advice(tmp_path: Path) -> None:
    workload = load(tmp_path, 1.0, 3.0, 4)
    policies = {name: preset(name, 4) for name in PRESETS}
    rows = predict(workload, policies)
    assert rows[-1].bound_by == "service of style"
    assert rows[-1].bounds_s["service of style"] == pytest.approx(4 * 16 * 3.0 / 4)
    said = advise(workload, rows, policies)[1]
    assert said.startswith("the service of style bounds")
    assert "16 calls x 3 s / 4 in flight" in said
    assert "12 in flight would make the GPUs the limit" in said


def test_the_limits_of_an_agent_are_swept(tmp_path: Path) -> None:
    workload = load(tmp_path, 1.0, 3.0, 4)
    found = sweep(workload, "style.concurrency:4:16", ["baseline"])
    assert [row[0].step_s for row in found.rows] == pytest.approx([15.5, 9.5, 6.5])
    assert turned(workload, "style.rpm", 30).beside["style_collect"].rpm == 30
    assert turned(workload, "reward.concurrency", 2).rewards.concurrency == 2
    with pytest.raises(ConfigError, match=r"did you mean 'style\.concurrency'"):
        parse_sweep("stile.concurrency:4:16", workload)


@pytest.mark.parametrize("policy", [*PRESETS, "both+stream"])
def test_the_trace_of_a_run_with_two_agents_is_planned(tmp_path: Path, policy: str) -> None:
    """What the plan of a run predicts for the run's own policy is what it was."""
    workload = load(tmp_path, 2.0, 6.0, 8)
    ran = simulate(workload, preset(policy, 4))[0]
    trace = Trace(ran.spans, meta={"policy": policy, "steps": 4})
    for agent, seconds in (("reward", 2.0), ("style", 6.0)):
        for step in range(1, 5):
            facts = {"collector": f"{agent}_collect", "step": step, "group": 0}
            trace.add(*(Mark("reward", agent, 1.0, 1.0 + seconds, facts) for _ in range(16)))
    facts = {"pipeline": workload.pipeline.facts(), "prompts": 8, "responses": 2, "mini_batches": 4}
    trace.meta["job"] = {**facts, "concurrency": 16, "agents": {"style": {"concurrency": 8}}}
    found = of_trace(trace, "trace.json", PlanConfig())
    assert (found.rewards.concurrency, found.beside["style_collect"].concurrency) == (16, 8)
    assert "agent 'style': its latencies are those of the run." in found.assumptions
    assert found.rewards.rpm is found.beside["style_collect"].rpm is None
    assert Outcome.of(found, preset(policy, 4)).end == pytest.approx(ran.wall, rel=0.05)
    faster = PlanConfig.model_validate({"agents": {"style": {"latency": 1.0}}})
    assert Outcome.of(of_trace(trace, "trace.json", faster), preset(policy, 4)).end < ran.wall
    trace.meta["job"]["agents"]["style"] |= {"rpm": 300.0}
    limited = of_trace(trace, "trace.json", PlanConfig())
    assert (limited.rewards.rpm, limited.beside["style_collect"].rpm) == (None, 300.0)
    freed = of_trace(trace, "trace.json", PlanConfig.model_validate({"agents": {"style": {"rpm": 6000}}}))
    assert freed.beside["style_collect"].rpm == 6000
    with pytest.raises(ConfigError, match=r"agents\.stile: .*did you mean 'style'"):
        of_trace(trace, "trace.json", PlanConfig.model_validate({"agents": {"stile": {"latency": 1.0}}}))
