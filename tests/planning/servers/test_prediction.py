"""A plan from a run with a served reward model predicts other numbers of servers, which are emulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dataflow.errors import ConfigError
from dataflow.planning.config import PlanConfig
from dataflow.planning.plan import make_plan
from dataflow.planning.simulation.simulate import simulate
from dataflow.planning.sources.read import read_workload
from dataflow.planning.sources.trace import of_trace
from dataflow.policy import preset
from dataflow.timeline import perfetto
from tests.rigs.emulated_servers import Emulated, emulate

pytestmark = pytest.mark.slow

STEPS = 20
CLASSIFIER = Emulated("batching", base=0.05, each=0.01)
OVERHEAD = Emulated("batching", base=0.2, each=0.002)
RACE = Emulated("batching", base=0.5, each=0.15, slots=8, gathers=0.7)
JUDGE = Emulated("sharing", base=0.01, each=0.002, tokens=30, slots=8)
SLOW_JUDGE = replace(JUDGE, base=0.002, each=0.006)
WIDE_JUDGE = replace(JUDGE, concurrency=16, slots=16)


def plan(spec: Emulated, before: int, seed: int, **keys: object) -> float:
    """Seconds a step that a plan from a run foretells."""
    config = PlanConfig.model_validate({"reward": {"models": {"rm": keys}}})
    workload = of_trace(emulate(spec, before, seed, STEPS), "a run", config)
    account, _ = simulate(workload, preset("baseline", 1))
    return (account.end - account.begin) / STEPS


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1)])
@pytest.mark.parametrize(
    "spec",
    [CLASSIFIER, OVERHEAD, RACE, JUDGE, SLOW_JUDGE],
    ids=["classifier", "overhead", "race", "judge", "slow"],
)
def test_a_plan_foretells_another_number_of_servers(spec: Emulated, before: int, after: int, seed: int) -> None:
    real = emulate(spec, after, seed, STEPS).wall / STEPS
    assert plan(spec, before, seed, replicas=after) == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_plan_foretells_servers_that_have_fewer_requests_each(seed: int) -> None:
    real = emulate(WIDE_JUDGE, 2, seed, STEPS).wall / STEPS
    assert plan(WIDE_JUDGE, 1, seed, replicas=2) == pytest.approx(real, rel=0.05)


def test_an_extrapolation_is_said() -> None:
    config = PlanConfig.model_validate({"reward": {"models": {"rm": {"replicas": 1}}}})
    said = of_trace(emulate(WIDE_JUDGE, 2, 0, STEPS), "a run", config).assumptions
    assert any("16 requests in flight at a server are more than the 8 of the run" in sentence for sentence in said)


@pytest.mark.parametrize("spec", [CLASSIFIER, JUDGE])
def test_a_plan_foretells_the_run_itself(spec: Emulated) -> None:
    assert plan(spec, 2, 0) == pytest.approx(emulate(spec, 2, 0, STEPS).wall / STEPS, rel=0.03)


def test_fewer_requests_at_a_server_are_planned() -> None:
    real = emulate(replace(CLASSIFIER, slots=8), 2, 0, STEPS).wall / STEPS
    assert plan(CLASSIFIER, 2, 0, max_num_seqs=8) == pytest.approx(real, rel=0.05)


def test_the_command_plans_servers_and_advises_a_number(tmp_path: Path) -> None:
    perfetto.write(emulate(JUDGE, 1, 0, STEPS), tmp_path / "trace.json")
    found = make_plan(str(tmp_path), ["reward.models.rm.replicas=2", "sweep=reward.models.rm.replicas:1:4"])
    assert any(
        "model 'rm': 2 servers of 8 requests, 16 in flight in all" in said for said in found.workload.assumptions
    )
    assert any("servers (reward.models.rm.replicas) would make the GPUs the limit" in said for said in found.advice)
    assert found.sweeps[0].values == (1, 2, 4)
    times = [row[0].step_s for row in found.sweeps[0].rows]
    assert times == sorted(times, reverse=True)
    assert found.rows[0].step_s == pytest.approx(times[1])
    # The replay is of the run as it was, with one server.
    again = make_plan(str(tmp_path), []).replay
    assert found.replay is not None
    assert again is not None
    assert found.replay.step_s == again.step_s == pytest.approx(times[0])


def test_an_unknown_model_is_named(tmp_path: Path) -> None:
    perfetto.write(emulate(JUDGE, 1, 0, STEPS), tmp_path / "trace.json")
    with pytest.raises(ConfigError, match=r"reward\.models\.rmm: .*did you mean 'rm'"):
        read_workload(str(tmp_path), ["reward.models.rmm.replicas=2"])
    with pytest.raises(ConfigError, match=r"reward\.models\.rm: .* does not show how long its servers take"):
        read_workload("examples/costs.yaml", ["reward.models.rm.replicas=2"])


def test_without_endpoints_several_servers_are_not_told() -> None:
    trace = emulate(JUDGE, 2, 0, STEPS)
    bare = replace(trace, marks=[replace(m, args={"step": m.args["step"]}) for m in trace.marks])
    found = of_trace(bare, "a run", PlanConfig())
    assert found.rewards.servers is None
    assert any("which server had a request" in said for said in found.assumptions)


def test_a_run_of_one_load_says_that_another_is_a_guess() -> None:
    trace = emulate(JUDGE, 1, 0, STEPS)
    steps = {m.args["step"]: m.end for m in trace.marks}
    short = [replace(trace.marks[0], begin=end, end=end + 2.0, args={"step": s}) for s, end in steps.items()] * 8
    found = of_trace(replace(trace, marks=short), "a run", PlanConfig())
    assert found.rewards.servers is not None
    assert not found.rewards.servers.service_time.known
    assert any("is a guess" in said for said in found.assumptions)
