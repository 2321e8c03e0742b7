"""For a number of GPUs a plan says whether a reward model had better share them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataflow.errors import ConfigError
from dataflow.planning.config import PlanConfig
from dataflow.planning.placing import _apart, _sharing, placings, sentences
from dataflow.planning.plan import make_plan
from dataflow.planning.simulation.simulate import simulate
from dataflow.planning.sources.trace import of_trace
from dataflow.planning.workload import Workload
from dataflow.policy import preset
from dataflow.timeline import perfetto
from tests.rigs.emulated_servers import SECONDS, Emulated, emulate

JUDGE = Emulated("sharing", base=0.01, each=0.002, tokens=30, slots=8)
QUICK = Emulated("batching", base=0.01, each=0.001)
WORK = sum(SECONDS.values())


def load(spec: Emulated, wake: float = 0.1) -> Workload:
    config = PlanConfig.model_validate({"reward": {"models": {"rm": {"wake": wake}}}})
    return of_trace(emulate(spec, 1, 0, 12), "a run", config)


@pytest.mark.slow
def test_a_quick_model_that_wakes_slowly_stays_on_its_own_gpus() -> None:
    found = placings(load(QUICK, wake=5.0), 8)
    assert not found[0].shared
    shared = next(each for each in found if each.shared)
    # Two GPUs trained in the run; eight are four times as fast.
    assert shared.step_s > WORK / 4 + 2 * 5.0
    assert (shared.training, shared.servers) == (8, 8)
    assert {each.training + each.servers for each in found if not each.shared} == {8}
    assert "placement=own is faster" in sentences(load(QUICK, wake=5.0), 8)[0]


@pytest.mark.slow
def test_a_slow_model_that_wakes_at_once_shares_them() -> None:
    # Its servers need all GPUs while training needs all GPUs, one after the other, with one policy for both.
    slow = load(JUDGE, wake=0.0)
    found = placings(slow, 2)
    assert [(each.shared, each.training, each.servers) for each in found] == [(True, 2, 2), (False, 1, 1)]
    assert "with 2 GPUs placement=colocated is faster" in sentences(slow, 2)[0]


def test_a_model_that_shared_gpus_is_planned_apart_and_back() -> None:
    own = load(QUICK, wake=1.0)
    shared = _sharing(own, "reward")
    assert {"wake_rewards", "sleep_rewards"} <= shared.pipeline.by_name.keys()
    assert _sharing(shared, "reward") is shared
    took = [simulate(each, preset("baseline", 1))[0].end for each in (own, shared, _apart(shared))]
    assert took[2] == took[0]
    # The log-probs, for 0.1 s beside the rewards before, come after them now.
    assert took[1] - took[0] == pytest.approx(own.steps * (2 * 1.0 + SECONDS["old_log_prob"]), rel=0.1)


@pytest.mark.slow
def test_the_command_says_which_is_faster(tmp_path: Path) -> None:
    perfetto.write(emulate(JUDGE, 1, 0, 12), tmp_path / "trace.json")
    assert any("with 4 GPUs placement=" in said for said in make_plan(str(tmp_path), ["gpus=4"]).advice)
    for arguments, said in (
        (["gpus=1"], "gpus=1: a server takes 1 and the trainer 1 or more; give more"),
        (["gpus=4", "placement=disaggregated"], "and a pool of GPUs each for trainer and engine"),
        (["gpus=4", "reward.latency=1"], "the run has 0 served reward models"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_plan(str(tmp_path), arguments)
    with pytest.raises(ConfigError, match="does not show how long servers take"):
        make_plan("examples/costs.yaml", ["gpus=4"])
